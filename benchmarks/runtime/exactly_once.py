"""Must-show 6: random schedules, and every sample of every epoch in the committed steps exactly once.

Hypothesis draws the schedules (the same strategy as tests/train/test_exactly_once.py).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.runtime.arena import Arena

KINDS = ["resize", "resize", "kill", "kill", "kill_all", "coordinator", "restart", "freeze"]
EVENT = st.tuples(st.sampled_from([0.0, 0.02, 0.1, 0.3]), st.sampled_from(KINDS), st.integers(1, 4))
SCHEDULE = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 4),
        "samples": st.sampled_from([33, 50, 64]),
        "batch": st.sampled_from([8, 16]),
        "epochs": st.just(8),
        "pace": st.sampled_from([0.0, 0.005, 0.01]),
        "checkpoint_every": st.sampled_from([1, 3, 10]),
        "mode": st.sampled_from(["fixed", "fixed", "consistent"]),
        "loader_workers": st.sampled_from([0, 0, 2]),
        "first": st.floats(0.1, 0.6),
        "events": st.lists(EVENT, min_size=1, max_size=5),
    }
)


def timed(schedule: dict[str, Any]) -> dict[str, Any]:
    """The schedule as the arena takes it: the first event when the job is up."""
    events = [list(event) for event in schedule["events"]]
    events[0][0] = schedule["first"]
    return {**schedule, "events": events}


def measure(schedules: int = 200, budget_s: float = 900.0) -> dict[str, Any]:
    """Play up to `schedules` schedules (fewer if the time is over) and count what went wrong."""
    arena = Arena()
    arena.play({"workers": 1, "epochs": 1, "pace": 0})
    begin = time.monotonic()
    played: list[dict[str, Any]] = []
    problems: list[Any] = []

    @settings(
        max_examples=schedules,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEDULE)
    def play(schedule: dict[str, Any]) -> None:
        if time.monotonic() - begin > budget_s:
            return
        result = arena.play(timed(schedule))
        played.append(schedule)
        if result["problem"] is not None:
            problems.append({"schedule": schedule, **result})

    try:
        play()
    finally:
        arena.close()
    kinds: dict[str, int] = {}
    for schedule in played:
        for _, kind, _ in schedule["events"]:
            kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "schedules": len(played),
        "failed": len(problems),
        "events": kinds,
        "wall_s": round(time.monotonic() - begin, 1),
        "problems": problems[:3],
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 200), indent=1))
