"""Must-show 1: the pause of a join (2 -> 3) of a prepared worker and of a leave (3 -> 2)."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.runtime import calm
from benchmarks.runtime.harness import Running, pause_at_switch, running, summary

CALM = 0.04
"""The part of all processors that other programs may take in a round that counts."""


def _follow(job: Running, count: int) -> tuple[str, int]:
    job.client.resize(count)
    time.sleep(0.5)  # asking all the time would take processor time from the steps it measures
    status = job.members(count)
    generation = status["generation"]
    survivor = status["members"][0]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        steps = job.timeline(survivor)
        if sum(s.generation == generation for s in steps) >= 20:
            return survivor, generation
        time.sleep(0.3)
    raise TimeoutError("the job does not go on after a switch")


def measure(model: str, rounds: int = 10, budget_s: float = 240.0) -> dict[str, Any]:
    """Grow and shrink; the pauses seen by the first member, in the calmest `rounds` of either kind.

    On a machine that others use too, rounds are repeated until enough of them were calm or the time is over.
    """
    found: dict[int, list[tuple[float, float, float]]] = {3: [], 2: []}
    options = ["--workers", "1:3", "--start", "2", "--threads", "1", "--spares", "1"]
    begin = time.monotonic()
    with running(["--model", model], options) as job:
        job.members(2)
        job.settle(20)
        while min(map(_calm, found.values())) < rounds and time.monotonic() - begin < budget_s:
            for count, pauses in found.items():
                job.client.wait_for(lambda s: "ready" in s["workers"].values())
                before = calm.usage(job.process.pid)
                survivor, generation = _follow(job, count)
                others = calm.taken_by_others(before, calm.usage(job.process.pid))
                inside = [e for e in job.directory.events() if e["event"] == "switch"][-1]
                if (pause := pause_at_switch(job.timeline(survivor), generation)) is not None:
                    pauses.append((others, pause, inside["pause_s"]))
    return {name: _figures(found[count], rounds) for count, name in ((3, "join"), (2, "leave"))}


def _calm(pauses: list[tuple[float, float, float]]) -> int:
    return sum(others < CALM for others, _, _ in pauses)


def _figures(pauses: list[tuple[float, float, float]], rounds: int) -> dict[str, Any]:
    chosen = sorted(pauses)[:rounds]
    # The gap between steps also holds the noise of two steps; the time inside the switch does not.
    return summary([pause for _, pause, _ in chosen]) | {
        "inside": summary([inside for _, _, inside in chosen]),
        "taken_by_others": round(chosen[-1][0], 3),
        "rounds": len(pauses),
    }


if __name__ == "__main__":
    import json

    print(json.dumps({m: measure(m) for m in ("small", "large")}, indent=1))
