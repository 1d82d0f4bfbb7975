"""What is to be done for a job next, and which slots count as its own: events in, steps and reports out."""

from __future__ import annotations

import pytest

from swell.engines import RunState, job_state
from swell.engines.border import BadMessage, read_event
from swell.engines.job_state import (
    END_GRACE_S,
    NOTE_END_S,
    RESTART_S,
    STOP_GRACE_S,
    UNBORN_S,
    JobStage,
    JobState,
    Outcome,
    ReportedWorkers,
    Step,
)
from swell.engines.supervisor import STOPPED
from swell.train.agent.protocol import Began, Exited, GaveUp, LeftOut
from swell.train.agent.story import MOST_STORY

FINISHED = Outcome(RunState.FINISHED, 0, "")
SAVED = Outcome(RunState.STOPPED, 0, STOPPED)
LISTEN = (Step.CONNECT, Step.SEND_TARGET)


def on(*slots: int) -> ReportedWorkers:
    """Members w0, w1, ... on these slots."""
    live: dict[str, int | None] = {f"w{number}": slot for number, slot in enumerate(slots)}
    return ReportedWorkers(live=live, members=set(live), former=set(live))


def steps(job: JobState, now_s: float = 0.0) -> tuple[Step, ...]:
    return job.next_steps(now_s, silent=False)


def test_a_job_that_says_it_has_had_more_workers_than_there_can_be_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_state, "MOST_WORKERS", 6)
    workers = on(0, 1)  # two that live, and the same two as members
    workers.follow(Began(("w0", "w1")))
    with pytest.raises(BadMessage, match="more than 6 workers"):
        workers.follow(Began(("w0", "w1", "w2")))


def test_it_tells_what_happened_last_in_short_lines_and_notices_what_cannot_be() -> None:
    job = JobState(wanted=(0,))
    job.started((0,), 1.0)
    job.happened(Began(tuple(f"w{number}" for number in range(50_000))))
    started, began = job.story()
    assert started == "started((0,), 1.0) -> [('started', {'gpus': (0,)})]"
    assert began.startswith("happened(Began(members=('w0', 'w1', ") and len(began) < 300
    for number in range(200):
        job.happened(Exited(f"w{number}", 0))
    assert len(job.story()) == MOST_STORY
    job.validate()
    job.told = (0, 0)
    with pytest.raises(AssertionError, match=r"a slot was told twice\nhappened\(Exited"):
        job.validate()


# -- its life ----------------------------------------------------------------------------------------------


def test_a_job_is_started_when_slots_are_wanted_and_again_after_a_moment_if_its_start_failed() -> None:
    job = JobState()
    assert steps(job) == (Step.READ_OUTCOME,)
    assert job.wish((0,), 10.0) == [] and steps(job, 10.0) == (Step.START,)
    assert job.started((0,), 10.0) == [("started", {"gpus": (0,)})]
    assert job.stage is JobStage.STARTING and steps(job, 10.0) == LISTEN
    job.gone(None, 10.1)
    assert job.observed("a") is None, "the control plane sees that the job has vanished"
    job.wish((0,), 10.2)
    assert steps(job, 10.2) == () and steps(job, 10.0 + RESTART_S) == (Step.START,)


def test_a_job_runs_once_it_reports_progress_and_no_longer_when_no_member_is_left() -> None:
    job = JobState(stage=JobStage.STARTING, wanted=(0,), workers=on(0))
    job.progressed()
    assert job.stage is JobStage.RUNNING
    job.happened(Exited("w0", -9))
    assert job.stage is JobStage.STARTING


def test_a_job_that_has_trained_saves_its_state_and_is_killed_if_that_takes_too_long() -> None:
    job = JobState(stage=JobStage.RUNNING, wanted=(0,), told=(0,), workers=on(0))
    job.wish((), 5.0)
    assert steps(job, 5.0) == LISTEN and job.next_target((), frozenset(), 5.0) == ()
    assert job.stage is JobStage.STOPPING and steps(job, 5.0 + STOP_GRACE_S) == (Step.CONNECT,)
    assert steps(job, 5.1 + STOP_GRACE_S) == (Step.CONNECT, Step.KILL)
    job.gone(None, 100.0)
    assert job.outcome == SAVED and steps(job, 100.0) == ()


def test_a_job_that_has_not_trained_yet_is_stopped_at_once_unless_it_need_not_report() -> None:
    job = JobState()
    job.started((0,), 0.0)
    assert job.next_steps(1.0, silent=True) == LISTEN
    assert steps(job, UNBORN_S) == LISTEN, "it may have trained without a word to this engine"
    assert steps(job, 1.0) == (Step.TERMINATE,)
    assert job.stage is JobStage.STOPPING and steps(job, 1.0 + END_GRACE_S) == ()
    assert steps(job, 1.1 + END_GRACE_S) == (Step.KILL,)


def test_a_job_that_another_engine_started_is_asked_to_save_its_state() -> None:
    job = JobState()
    job.started((0,), 0.0)
    job.gone(None, 0.1)
    job.found_running()
    assert steps(job, 0.2) == LISTEN


@pytest.mark.parametrize("stage", [JobStage.STARTING, JobStage.RUNNING, JobStage.STOPPING])
def test_a_job_that_is_to_end_is_terminated_then_killed_then_forgotten(stage: JobStage) -> None:
    job = JobState(stage=stage, to_end=True, kill_s=1000.0)
    assert steps(job, 0.0) == (Step.TERMINATE,) and job.observed("a") is None
    assert steps(job, END_GRACE_S) == () and steps(job, END_GRACE_S + 0.1) == (Step.KILL,)
    job.gone(None, 9.0)
    assert steps(job, 9.0) == (Step.FORGET,)


