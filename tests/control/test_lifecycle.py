"""The life of a job: events in, instructions out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.conftest import make_record

from swell.board import Move, with_reasons
from swell.cli import _common
from swell.control.errors import Conflict
from swell.control.lifecycle import (
    NOT_REPORTED,
    Answered,
    Apply,
    BoundsAsked,
    CancelAsked,
    CheckpointSaved,
    EndJob,
    Granted,
    Input,
    JobSeen,
    JobSwitched,
    LogEvent,
    PauseAsked,
    Progressed,
    Reschedule,
    ResumeAsked,
    Started,
    Vanished,
    WorkerLost,
    step,
)
from swell.control.model import Estimate, JobRecord, Phase, Promise
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster, EventKind, JobRequest
from swell.engines import Observed, RunState
from swell.engines.null import NullEngine

RUNNING = make_record(phase=Phase.RUNNING, wanted=(0, 1), held=(0, 1), started_s=101.0)


def seen(state: RunState, target: tuple[int, ...] = (0, 1), **more: object) -> JobSeen:
    return JobSeen(Observed(job_id="a-1", state=state, target=target, **more))  # type: ignore[arg-type]


def kinds(instructions: list[object]) -> list[object]:
    return [one.event.kind if isinstance(one, LogEvent) else type(one) for one in instructions]


def test_slots_start_a_queued_job() -> None:
    record, out = step(make_record(), Granted((2, 3)), 110.0)
    assert (record.phase, record.wanted, record.held) == (Phase.RUNNING, (2, 3), ())
    assert (record.started_s, kinds(out)) == (110.0, [Apply])
    record, out = step(record, Started((2, 3), 4.0), 110.5)
    assert record.held == (2, 3)
    assert isinstance(out[0], LogEvent) and out[0].event.kind is EventKind.ALLOCATED
    assert dict(out[0].event.data) == {"gpus": (2, 3), "pause_s": 4.0}
    assert step(record, Started((2, 3), 4.0), 111.0) == (record, [])
    again, out = step(record, Started((2,), 4.0), 111.0)  # it died, and nobody noticed before it ran again
    assert again.held == (2,) and kinds(list(out)) == [EventKind.RESIZED]


def test_a_resize_is_in_the_log_once_it_has_happened_with_its_pause() -> None:
    record, out = step(RUNNING, Granted((0, 1, 2)), 110.0)
    assert (record.wanted, record.held, record.resizes) == ((0, 1, 2), (0, 1), 0)
    assert kinds(out) == [Apply]
    record, out = step(record, JobSwitched((0, 1, 2), 0.25), 111.0)
    assert (record.held, record.resizes, record.pause_s, record.started_s) == ((0, 1, 2), 1, 0.25, 101.0)
    assert isinstance(out[0], LogEvent) and out[0].event.kind is EventKind.RESIZED
    assert dict(out[0].event.data) == {"gpus": (0, 1, 2), "before": (0, 1), "pause_s": 0.25}


def test_a_resize_for_a_lost_node_says_so() -> None:
    record, _ = step(RUNNING, Granted((0,), "node n1 was lost"), 110.0)
    _, out = step(record, JobSwitched((0,), 0.1), 110.5)
    assert isinstance(out[0], LogEvent) and out[0].event.data["reason"] == "node n1 was lost"


def test_a_lost_worker_and_a_saved_checkpoint_are_in_the_log() -> None:
    record, out = step(RUNNING, WorkerLost("w1", "ended by SIGKILL"), 110.0)
    assert record == RUNNING and kinds(out) == [EventKind.WORKER_LOST]
    record, out = step(RUNNING, CheckpointSaved(40), 110.0)
    assert record == RUNNING and kinds(out) == [EventKind.CHECKPOINT_SAVED]


def test_no_slots_put_a_running_job_back_into_the_queue() -> None:
    record, out = step(RUNNING, Granted(()), 110.0)
    assert (record.phase, record.wanted) == (Phase.QUEUED, ())
    assert kinds(out) == [EventKind.PREEMPTED, Apply]


def test_the_same_slots_change_nothing() -> None:
    assert step(RUNNING, Granted((0, 1)), 110.0) == (RUNNING, [])


def test_a_finished_script_finishes_the_job_and_says_if_the_deadline_was_met() -> None:
    late = replace(RUNNING, request=replace(RUNNING.request, deadline_s=105.0), of=50.0, done=48.0)
    record, out = step(late, seen(RunState.FINISHED, exit_code=0), 110.0)
    assert (record.phase, record.ended_s, record.done, record.wanted) == (Phase.FINISHED, 110.0, 50.0, ())
    assert kinds(out) == [EventKind.FINISHED, EndJob, Reschedule]
    assert isinstance(out[0], LogEvent) and out[0].event.data["met"] is False
    assert out[0].event.data["jct_s"] == 10.0


def test_a_failed_script_fails_the_job_with_its_reason_and_is_not_retried() -> None:
    failed = seen(RunState.FAILED, exit_code=3, reason="ValueError: no")
    record, out = step(RUNNING, failed, 110.0)
    assert (record.phase, record.exit_code, record.reason) == (Phase.FAILED, 3, "ValueError: no")
    assert kinds(out) == [EventKind.FAILED, EndJob, Reschedule]
    assert step(record, failed, 111.0) == (record, [])


def test_workers_that_are_not_where_they_should_be_are_put_there() -> None:
    assert step(RUNNING, seen(RunState.RUNNING, (0,)), 110.0) == (RUNNING, [Apply()])
    assert step(RUNNING, seen(RunState.RUNNING), 110.0) == (RUNNING, [])
    assert step(RUNNING, seen(RunState.STOPPING, (0,)), 110.0) == (RUNNING, [])


def test_a_job_that_is_over_but_still_runs_is_ended() -> None:
    over = replace(RUNNING, phase=Phase.CANCELLED, wanted=())
    assert step(over, seen(RunState.RUNNING), 110.0) == (over, [EndJob()])


def test_a_vanished_job_starts_again_but_not_for_ever() -> None:
    record = RUNNING
    for n in range(record.request.max_restarts):
        record, out = step(record, Vanished(), 110.0)
        assert (record.phase, record.restarts, record.held) == (Phase.RUNNING, n + 1, ())
        assert kinds(out) == ([EventKind.PREEMPTED] if n == 0 else []) + [Apply]
    record, out = step(record, Vanished(), 110.0)
    assert record.phase is Phase.FAILED and "died 4 times" in record.reason
    assert kinds(out) == [EventKind.FAILED, EndJob, Reschedule]


def test_a_queued_job_cannot_vanish() -> None:
    assert step(make_record(), Vanished(), 110.0) == (make_record(), [])


def test_progress_is_kept_and_a_new_length_calls_for_a_decision() -> None:
    record, out = step(RUNNING, Progressed(5.0, 100.0, 64), 110.0)
    assert (record.done, record.of, record.batch_size, out) == (5.0, 100.0, 64, [Reschedule()])
    record, out = step(record, Progressed(6.0), 111.0)
    assert (record.done, record.of, record.batch_size, out) == (6.0, 100.0, 64, [])


def test_pauses_add_up() -> None:
    record, _ = step(RUNNING, JobSwitched((0,), 0.5), 110.0)
    record, _ = step(record, JobSwitched((0, 1), 0.25), 111.0)
    assert record.pause_s == 0.75


def test_an_answer_after_profiling_admits_or_refuses() -> None:
    pending = replace(RUNNING, promise=replace(RUNNING.promise, pending=True))
    yes = Promise(admitted=True, guaranteed_s=200.0, estimate=Estimate(finish_s=150.0))
    record, out = step(pending, Answered(yes), 110.0)
    assert record.promise == yes and kinds(out) == [EventKind.ADMITTED]
    assert step(record, Answered(yes), 111.0) == (record, [])
    no = Promise(admitted=False, estimate=Estimate(finish_s=None), earliest_deadline_s=400.0, reason="full")
    record, out = step(pending, Answered(no), 110.0)
    assert (record.phase, record.reason, record.wanted) == (Phase.REFUSED, "full", ())
    assert kinds(out) == [EventKind.REJECTED, EndJob, Reschedule]


def test_pause_and_resume() -> None:
    paused, out = step(RUNNING, PauseAsked(), 110.0)
    assert (paused.phase, paused.wanted) == (Phase.PAUSED, ())
    assert kinds(out) == [EventKind.PREEMPTED, Apply, Reschedule]
    assert step(paused, PauseAsked(), 111.0) == (paused, [])
    assert step(paused, Granted((0,)), 111.0) == (paused, []), "a paused job takes no slots"
    resumed, out = step(paused, ResumeAsked(), 112.0)
    assert (resumed.phase, out) == (Phase.QUEUED, [Reschedule()])


def test_bounds_by_hand() -> None:
    record, out = step(RUNNING, BoundsAsked(2, 3), 110.0)
    assert (record.request.min_workers, record.request.max_workers, out) == (2, 3, [Reschedule()])
    assert step(record, BoundsAsked(2, 3), 110.0) == (record, [])


@pytest.mark.parametrize("phase", [p for p in Phase if p.over])
def test_what_is_over_stays_over(phase: Phase) -> None:
    over = make_record(phase=phase, ended_s=105.0)
    refused: list[Input] = [PauseAsked(), ResumeAsked(), BoundsAsked(1, 2)]
    if phase is not Phase.CANCELLED:
        refused.append(CancelAsked("ann"))
    for one in refused:
        with pytest.raises(Conflict, match=phase.value):
            step(over, one, 110.0)
    for harmless in (Granted((0,)), Vanished(), seen(RunState.FINISHED)):
        assert step(over, harmless, 110.0)[0] == over


INPUTS = st.one_of(
    st.builds(Granted, st.lists(st.integers(0, 3), max_size=3, unique=True).map(lambda x: tuple(sorted(x)))),
    st.builds(seen, st.sampled_from(RunState)),
    st.just(Vanished()),
    st.builds(Started, st.just((0, 1)), st.floats(0, 1)),
    st.builds(JobSwitched, st.just((0,)), st.floats(0, 1)),
    st.builds(Progressed, st.floats(0, 100), st.none() | st.just(100.0)),
    st.just(CancelAsked("ann")),
    st.just(PauseAsked()),
    st.just(ResumeAsked()),
)


@given(st.lists(INPUTS, max_size=30))
def test_whatever_happens_a_job_holds_slots_only_while_it_runs(inputs: list[Input]) -> None:
    record: JobRecord = make_record()
    over_since: JobRecord | None = None
    for i, one in enumerate(inputs):
        try:
            record, out = step(record, one, 110.0 + i)
        except Conflict:
            continue
        assert bool(record.wanted) == (record.phase is Phase.RUNNING)
        assert bool(record.wanted) or not record.held
        assert (record.ended_s is not None) == record.phase.over
        if over_since is not None:
            assert record.phase is over_since.phase, "nothing comes back from the dead"
            assert not any(isinstance(o, Apply) for o in out)
        if record.phase.over and over_since is None:
            over_since = record


@pytest.mark.parametrize(
    "end",
    [
        seen(RunState.FINISHED, ()),
        seen(RunState.FAILED, (), exit_code=1),
        CancelAsked("ann"),
    ],
)
def test_an_answer_that_is_still_due_at_the_end_is_not_left_open(end: Input) -> None:
    record, _ = step(replace(RUNNING, promise=replace(RUNNING.promise, pending=True)), end, 110.0)
    assert record.phase.over
    assert not record.promise.pending
    assert "before its profiling run was" in record.promise.reason


def test_a_reason_is_said_only_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    engine = NullEngine(Cluster.parse("1x2"), duration_s=1000.0)
    store = Store(connect(str(tmp_path / "store.db")))
    plane = ControlPlane(store, engine, home=tmp_path, policy="max-min", interval_s=1.0)
    plane.come_up()
    request = JobRequest(name="a", script="train.py", workdir=str(tmp_path))

    def lost(job_id: str) -> list[str]:
        plane.turn()
        events = [event for _, event in store.events(job_id=job_id)]
        kinds = (EventKind.PREEMPTED, EventKind.RESIZED)
        return [str(event.data.get("reason", "")) for event in events if event.kind in kinds]

    first = plane.jobs.submit(request, "ann").job_id
    plane.turn()
    assert lost(first) == []
    engine._cluster = Cluster(engine.cluster().nodes, frozenset({0, 1}))
    (reason, *_) = lost(first)
    assert reason == "another user of the cluster has slots of node n0"
    engine._cluster = Cluster(engine.cluster().nodes)
    plane.turn()
    plane.stop()
    store.close()


def test_slots_went_to_other_jobs_only_if_another_job_has_them() -> None:
    def reasons(*moves: tuple[tuple[int, ...], tuple[int, ...]]) -> list[str]:
        given = [Move(row, before, after, 0.0, 0.0) for row, (before, after) in enumerate(moves)]
        return [move.reason for move in with_reasons(given)]

    taken, instead = "its slots went to other jobs", "other jobs got slots instead"
    assert reasons(((0, 1), ()), ((), (1,)), ((3,), (2, 3))) == [taken, "", ""]
    assert reasons(((0,), ()), ((), (1,)), ((3,), (2, 3))) == [instead, "", ""]
    assert reasons(((0, 1), (0,))) == ["the policy gives it fewer slots"]
    assert reasons(((0, 1), (2, 3))) == [""]
    assert reasons(((0, 1), (1, 2)), ((2,), (0,))) == [taken, taken]
    record, out = step(RUNNING, Granted(()), 110.0)
    assert record.reason == NOT_REPORTED == out[0].event.data["reason"]  # type: ignore[union-attr]
    line = _common.line(0.0, "preempted", "a", {"before": [0, 1]})
    assert line.endswith(f"2 -> 0 workers ({NOT_REPORTED})")
