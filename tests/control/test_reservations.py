"""Beside services: reserved hours, services that are followed, and what that does to promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.control.virtual import Trace, VirtualPlatform, make_trace

from swell.board import hold
from swell.control.errors import Conflict, NotFound
from swell.control.model import Phase
from swell.domain import Calendar, Cluster, Event, EventKind, InputError, JobSpec, Reservation
from swell.perf.profiles import ProfileSet
from swell.sim import DemandChange, NodeFailure, parse_cloud, simulate

LINEAR = np.arange(9.0)


def platform(home: Path, policy: str = "elasticflow", **deadlines: float | None) -> VirtualPlatform:
    """Eight slots, and jobs that take 800 s on one of them, by name and deadline."""
    jobs = [
        JobSpec(job_id=name, submit_s=0.0, model=name, batch_size=1, work=800.0, gpus=8, deadline_s=by_s)
        for name, by_s in deadlines.items()
    ]
    trace = Trace(jobs, {job.job_id: LINEAR for job in jobs}, Cluster.parse("2x4"))
    made = VirtualPlatform(trace, policy, home, cost_s=0.0, round_s=None)
    made.plane.come_up()
    return made


def submit(where: VirtualPlatform, name: str) -> str:
    spec = next(job for job in where.trace.jobs if job.job_id == name)
    record = where.plane.jobs.submit(where.request(spec), "ann")
    turn(where)
    return record.job_id


def turn(where: VirtualPlatform, at_s: float = 0.0) -> None:
    where.now_s = max(where.now_s, at_s)
    where.plane.turn()
    where.plane.turn()


def slots(where: VirtualPlatform, job_id: str) -> int:
    return len(where.plane.jobs.get(job_id).wanted)


def test_training_shrinks_when_the_service_wants_slots_and_grows_when_it_does_not(tmp_path: Path) -> None:
    where = platform(tmp_path, a=None)
    job_id = submit(where, "a")
    assert slots(where, job_id) == 8
    where.plane.reservations.make(Reservation(name="web", most=6), "root")
    turn(where, 1.0)
    assert slots(where, job_id) == 8, "what the service does not want is lent"
    where.plane.reservations.demand("web", 5)
    turn(where, 2.0)
    state = where.plane.reservations.states()[0]
    assert slots(where, job_id) <= 3 and len(state.slots) == 5 and state.yielded
    assert not set(state.slots) & set(where.plane.jobs.get(job_id).wanted)
    assert sum(node.held for node in where.plane.nodes.states()) == 5
    where.plane.reservations.demand("web", 2)
    turn(where, 3.0)
    kept = where.plane.reservations.states()[0].slots
    assert set(kept) < set(state.slots) and slots(where, job_id) >= 4
    where.plane.reservations.remove("web", "root")
    turn(where, 4.0)
    assert slots(where, job_id) == 8 and not where.plane.reservations.states()
    kinds = [event.kind for _, event in where.plane.events(limit=1000)]
    assert kinds.count(EventKind.HELD) == 3 and kinds.count(EventKind.YIELDED) == 1
    assert EventKind.RESERVED in kinds and EventKind.UNRESERVED in kinds


def test_hours_begin_and_end_on_time_and_survive_a_restart(tmp_path: Path) -> None:
    where = platform(tmp_path, a=None)
    job_id = submit(where, "a")
    where.plane.reservations.make(
        Reservation(name="noon", nodes=("n0",), start_s=10, end_s=20, every_s=100), "root"
    )
    assert where.plane.due_s == 10.0
    turn(where, 10.0)
    assert slots(where, job_id) == 4 and where.plane.reservations.states()[0].slots == (0, 1, 2, 3)
    again = VirtualPlatform(where.trace, "elasticflow", tmp_path, cost_s=0.0, round_s=None)
    again.engine, again.plane.engine = where.engine, where.engine
    again.plane._conductor.engine = where.engine
    again.now_s = 12.0
    again.plane.come_up()
    again.plane.turn()
    assert slots(again, job_id) == 4 and again.plane.reservations.states()[0].slots == (0, 1, 2, 3)
    assert again.plane.due_s == 20.0
    turn(again, 20.0)
    assert slots(again, job_id) == 8 and not again.plane.reservations.states()[0].slots


@pytest.mark.parametrize("policy", ["elasticflow", "tide-fixed", "edf-admission", "oasis"])
def test_promises_count_on_no_reserved_hour(tmp_path: Path, policy: str) -> None:
    where = platform(tmp_path, policy, tight=150.0, loose=330.0)
    where.plane.reservations.make(Reservation(name="noon", gpus=8, start_s=50, end_s=200), "root")
    tight, loose = (where.plane.jobs.quote(where.request(job), "ann") for job in where.trace.jobs)
    assert not tight.admitted and loose.admitted
    if tight.earliest_deadline_s is not None:
        assert tight.earliest_deadline_s > 250.0
    where.plane.reservations.remove("noon", "root")
    assert where.plane.jobs.quote(where.request(where.trace.jobs[0]), "ann").admitted


@pytest.mark.parametrize("policy", ["elasticflow", "tide-fixed", "edf-admission", "oasis"])
def test_a_reservation_that_breaks_a_promise_is_refused_unless_it_is_forced(
    tmp_path: Path, policy: str
) -> None:
    where = platform(tmp_path, policy, a=150.0, b=None)
    job_id = submit(where, "a")
    assert where.plane.jobs.get(job_id).promise.guaranteed_s == 150.0
    noon = Reservation(name="noon", gpus=8, start_s=10, end_s=200)
    with pytest.raises(Conflict, match=job_id):
        where.plane.reservations.make(noon, "root")
    assert not where.plane.reservations.states()
    assert not where.plane.reservations.make(
        Reservation(name="later", gpus=8, start_s=400), "root"
    ).endangered
    made = where.plane.reservations.make(noon, "root", force=True)
    assert made.endangered == (job_id,)
    notices = where.plane.jobs.explain(job_id)["notices"]
    assert [one["text"] for one in notices] == [
        "its promised finish is in danger: slots are reserved for noon"
    ]


def test_estimates_know_reserved_hours(tmp_path: Path) -> None:
    where = platform(tmp_path, a=None)
    free = where.plane.jobs.quote(where.request(where.trace.jobs[0]), "ann").estimate.finish_s
    where.plane.reservations.make(Reservation(name="noon", gpus=8, start_s=50, end_s=200), "root")
    turn(where)
    beside = where.plane.jobs.quote(where.request(where.trace.jobs[0]), "ann").estimate.finish_s
    assert free == pytest.approx(100.0) and beside == pytest.approx(250.0)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    plane = platform(tmp_path).plane
    with pytest.raises(InputError, match="no node 'n7'"):
        plane.reservations.make(Reservation(name="a", nodes=("n7",)), "root")
    with pytest.raises(InputError, match="at most 8"):
        plane.reservations.make(Reservation(name="a", most=9), "root")
    plane.reservations.make(Reservation(name="web", most=3), "root")
    with pytest.raises(InputError, match="from 0 to 3"):
        plane.reservations.demand("web", 4)
    plane.reservations.make(Reservation(name="a", gpus=1), "root")
    with pytest.raises(Conflict, match="follows no service"):
        plane.reservations.demand("a", 1)
    with pytest.raises(NotFound):
        plane.reservations.remove("b", "root")


def test_a_waiting_job_says_what_is_reserved(tmp_path: Path) -> None:
    where = platform(tmp_path, a=None)
    where.plane.reservations.make(Reservation(name="web", gpus=8), "root")
    turn(where)
    job_id = submit(where, "a")
    assert where.plane.jobs.get(job_id).phase is Phase.QUEUED
    assert "reserved for web (8)" in where.plane.jobs.explain(job_id)["why"]


def test_idle_slots_are_taken_first_then_those_of_the_largest_job() -> None:
    cluster = Cluster.parse("2x4")
    jobs = [(0, 1, 2), (4,)]
    chosen = [hold(cluster, [Reservation(name="w", gpus=k)], {}, jobs)["w"] for k in range(1, 9)]
    assert chosen[2] == {3, 5, 6, 7} - {3} and chosen[3] == {3, 5, 6, 7}
    assert chosen[5] == {1, 2, 3, 5, 6, 7} and chosen[7] == set(range(8))
    kept = hold(cluster, [Reservation(name="w", gpus=2)], {"w": frozenset({0, 5, 6})}, jobs)["w"]
    assert kept == {5, 6}


def test_promised_jobs_lose_only_what_is_lent_to_them_while_others_have_gpus() -> None:
    cluster = Cluster.parse("2x4")
    best_effort, promised = [(0, 1)], [((2, 3, 4, 5), 2), ((6, 7), 0)]
    chosen = [
        hold(cluster, [Reservation(name="w", gpus=k)], {}, best_effort, promised)["w"] for k in (1, 3, 4)
    ]
    assert chosen == [{1}, {1, 4, 5}, {0, 1, 4, 5}]
    assert hold(cluster, [Reservation(name="w", gpus=5)], {}, best_effort, promised)["w"] < {0, 1, 2, 3, 4, 5}


LONG = [pytest.param(seed, 20.0, marks=pytest.mark.long) for seed in range(140)]


@pytest.mark.parametrize(("seed", "pause_s"), [(4, 0.0), (2, 5.0), (8, 5.0), (49, 20.0), *LONG])
def test_a_service_that_comes_and_goes_breaks_no_promise(seed: int, pause_s: float) -> None:
    trace, rng = make_trace(seed, 20, "4x4", 0.5), np.random.default_rng(seed)
    calendar = Calendar(
        (
            Reservation(name="hours", gpus=3, start_s=300.0, end_s=700.0, every_s=900.0),
            Reservation(name="web", most=7),
        )
    )
    demand = [DemandChange("web", at_s, int(rng.integers(8))) for at_s in rng.uniform(0, 3000, 40).tolist()]
    for policy in ("elasticflow", "tide-fixed"):
        result = simulate(
            trace.jobs, trace.profiles, trace.cluster, policy,
            resize_cost=pause_s, calendar=calendar, demand=demand,
        )  # fmt: skip
        promised = ~np.isnan(result.promised_s)
        assert promised.sum() > 3
        assert (result.finish_s[promised] <= result.promised_s[promised]).all(), policy


def test_a_reservation_that_loses_a_node_takes_other_gpus_and_no_work_is_lost() -> None:
    job = JobSpec(job_id="a", submit_s=0.0, model="a", batch_size=1, work=800.0, gpus=8)
    trace = Trace([job], {"a": LINEAR}, Cluster.parse("2x4"))
    calendar = Calendar((Reservation(name="web", gpus=4),))
    events: list[Event] = []
    result = simulate(
        trace.jobs, trace.profiles, trace.cluster, "max-min",
        calendar=calendar, failures=[NodeFailure(0, 100.0, 50.0), NodeFailure(1, 200.0, 50.0)],
        on_event=events.append,
    )  # fmt: skip
    # Four GPUs are left beside the service, none while a node is gone: 200 s of work at 4, and 100 s of none.
    assert result.finish_s[0] == pytest.approx(300.0)
    held = [set(event.data["gpus"]) for event in events if event.kind is EventKind.HELD]
    assert all(len(gpus) == 4 for gpus in held) and len(held) >= 2


def test_promises_on_one_gpu_type_count_on_no_gpu_that_a_service_may_want_there() -> None:
    specs = [
        JobSpec(
            job_id=f"j{i}", submit_s=float(i), model="cifar10", batch_size=128, work=work, deadline_s=by_s
        )
        for i, (work, by_s) in enumerate(((4e4, 4000.0), (4e4, 4000.0), (4e4, 900.0), (2e4, 2500.0)))
    ]
    calendar = Calendar((Reservation(name="web", most=4),))
    demand = [
        DemandChange("web", at_s, gpus) for at_s, gpus in ((50.0, 4), (300.0, 0), (500.0, 3), (900.0, 4))
    ]
    cluster, profiles = Cluster.parse("2x4:T4,2x4:A100"), ProfileSet.load(None)
    result = simulate(
        specs, profiles, cluster, "elasticflow", resize_cost=10.0, calendar=calendar, demand=demand
    )
    promised = ~np.isnan(result.promised_s)
    assert promised.sum() >= 2 and (result.finish_s[promised] <= result.promised_s[promised]).all()
    # On four GPUs of either type a service that may want all four leaves nothing to promise.
    small = Cluster.parse("1x4:T4,1x4:A100")
    alone = simulate(specs[:1], profiles, small, "elasticflow", calendar=calendar)
    assert alone.rejected.tolist() == [1]


def test_reservations_and_rented_nodes_are_not_simulated_together() -> None:
    cluster = Cluster.parse("2x4")
    job = JobSpec(job_id="a", submit_s=0.0, model="cifar10", batch_size=128, work=100.0)
    with pytest.raises(InputError, match="leave out 'calendar' or 'cloud'"):
        simulate(
            [job], ProfileSet.load(None), cluster, "max-min",
            calendar=Calendar((Reservation(name="web", gpus=1),)), cloud=parse_cloud("", cluster),
        )  # fmt: skip
