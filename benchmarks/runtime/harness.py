"""Start a job, change it while it runs, and read the timeline its workers wrote."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

WORKLOAD = Path(__file__).with_name("workload.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step as a worker saw it."""

    number: int
    world: int
    generation: int
    at_s: float


class Running:
    """A job under `swell run`, in a directory of its own."""

    def __init__(self, root: Path, script: Path, arguments: list[str], options: list[str]) -> None:
        self.root = root
        self.out = root / "steps"
        self.out.mkdir()
        env = {**os.environ, "SWELL_HOME": str(root)}
        command = [sys.executable, "-m", "swell", "run", "--quiet", "--name", "bench", *options, str(script)]
        self.log = (root / "run.log").open("wb")
        self.process = subprocess.Popen(
            [*command, *arguments, "--out", str(self.out)], env=env, stdout=self.log, stderr=self.log
        )
        self.directory = JobDirectory(root / "jobs" / "bench")
        self.client = JobClient(self.directory, wait_s=10.0)

    def members(self, count: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the job trains with `count` members."""
        return self.client.wait_for(lambda s: len(s["members"]) == count and s["step"] > 0, timeout_s)

    def settle(self, steps: int, timeout_s: float = 60.0) -> None:
        """Wait for that many further steps."""
        start = self.client.status()["step"]
        self.client.wait_for(lambda s: s["step"] >= start + steps, timeout_s)

    def kill(self, worker: str, number: int = signal.SIGKILL) -> float:
        """Send a signal to a worker; returns when."""
        pid = self.client.status()["pids"][worker]
        now = time.monotonic()
        os.kill(pid, number)
        return now

    def timeline(self, worker: str) -> list[Step]:
        """The steps a worker committed so far."""
        return timeline(self.out / f"{worker}.steps")

    def stop(self) -> None:
        """End the job."""
        with contextlib.suppress(Exception):
            self.client.stop(0)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self.client.close()
        self.log.close()


def timeline(path: Path) -> list[Step]:
    """The steps that a worker has written to this file."""
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Step(int(a), int(b), int(c), float(d)) for a, b, c, d in (r for r in rows if len(r) == 4)]


@contextlib.contextmanager
def running(arguments: list[str], options: list[str], script: Path = WORKLOAD) -> Iterator[Running]:
    """A job that is ended, and its directory removed, whatever happens."""
    root = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    job = Running(root, script, arguments, options)
    try:
        yield job
    finally:
        job.stop()
        shutil.rmtree(root, ignore_errors=True)


def gaps(steps: list[Step]) -> list[float]:
    """Time from each step to the next."""
    return [b.at_s - a.at_s for a, b in pairwise(steps)]


def pause_at_switch(steps: list[Step], generation: int, around: int = 8) -> float | None:
    """What the switch to `generation` cost: the two steps around it minus a normal one of each size.

    The last step of the old size comes before the switch, the first of the new size after it; what is new to
    that one counts too. Workers leave inside the call that commits a step, so that step's row has the new
    generation already. Newcomers join when the next batch is drawn, after the row was written.
    """
    at = next((i for i, s in enumerate(steps) if s.generation == generation), None)
    if at and steps[at].world > steps[at - 1].world:
        at -= 1
    if at is None or at < around + 1 or at + around + 2 > len(steps):
        return None
    before = statistics.median(gaps(steps[at - 1 - around : at]))
    after = statistics.median(gaps(steps[at + 1 : at + 2 + around]))
    return (steps[at + 1].at_s - steps[at - 1].at_s) - before - after


def summary(values: list[float]) -> dict[str, float]:
    """Median, extremes and count, in milliseconds."""
    return {
        "median_ms": round(statistics.median(values) * 1e3, 2),
        "smallest_ms": round(min(values) * 1e3, 2),
        "largest_ms": round(max(values) * 1e3, 2),
        "count": len(values),
    }
