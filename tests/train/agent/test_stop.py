"""A job that is asked to stop saves its state and can go on from it; what it reports while it runs."""

from __future__ import annotations

from swell.train.agent.membership import STOPPED, Generation, KnownWorker, Membership, Scale, Stop
from swell.train.agent.membership_json import from_json, to_json
from swell.train.agent.protocol import Finish, Status
from swell.train.reporting import StepTimes


def _running(*names: str) -> Membership:
    job = Membership(Scale(1, 4, len(names)))
    job.workers = {n: KnownWorker(n, Status.MEMBER, 0.0) for n in names}
    job.generation = Generation(1, list(names), live=True)
    return job


def test_members_are_asked_and_the_leaders_word_ends_the_job() -> None:
    job = _running("w0", "w1")
    assert job.stop(1.0) == [Stop(("w0", "w1"))]
    assert job.exited("w1", 0, 1.1) == [Stop(("w0", "w1"))], "the leader is still saving"
    assert Finish(0, STOPPED) in job.finish(0, STOPPED)
    assert job.stop(2.0) == [], "a second wish changes nothing"


def test_a_job_without_state_stops_at_once() -> None:
    job = Membership(Scale(1, 4, 2))
    assert job.stop(0.0) == [Finish(0, STOPPED)]


def test_a_leader_that_dies_while_saving_leaves_the_checkpoint_before() -> None:
    job = _running("w0", "w1")
    job.stop(1.0)
    job.exited("w1", 0, 1.1)
    assert Finish(0, STOPPED) in job.exited("w0", -9, 1.2)


def test_the_wish_to_stop_survives_a_restart_of_the_coordinator() -> None:
    job = _running("w0")
    job.stop(1.0)
    again = from_json(to_json(job), 2.0)
    assert again.tick(2.1) == [Stop(("w0",))]


def test_step_times_are_means_that_leave_out_the_step_of_a_change() -> None:
    pace = StepTimes()
    assert not pace.add((1, 64), 9.0, 9.0)
    for step_s in (0.1, 0.3):
        assert pace.add((1, 64), step_s, 0.01)
    # The second step counts twice as much as the first one.
    assert abs(pace.step_s - 0.7 / 3) < 1e-9 and abs(pace.sync_s - 0.01) < 1e-9
    assert not pace.add((2, 64), 5.0, 5.0) and not pace.known
