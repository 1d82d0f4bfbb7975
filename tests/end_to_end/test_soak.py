"""The soak's own judgement: it sees what it is meant to see. `make soak` is the soak itself."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.soak import verdict
from benchmarks.soak.harm import WEIGHTS, Harm
from benchmarks.soak.scripts import HOSTILE, Honest

from swell.domain import Event, EventKind


def _held(time_s: float, job_id: str, *slots: int) -> Event:
    return Event(time_s, EventKind.ALLOCATED, job_id=job_id, data={"gpus": slots})


def test_what_was_lost_or_doubled_is_found() -> None:
    stored = {"a-1": ("a", "finished"), "b-1": ("b", "finished"), "b-2": ("b", "running")}
    assert verdict.lost({"a": {"a-1"}, "c": {"c-1"}}, stored) == ["c: c-1"]
    assert verdict.doubled({"a": {"a-1"}}, stored) == ["b is in the store 2 times"]
    assert verdict.doubled({"a": {"a-1", "a-2"}}, {}) == ["a was answered with ['a-1', 'a-2']"]
    ends = [Event(3.0, EventKind.FINISHED, job_id="a", data={}) for _ in range(2)]
    assert verdict.log_problems(ends, 2) == ["a ended 2 times"]
    assert verdict.log_problems([_held(1.0, "a", 0), _held(2.0, "b", 1)], 2) == []
    assert "two jobs" in verdict.log_problems([_held(1.0, "a", 0), _held(2.0, "b", 0)], 2)[0]


def test_growth_is_seen_after_the_warm_up_only() -> None:
    def watched(mib: float, files: int) -> list[tuple[float, int, float, int]]:
        """A warm-up that grows, then this much more memory and so many more descriptors over a minute."""
        warm = [(float(i), 7, 100.0 + 5.0 * i, 20) for i in range(20)]
        late = [(20.0 + i, 7, 200.0 + mib * i / 60, 20 + files * i // 60) for i in range(60)]
        return [(0.0, 6, 900.0, 900), *warm, *late]

    flat = verdict.growth(watched(1.0, 0), 7)
    assert abs(flat["memory_mib_per_minute"] - 1.0) < 0.1 and verdict.not_flat(flat) == []
    assert len(verdict.not_flat(verdict.growth(watched(60.0, 0), 7))) == 1
    assert len(verdict.not_flat(verdict.growth(watched(60.0, 60), 7))) == 2
    assert verdict.not_flat(verdict.growth(watched(0.0, 0), 8)) != []


def test_a_sample_that_was_used_twice_is_found(tmp_path: Path) -> None:
    job = Honest("a", 4, 2, 1, {}, (), tmp_path / "a.json")
    assert "no result" in str(job.problem())
    job.out.write_text(json.dumps({"weight": [[0.5] * 4]}))
    assert job.problem() is None
    job.out.write_text(json.dumps({"weight": [[0.5, 1.0, 0.5, 0.5]]}))
    assert "not used exactly once" in str(job.problem())


def test_every_harm_can_be_done_and_every_hostile_script_is_a_script() -> None:
    assert all(callable(getattr(Harm, f"do_{name}")) for name in WEIGHTS)
    for name, text in HOSTILE.items():
        compile(text, name, "exec")
