"""Must-show 2: kills with -9 at random moments of a step (3 -> 2), and a frozen worker."""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

from benchmarks.runtime.harness import Running, Step, gaps, running, summary


def _after(job: Running, survivor: str, kill_s: float, timeout_s: float = 20.0) -> list[Step]:
    """The survivor's steps, once it has made some in the generation after the kill."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        steps = job.timeline(survivor)
        before = [s for s in steps if s.at_s <= kill_s]
        if before and any(s.generation > before[-1].generation for s in steps[len(before) :]):
            return steps
        time.sleep(0.01)
    raise TimeoutError(f"no step within {timeout_s} s after a kill")


def _pause(steps: list[Step], kill_s: float) -> float:
    """From the last step of the broken generation to the next, minus a normal step before the kill."""
    last = max(i for i, s in enumerate(steps) if s.at_s <= kill_s)
    while steps[last + 1].generation == steps[last].generation:
        last += 1  # the step under way was complete when its member died
    normal = statistics.median(gaps(steps[max(0, last - 12) : last + 1]))
    return steps[last + 1].at_s - steps[last].at_s - normal


def measure(model: str, kills: int = 50, seed: int = 0) -> dict[str, Any]:
    """Kill `kills` times; each victim is replaced before the next."""
    rng = random.Random(seed)
    pauses: list[float] = []
    lost = 0
    with running(["--model", model], ["--workers", "1:3", "--threads", "1"]) as job:
        job.members(3)
        for _ in range(kills):
            status = job.client.wait_for(lambda s: len(s["members"]) == 3)
            survivor = rng.choice(status["members"])
            generation = status["generation"]
            while sum(s.generation == generation for s in job.timeline(survivor)) < 8:
                time.sleep(0.02)
            victim = rng.choice([m for m in status["members"] if m != survivor])
            step_s = statistics.median(gaps(job.timeline(survivor)[-8:]))
            time.sleep(rng.uniform(0, step_s))
            kill_s = job.kill(victim)
            steps = _after(job, survivor, kill_s)
            pauses.append(_pause(steps, kill_s))
            numbers = [s.number for s in steps]
            lost += sum(b != a + 1 for a, b in pairwise(numbers))
        inside = [e["pause_s"] for e in job.directory.events() if e["event"] == "recovery"]
    return {**summary(pauses), "steps_lost_or_repeated": lost, "inside": summary(inside)}


def frozen(silent_after_s: float = 2.0) -> dict[str, float]:
    """How long after SIGSTOP the others train again, and that the woken worker does no harm."""
    options = ["--workers", "1:3", "--threads", "1", "--silent-after", f"{silent_after_s}s"]
    with running(["--model", "small"], options) as job:
        status = job.members(3)
        job.settle(30)
        survivor, victim = status["members"][0], status["members"][1]
        stopped_s = job.kill(victim, signal.SIGSTOP)
        steps = _after(job, survivor, stopped_s)
        first = next(s for s in steps if s.at_s > stopped_s and s.generation > status["generation"])
        return {"detection_s": silent_after_s, "training_again_after_s": round(first.at_s - stopped_s, 3)}


if __name__ == "__main__":
    print(json.dumps({m: measure(m, 12) for m in ("small", "large")} | {"frozen": frozen()}, indent=1))
