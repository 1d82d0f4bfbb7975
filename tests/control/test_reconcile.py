"""What should run against what does run."""

from __future__ import annotations

from dataclasses import replace

from tests.control.conftest import make_record

from swell.control.lifecycle import (
    BEHIND_S,
    LOST_AFTER_S,
    UNHEARD_S,
    AskAgain,
    EndStray,
    FeedInput,
    JobSeen,
    Reconciler,
    Started,
    Vanished,
)
from swell.control.model import Phase
from swell.engines import Observed, RunState

RUNNING = make_record("a", phase=Phase.RUNNING, wanted=(0,))
SEEN = Observed(job_id="a", state=RunState.RUNNING, placement=(0,), target=(0,))


def test_a_job_that_is_seen_is_told_so_and_a_stray_is_ended() -> None:
    stray = Observed(job_id="x", state=RunState.RUNNING)
    found = list(Reconciler().differences({"a": RUNNING}, {"a": SEEN, "x": stray}, 1.0))
    assert found == [FeedInput("a", JobSeen(SEEN)), EndStray("x")]


def test_a_job_that_is_missing_has_vanished_after_a_while() -> None:
    reconciler, records = Reconciler(), {"a": RUNNING}
    assert list(reconciler.differences(records, {}, 10.0)) == []
    assert list(reconciler.differences(records, {}, 10.0 + LOST_AFTER_S / 2)) == []
    assert list(reconciler.differences(records, {}, 10.0 + LOST_AFTER_S)) == [FeedInput("a", Vanished())]
    assert list(reconciler.differences(records, {}, 10.0 + LOST_AFTER_S)) == [], "it is given time again"


def test_a_job_that_is_back_in_time_has_not_vanished() -> None:
    reconciler, records = Reconciler(), {"a": RUNNING}
    list(reconciler.differences(records, {}, 10.0))
    list(reconciler.differences(records, {"a": SEEN}, 11.0))
    assert list(reconciler.differences(records, {}, 10.0 + LOST_AFTER_S)) == []


def test_after_a_restart_a_job_that_nobody_started_is_started() -> None:
    reconciler = Reconciler()
    reconciler.came_up("a")
    assert list(reconciler.differences({"a": RUNNING}, {}, 10.0)) == [AskAgain("a")]
    assert list(reconciler.differences({"a": RUNNING}, {}, 10.0)) == []


def test_jobs_that_need_not_run_are_not_missed() -> None:
    queued, paused = make_record("q"), make_record("p", phase=Phase.PAUSED)
    reconciler = Reconciler()
    for now_s in (0.0, 100.0):
        assert list(reconciler.differences({"q": queued, "p": paused}, {}, now_s)) == []


def test_a_job_that_lacks_workers_for_long_is_asked_for_again() -> None:
    wants_two = make_record("a", phase=Phase.RUNNING, wanted=(0, 1))
    fewer = Observed(job_id="a", state=RunState.RUNNING, placement=(0,), target=(0, 1))
    whole = Observed(job_id="a", state=RunState.RUNNING, placement=(0, 1), target=(0, 1))
    reconciler, records = Reconciler(), {"a": wants_two}
    assert list(reconciler.differences(records, {"a": fewer}, 0.0)) == [FeedInput("a", JobSeen(fewer))]
    assert reconciler.behind_s("a", 12.0) == 12.0
    assert AskAgain("a") in list(reconciler.differences(records, {"a": fewer}, BEHIND_S))
    list(reconciler.differences(records, {"a": whole}, BEHIND_S + 1))
    assert reconciler.behind_s("a", BEHIND_S + 1) == 0.0


def test_a_job_that_trains_though_its_start_was_never_reported_has_started_after_a_while() -> None:
    reconciler, records = Reconciler(), {"a": RUNNING}
    for now_s in (10.0, 10.0 + UNHEARD_S / 2):
        assert list(reconciler.differences(records, {"a": SEEN}, now_s)) == [FeedInput("a", JobSeen(SEEN))]
    started = FeedInput("a", Started((0,), 0.0))
    assert started in reconciler.differences(records, {"a": SEEN}, 10.0 + UNHEARD_S)
    records["a"] = replace(RUNNING, held=(0,))
    assert started not in reconciler.differences(records, {"a": SEEN}, 20.0)
