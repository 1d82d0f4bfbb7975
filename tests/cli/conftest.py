"""The command as people run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import Commands

from swell.engines.nursery import Nursery

Swell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True, scope="session")
def _prepared(nursery: Nursery) -> None:
    """Jobs of `swell up` start in a fraction of a second."""


@pytest.fixture
def swell(tmp_path: Path, commands: Commands) -> Swell:
    """Run `swell` with some words in a directory of its own; nothing may take longer than two minutes."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"COLUMNS": "200"} | environment
        return commands.run([str(word) for word in words], tmp_path, env, timeout_s=120)

    return run


@pytest.fixture
def workload(swell: Swell, tmp_path: Path) -> Path:
    """A small workload of our generator."""
    path = tmp_path / "jobs.csv"
    done = swell("generate", "--jobs", 30, "--hours", 2, "--seed", 3, "--deadlines", 0.5, "-o", path)
    assert done.returncode == 0, done.stderr
    return path
