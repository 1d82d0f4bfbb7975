"""Compile what numba compiles in swell, so that the next process finds it in the cache.

python scripts/compile.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

from click.testing import CliRunner

from swell.cli import main

POLICIES = (("elasticflow", "tide"), ("pollux", "max-min", "afs-l", "oasis", "optimus"))
"""Between them they use every compiled function that takes long; those in one group have most in common."""


def compile_for(policies: tuple[str, ...]) -> None:
    """Simulate a few jobs under each policy: a function is compiled when it is first called."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = str(Path(folder, "jobs.csv"))
        chosen = [word for policy in policies for word in ("--policy", policy)]
        for words in (
            ["generate", "--jobs", "20", "-o", jobs],
            ["simulate", jobs, *chosen, "--cluster", "2x4", "-j", "1"],
        ):
            done = CliRunner().invoke(main, words)
            if done.exit_code:
                raise RuntimeError(
                    done.output
                )  # a SystemExit would end the process, and the pool would wait for ever


if __name__ == "__main__":
    with multiprocessing.Pool(len(POLICIES)) as pool:
        pool.map(compile_for, POLICIES)
