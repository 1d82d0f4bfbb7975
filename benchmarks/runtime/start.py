"""Must-show 3: from the request for a worker to the first step with it."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from benchmarks.runtime.harness import Running, running


def _request(job: Running, count: int) -> float:
    """Seconds from the resize request to the first committed step of the larger generation."""
    status = job.client.status()
    survivor, generation = status["members"][0], status["generation"]
    asked = time.monotonic()
    job.client.resize(count)
    deadline = asked + 60
    while time.monotonic() < deadline:
        grown = [s for s in job.timeline(survivor) if s.generation > generation and s.world == count]
        if grown:
            return grown[0].at_s - asked
        time.sleep(0.005)
    raise TimeoutError("the worker never joined")


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """`kind`: cold (a new python), fork (of the zygote, then the whole script), spare (already rehearsed)."""
    options = ["--workers", "1:2", "--start", "1", "--threads", "1"]
    options += {"cold": ["--cold"], "fork": [], "spare": ["--spares", "1"]}[kind]
    times = []
    with running(["--model", "small"], options) as job:
        job.members(1)
        for _ in range(rounds):
            job.settle(20)
            if kind == "spare":
                job.client.wait_for(lambda s: "ready" in s["workers"].values())
            times.append(_request(job, 2))
            job.members(2)
            job.client.resize(1)
            job.members(1)
    return {
        "median_s": round(statistics.median(times), 3),
        "largest_s": round(max(times), 3),
        "count": len(times),
    }


if __name__ == "__main__":
    print(json.dumps({"cold": measure("cold", 4), "fork": measure("fork", 6), "spare": measure("spare", 6)}))
