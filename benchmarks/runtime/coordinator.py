"""Must-show 9, its last part: the coordinator killed and restarted, and no step lost."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from typing import Any

from benchmarks.runtime.harness import Running, gaps, running
from swell.train.agent.client import JobClient


def _kill(job: Running) -> None:
    path = job.directory.path / "coordinator.json"
    old = json.loads(path.read_text())["pid"]
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while json.loads(path.read_text())["pid"] == old:
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinator was not restarted")
        time.sleep(0.01)
    job.client.close()
    job.client = JobClient(job.directory, wait_s=10)
    job.client.wait_for(lambda s: len(s["pids"]) == 2)


def measure(kills: int = 10) -> dict[str, Any]:
    """Kill the coordinator `kills` times under a training job."""
    with running(["--model", "small", "--pace", "0.01"], ["--workers", "1:3", "--start", "2"]) as job:
        status = job.members(2)
        for _ in range(kills):
            job.settle(10)
            _kill(job)
        job.client.resize(3)
        job.members(3)
        steps = job.timeline(status["members"][0])
    numbers = [s.number for s in steps]
    return {
        "kills": kills,
        "steps": len(steps),
        "steps_lost_or_repeated": sum(b != a + 1 for a, b in pairwise(numbers)),
        "generations": len({s.generation for s in steps}),
        "largest_gap_ms": round(max(gaps(steps)) * 1e3, 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