def test_a_job_that_stops_for_a_service_is_started_again_on_its_other_slots() -> None:
    job = JobState(stage=JobStage.STOPPING, wanted=(4,), told=(0, 1), workers=on(0, 2))
    job.gone(SAVED, 1.0)
    assert job.wanted == (4,) and job.outcome is None and not job.slots(1.0)
    assert steps(job, 1.0) == (Step.START,)


def test_a_job_that_is_over_is_not_started_again_whatever_is_wanted() -> None:
    job = JobState(outcome=FINISHED)
    assert job.wish((0,), 0.0) == [] and job.wanted == () and steps(job) == ()
    stopped = JobState(outcome=SAVED)
    stopped.wish((0,), 0.0)
    assert steps(stopped) == (Step.START,)


def test_a_job_wanted_again_before_it_was_told_to_stop_is_reported_where_it_is() -> None:
    job = JobState(stage=JobStage.RUNNING, told=(0, 1))
    assert job.wish((1, 2), 0.0) == [("started", {"gpus": (0, 1), "pause_s": 0.0})]
    assert job.wish((2,), 0.0) == []


# -- its slots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "kept"), [(None, {0, 1, 2}), (FINISHED, {0, 1, 2}), (SAVED, set())], ids=str
)
def test_a_job_whose_processes_are_gone_keeps_its_slots_unless_it_gave_them_back(
    outcome: Outcome | None, kept: set[int]
) -> None:
    job = JobState(stage=JobStage.RUNNING, wanted=() if outcome else (0, 1), told=(0, 1), workers=on(0, 2))
    job.gone(outcome, 5.0)
    assert job.slots(5.0) == kept and not job.workers.live and not job.wanted
    assert job.slots(5.1 + NOTE_END_S) == set()


def test_a_job_does_not_get_a_slot_that_its_own_leaving_worker_is_on() -> None:
    workers = ReportedWorkers(live={"w0": 0, "w1": 1}, members={"w0"}, former={"w0", "w1"})
    job = JobState(stage=JobStage.RUNNING, wanted=(0, 1), told=(0,), workers=workers)
    assert job.next_target((0, 1), frozenset(), 0.0) is None
    del workers.live["w1"]
    assert job.next_target((0, 1), frozenset(), 0.0) == (0, 1)


@pytest.mark.parametrize(
    ("members", "wanted", "granted", "waited_s", "stops"),
    [
        ((2, 3), (0,), (2, 3), 0.0, True),  # another job is still on slot 0
        ((2, 3), (0,), (0,), 0.1, False),  # a worker is being started on slot 0
        ((2, 3), (0,), (0,), 9.0, True),  # and that takes too long
        ((0, 3), (0,), (0,), 9.0, False),  # it just shrinks
        ((2, 3), (2, 3), (2, 3), 9.0, False),  # the decision about it is not known yet
        ((0, 1), (1,), (1,), 9.0, False),  # no service wants these slots
    ],
)
def test_a_job_stops_if_it_cannot_move_in_time_off_slots_that_services_want(
    members: tuple[int, ...], wanted: tuple[int, ...], granted: tuple[int, ...], waited_s: float, stops: bool
) -> None:
    job = JobState(stage=JobStage.RUNNING, wanted=wanted, workers=on(*members))
    assert (job.next_target(granted, frozenset({2, 3}), waited_s) == ()) is stops
    assert (job.stage is JobStage.STOPPING) is stops


def test_a_worker_that_is_lost_while_the_job_stops_is_not_reported() -> None:
    lost = Exited("w0", -9)
    assert JobState(stage=JobStage.RUNNING, workers=on(0)).happened(lost) == [
        ("worker_lost", {"worker": "w0", "reason": "ended by SIGKILL"})
    ]
    assert JobState(stage=JobStage.STOPPING, workers=on(0)).happened(lost) == []


def test_a_worker_that_was_left_out_is_lost_once_and_any_other_that_is_fenced_too() -> None:
    job = JobState(stage=JobStage.RUNNING, wanted=(0, 1, 2), told=(0, 1, 2), workers=on(0, 1, 2))
    (left_out,) = job.happened(LeftOut("w1", ("w0",)))
    assert left_out == ("worker_lost", {"worker": "w1", "reason": "w1 was left out: w0 cannot reach it"})
    assert job.happened(GaveUp("w1")) == []
    assert [kind for kind, _ in job.happened(GaveUp("w2"))] == ["worker_lost"]


def test_workers_of_a_replica_that_is_cut_in_two_are_not_said_to_have_been_silent() -> None:
    job = JobState(stage=JobStage.RUNNING, wanted=(0, 1, 2), told=(0, 1, 2), workers=on(0, 1, 2))
    (parted,) = job.happened(read_event({"event": "parted", "workers": ["w0", "w1"]}, 3))
    assert parted == (
        "noticed",
        {"text": "w0 and w1, of one replica, cannot reach each other; the replica is started again"},
    )
    for worker in ("w0", "w1"):
        assert job.happened(GaveUp(worker)) == []
        assert job.happened(Exited(worker, 0)) == []
    assert [kind for kind, _ in job.happened(GaveUp("w2"))] == ["worker_lost"]
