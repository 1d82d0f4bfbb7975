"""A job's progress in the log: bounded, evenly spread, and shown as curves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.control.conftest import make_record

from swell.control import conductor
from swell.control.conductor import ProgressLog
from swell.control.desks import series
from swell.control.store import Store
from swell.domain import Event, EventKind


def _report(time_s: float, **data: object) -> Event:
    return Event(time_s, EventKind.PROGRESS, job_id="a", data=data)


def test_a_long_job_has_a_bounded_number_of_points_spread_over_its_life(
    open_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "MOST_LOGGED", 40)
    store = open_store()
    store.accept(make_record("a"), None, [])
    log = ProgressLog(store)
    for tick in range(2000):
        now_s = tick * 0.5
        if tick == 1000:
            log = ProgressLog(store)  # the control plane was restarted
        log.heard(_report(now_s, done=tick))
        if due := log.due(()):
            store.save([], list(due.values()))
            log.written("a", now_s)
        assert store.tally("a", EventKind.PROGRESS)[0] <= 40
    times = [event.time_s for _, event in store.events(job_id="a")]
    assert len(times) >= 20 and times[0] == 0.0 and times[-1] > 900
    assert np.diff(times).max() < 100, "no part of its life is missing"


def test_the_last_report_of_a_job_that_ended_goes_into_the_log(open_store: Callable[[], Store]) -> None:
    log = ProgressLog(open_store())
    for time_s in (1.0, 1.5):
        log.heard(_report(time_s))
        if log.due(()):
            log.written("a", time_s)
    assert log.due(()) == {}
    assert log.due({"a"}) == {"a": _report(1.5)}
    log.written("a", 1.5)
    assert log.due({"a"}) == {}


def test_other_jobs_and_other_events_are_not_thinned(open_store: Callable[[], Store]) -> None:
    store = open_store()
    kinds = [EventKind.PROGRESS, EventKind.RESIZED]
    for name in "ab":
        store.accept(make_record(name), None, [Event(1.0, kind, job_id=name) for kind in kinds * 4])
    store.thin("a", EventKind.PROGRESS)
    assert [store.tally(name, kind)[0] for name in "ab" for kind in kinds] == [2, 4, 4, 4]


def test_curves_have_one_length_and_nothing_where_the_job_said_nothing() -> None:
    events = [
        Event(0.0, EventKind.SUBMITTED, job_id="a"),
        Event(1.0, EventKind.ALLOCATED, job_id="a", data={"gpus": [0], "pause_s": 2.0}),
        _report(3.0, done=1, of=10, workers=1, loss=2.5),
        Event(3.5, EventKind.WORKER_LOST, job_id="a", data={"worker": "w0", "reason": "ended by SIGKILL"}),
        _report(4.0, done=2, of=10, workers=2, metrics={"accuracy": 0.5}),
    ]
    found = series(events)
    assert found["time_s"] == [3.0, 4.0]
    assert found["curves"]["done"] == [1, 2] and found["curves"]["loss"] == [2.5, None]
    assert found["metrics"] == {"accuracy": [None, 0.5]}
    assert [change["kind"] for change in found["changes"]] == ["allocated", "worker_lost"]


def test_the_first_report_of_an_epoch_goes_into_the_log_soon(open_store: Callable[[], Store]) -> None:
    log, written = ProgressLog(open_store()), []
    for tick in range(17):
        now_s = tick * 0.5
        log.heard(_report(now_s, epoch=tick // 7))
        if log.due(()):
            written.append(now_s)
            log.written("a", now_s)
    assert written == [0.0, 2.0, 3.5, 5.5, 7.0], "epochs begin at 3.5 and 7 s"
    log.heard(_report(7.1, epoch=9))
    assert log.due(()) == {}, "epochs that take no time do not fill the log"
