"""Compile what numba compiles in swell, so that whoever needs it next finds it in the cache.

python scripts/compile.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from click.testing import CliRunner

from swell.cli import main

POLICIES = ("elasticflow", "max-min", "tide", "pollux", "afs-l", "oasis", "optimus")
"""Between them they use every compiled function that takes long."""


def compile_all() -> None:
    """Simulate a few jobs under each policy: a function is compiled when it is first called."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = str(Path(folder, "jobs.csv"))
        chosen = [word for policy in POLICIES for word in ("--policy", policy)]
        for words in (
            ["generate", "--jobs", "20", "-o", jobs],
            ["simulate", jobs, *chosen, "--cluster", "2x4", "-j", "1"],
        ):
            done = CliRunner().invoke(main, words)
            if done.exit_code:
                raise SystemExit(done.output)


if __name__ == "__main__":
    compile_all()
