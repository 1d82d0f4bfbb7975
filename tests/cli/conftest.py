"""The command as people run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Swell = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = [sys.executable, "-c", "from swell.cli import main; main(prog_name='swell')"]


@pytest.fixture
def swell(tmp_path: Path) -> Swell:
    """Run `swell` with some words in a directory of its own; nothing may take longer than two minutes."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "200"} | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def workload(swell: Swell, tmp_path: Path) -> Path:
    """A small workload of our generator."""
    path = tmp_path / "jobs.csv"
    done = swell("generate", "--jobs", 30, "--hours", 2, "--seed", 3, "--deadlines", 0.5, "-o", path)
    assert done.returncode == 0, done.stderr
    return path
