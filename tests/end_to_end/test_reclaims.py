"""Slots that a service wants back, live: the small form of benchmarks/reclaims.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.reclaim_stages import STAGES, stages
from benchmarks.reclaims import BOUND_S, figures, reclaim_at_random, verdict

from swell.domain import Event, EventKind

pytestmark = pytest.mark.timeout(300)


def test_slots_are_left_at_once_and_no_sample_is_lost(tmp_path: Path) -> None:
    found = reclaim_at_random(tmp_path, reclaims=3, jobs=2, slots=3, seed=1)
    assert found["problems"] == []
    assert found["reclaims"] == 3 and found["median_s"] < 20.0, "the bound is for a machine that is not busy"


def test_the_time_of_a_reclaim_is_divided_into_its_stages() -> None:
    held = [Event(s, EventKind.HELD, data={"reservation": "service"}) for s in (10.1, 99.0)]
    early = [{"event": "exited", "time_s": 10.2}]
    late: list[dict[str, Any]] = [
        {"event": "generation", "time_s": 9.0},
        {"event": "resize", "time_s": 10.3},
        {"event": "generation", "time_s": 10.4},
        {"event": "exited", "time_s": 10.9},
        {"event": "exited", "time_s": 50.0},
    ]
    found = stages(held, [early, late], 10.0, 11.0)
    assert found == {"chosen": 0.1, "ordered": 0.2, "switched": 0.1, "ended": 0.5, "noticed": 0.1}
    assert stages([], [], 10.0, 11.0) == dict.fromkeys(STAGES, 0.0) | {"noticed": 1.0}


def test_one_late_reclaim_or_one_problem_fails_the_verdict() -> None:
    assert verdict([0.1, BOUND_S]) == "passed"
    assert verdict([0.1, 2.1]) == "failed: 1 of 2 reclaims took more than 2 s"
    assert verdict([0.1], ["a job failed"]) == "failed: 1 problems"
    assert figures([0.1] * 99 + [3.0]) == {"median_s": 0.1, "p99_s": 0.1, "worst_s": 3.0, "over_bound": 1}
