"""Must-show 1: the pause of a join (2 -> 3) of a prepared worker and of a leave (3 -> 2)."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.runtime.harness import Running, pause_at_switch, running, summary


def _follow(job: Running, count: int) -> tuple[str, int]:
    job.client.resize(count)
    time.sleep(0.5)  # asking all the time would take processor time from the steps it measures
    status = job.members(count)
    generation = status["generation"]
    survivor = status["members"][0]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        steps = job.timeline(survivor)
        if sum(s.generation == generation for s in steps) >= 20:
            return survivor, generation
        time.sleep(0.3)
    raise TimeoutError("the job does not go on after a switch")


def measure(model: str, rounds: int = 10) -> dict[str, Any]:
    """Grow and shrink `rounds` times; the pauses seen by the first member."""
    joins, leaves = [], []
    options = ["--workers", "1:3", "--start", "2", "--threads", "1", "--spares", "1"]
    with running(["--model", model], options) as job:
        job.members(2)
        job.settle(20)
        for _ in range(rounds):
            for count, pauses in ((3, joins), (2, leaves)):
                job.client.wait_for(lambda s: "ready" in s["workers"].values())
                survivor, generation = _follow(job, count)
                if (pause := pause_at_switch(job.timeline(survivor), generation)) is not None:
                    pauses.append(pause)
        events = [e for e in job.directory.events() if e["event"] == "switch"]
    # The gap between steps also holds the noise of two steps; the time inside the switch does not.
    inside = {count: summary([e["pause_s"] for e in events if e["world"] == count]) for count in (3, 2)}
    return {
        "join": summary(joins) | {"inside": inside[3]},
        "leave": summary(leaves) | {"inside": inside[2]},
    }


if __name__ == "__main__":
    import json

    print(json.dumps({m: measure(m) for m in ("small", "large")}, indent=1))
