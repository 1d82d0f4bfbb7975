"""The engine that pretends: it takes time and slots like a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.domain import Cluster, InputError, JobRequest
from swell.engines import Engine, Launch, RunState
from swell.engines.null import NullEngine


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _launch(job_id: str) -> Launch:
    request = JobRequest(name=job_id, script="train.py")
    return Launch(job_id=job_id, request=request, job_dir=Path("nowhere"))


def test_a_job_takes_its_time_and_keeps_it_over_a_stop() -> None:
    clock = Clock()
    engine = NullEngine(Cluster.parse("1x4"), duration_s=10.0, clock=clock)
    _: Engine = engine  # it is one
    engine.apply(_launch("a"), (0, 1))
    clock.now_s += 6.0
    assert engine.observe()["a"].state is RunState.RUNNING
    engine.apply(_launch("a"), ())
    clock.now_s += 100.0
    assert engine.observe()["a"].state is RunState.STOPPED
    engine.apply(_launch("a"), (2,))
    clock.now_s += 3.9
    assert engine.observe()["a"].state is RunState.RUNNING
    engine.apply(_launch("a"), (2, 3))
    clock.now_s += 0.2
    seen = engine.observe()["a"]
    assert (seen.state, seen.placement) == (RunState.FINISHED, (2, 3))
    engine.end("a")
    assert engine.observe() == {}


def test_it_reports_each_job_once_and_counts_slots() -> None:
    engine = NullEngine(Cluster.parse("1x4"), duration_s=10.0)
    engine.apply(_launch("a"), (0, 1))
    engine.apply(_launch("b"), (2,))
    engine.apply(_launch("a"), (0,))
    engine.apply(_launch("c"), ())
    told = [(report.job_id, report.kind) for report in engine.reports()]
    first = [(job_id, kind) for job_id in "ab" for kind in ("started", "progress")]
    assert told == [*first, ("a", "resized")]
    assert list(engine.reports()) == []
    assert engine.most_used == 3
    assert "c" not in engine.observe()


def test_logs_are_read_from_an_offset() -> None:
    engine = NullEngine(Cluster.parse("1x1"))
    whole, end = engine.logs("a", Path())
    assert engine.logs("a", Path(), offset=2, limit=3) == (whole[2:5], 5)
    assert engine.logs("a", Path(), offset=end) == (b"", end)


def test_a_duration_below_nothing_is_refused() -> None:
    with pytest.raises(InputError):
        NullEngine(Cluster.parse("1x1"), duration_s=-1.0)
