"""How ElasticFlow's promises survive pauses that nobody planned, rows that move, and newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import Cluster, SlotsAhead
from swell.placement import make_placer
from swell.policies import Snapshot
from swell.policies._plan_in_force import (
    Moment,
    PlanInForce,
    fits_in_free_blocks,
    keep_promises,
    let_in,
    plan_anew,
    plan_the_late,
    shortfall,
)
from swell.policies._reservations import Jobs, Plan, reserve_in_order, shares_by_level
from swell.policies.tide import lend

PAUSE_S = 5.0
ROUNDS = 8


def moment(snapshot: Snapshot, pause_s: float = PAUSE_S, **columns: Any) -> Moment:
    """A snapshot as the planner sees it; `columns` replace fields of `Jobs`."""
    n = len(snapshot)
    rates, gpus = shares_by_level(
        snapshot.curves.rates, snapshot.curve, snapshot.min_gpus, snapshot.max_gpus, snapshot.capacity
    )
    jobs = Jobs(
        work=snapshot.remaining,
        last_s=snapshot.deadline_s.copy(),
        weight=snapshot.weight,
        held=snapshot.gpus,
        lag_s=np.zeros(n),
        start_s=np.full(n, pause_s),
        rates=rates,
        gpus=gpus,
        cover_s=np.full(n, pause_s),
        still_s=np.full(n, snapshot.now_s),
        pause_s=pause_s,
    )
    return Moment.of(snapshot, jobs._replace(**columns))


def steps(plan: Plan, i: int) -> list[tuple[float, int]]:
    mine = slice(plan.first[i], plan.last[i])
    return [(round(float(s), 3), int(k)) for s, k in zip(plan.step_s[mine], plan.step_gpus[mine])]


def in_force(now: Moment) -> PlanInForce:
    plan = plan_anew(now, now.can_be_kept(), ROUNDS)
    assert shortfall(plan, now.jobs, now.can_be_kept()) == (0, 0)
    return PlanInForce(plan, now.snapshot.numbers)


ONE_GPU = [[0.0, 1.0]]
TWO_GPUS = [[0.0, 1.0, 1.9]]


def test_a_reservation_lasts_a_pause_longer_than_the_job_needs(make_snapshot: Any) -> None:
    now = moment(make_snapshot(1, cluster="1x1", rates=ONE_GPU, left=100, gpus=1, deadline_s=1000))
    assert in_force(now).plan.end_s[0] == 105  # type: ignore[union-attr]


def test_the_cover_is_worth_a_pause_on_the_highest_share(make_snapshot: Any) -> None:
    # Job 0 has one of two GPUs until 15. Then job 1 has two, does 10 units a second, and a pause costs 50.
    snapshot = make_snapshot(
        2, cluster="1x2", rates=[[0, 1, 1], [0, 1, 10]], curve=[0, 1], left=[10, 200], gpus=1
    )
    now = moment(snapshot, last_s=np.array([15.0, 49.0]))
    plan = in_force(now).plan
    assert plan is not None
    assert steps(plan, 1) == [(0, 1), (15, 2)]
    work_reserved = 15 + 10 * (plan.end_s[1] - 15 - PAUSE_S)
    assert work_reserved == 200 + 10 * PAUSE_S


def test_a_job_that_was_stopped_ends_within_its_reservation(make_snapshot: Any) -> None:
    before = moment(make_snapshot(1, cluster="1x1", rates=ONE_GPU, left=100, gpus=1, deadline_s=106))
    stopped = make_snapshot(1, cluster="1x1", rates=ONE_GPU, now_s=50.0, left=55, gpus=1, deadline_s=106)
    now = moment(stopped)
    kept = in_force(before).carried_on(now, np.array([0]))
    assert kept is not None
    assert kept.end_s[0] == 105
    assert shortfall(kept, now.jobs, np.array([0])) == (0, 0), (
        "a job that cannot be covered even alone counts as covered"
    )


def test_a_stopped_job_is_stretched_towards_its_deadline(make_snapshot: Any) -> None:
    before = moment(make_snapshot(1, cluster="1x1", rates=ONE_GPU, left=100, gpus=1, deadline_s=200))
    stopped = make_snapshot(1, cluster="1x1", rates=ONE_GPU, now_s=50.0, left=58, gpus=1, deadline_s=200)
    kept = in_force(before).carried_on(moment(stopped), np.array([0]))
    assert kept is not None
    assert kept.end_s[0] == 50 + 58 + PAUSE_S
    assert kept.covered[0]


def test_a_job_that_is_done_earlier_than_planned_gives_up_the_shares_after_that(make_snapshot: Any) -> None:
    # Job 1 was to have both GPUs once job 0 is done, and is nearly done itself before that.
    kept: dict[str, Any] = {"cluster": "1x2", "rates": [[0, 1, 1], [0, 1, 10]], "curve": [0, 1], "gpus": 1}
    last_s = np.array([15.0, 49.0])
    before = moment(make_snapshot(2, left=[10, 200], **kept), pause_s=0.1, last_s=last_s)
    force = in_force(before)
    assert steps(force.plan, 1) == [(0, 1), (10.1, 2)]  # type: ignore[arg-type]
    now = moment(make_snapshot(2, now_s=5.0, left=[5, 4], **kept), pause_s=0.1, last_s=last_s)
    plan = force.carried_on(now, np.array([0, 1]))
    assert plan is not None
    assert steps(plan, 1) == [(5, 1)]
    assert plan.end_s[1] == pytest.approx(5 + 4 + 0.1 * 10), "with a pause at the highest share for cover"


def test_a_plan_that_gives_a_gpu_back_later_counts_on_the_rest_from_then_on(make_snapshot: Any) -> None:
    # A service has one of the two GPUs from 100 on. Half the way to there all is as planned.
    def look(now_s: float, left: float) -> Moment:
        one = make_snapshot(1, cluster="1x2", now_s=now_s, left=left, gpus=2, deadline_s=180)
        ahead = SlotsAhead(np.array([now_s, 100.0]), np.array([2, 1]))
        return moment(one.part(np.arange(1), one.cluster, ahead))

    force = in_force(look(0.0, 250))
    assert force.plan is not None and steps(force.plan, 0) == [(0, 2), (100, 1)]
    assert force.plan.end_s[0] == 100 + PAUSE_S + 50 + 2 * PAUSE_S, "with a pause at both GPUs for cover"
    kept = force.carried_on(look(50.0, 150), np.array([0]))
    assert kept is not None and steps(kept, 0) == [(50, 2), (100, 1)]
    assert kept.end_s[0] == force.plan.end_s[0] and kept.covered[0]


def test_only_jobs_that_have_gpus_now_are_postponed_to_lend_them(make_snapshot: Any) -> None:
    # Job 1 follows job 0 on the only GPU. Both could begin much later and still be in time.
    now = moment(
        make_snapshot(2, cluster="1x1", rates=ONE_GPU, left=100, gpus=[1, 0], deadline_s=[500, 1000])
    )
    plan = in_force(now).plan
    assert plan is not None
    assert steps(lend(now.jobs, plan, np.array([1])), 1) == steps(plan, 1) == [(0, 0), (105, 1)]
    assert steps(lend(now.jobs, plan, np.array([0])), 0) != steps(plan, 0) == [(0, 1)]


def test_if_a_job_cannot_be_stretched_the_whole_plan_waits_for_a_pause(make_snapshot: Any) -> None:
    # Job 1 follows job 0 on the only GPU, and neither has another place. Job 0 was stopped for 5 s.
    kept: dict[str, Any] = {"cluster": "1x1", "rates": ONE_GPU, "deadline_s": [200, 300]}
    before = moment(make_snapshot(2, left=[100, 100], gpus=[1, 0], **kept))
    now = moment(make_snapshot(2, now_s=50.0, left=[55, 100], gpus=[1, 0], **kept))
    order = np.array([0, 1])
    plan = in_force(before).carried_on(now, order)
    assert plan is not None
    assert shortfall(plan, now.jobs, order) == (0, 0)
    assert plan.end_s[0] == 50 + 55 + PAUSE_S
    assert steps(plan, 1) == [(50, 0), (110, 1)]


def test_the_plan_in_force_is_followed_where_planning_anew_would_break_a_promise(make_snapshot: Any) -> None:
    # By deadline job 0 would take one GPU, which is enough for it. Then both are free too late for job 1,
    # which can run on nothing less. The plan in force gives both GPUs to job 1 first.
    curves = [[0.0, 1.0, 1.9], [0.0, 0.0, 1.0]]
    snapshot = make_snapshot(2, cluster="1x2", rates=curves, curve=[0, 1], left=[100, 60])
    now = moment(snapshot, last_s=np.array([145.0, 150.0]))
    order = np.array([0, 1])
    assert shortfall(plan_anew(now, order, 0), now.jobs, order)[0] == 1
    good = plan_anew(now, order[::-1], 0)
    assert shortfall(good, now.jobs, order) == (0, 0)
    plan, _ = keep_promises(now, PlanInForce(good, snapshot.numbers), order, 0)
    assert shortfall(plan, now.jobs, order) == (0, 0)
    assert steps(plan, 1) == [(0, 2)]


def test_a_plan_is_remembered_by_number_whatever_the_rows(make_snapshot: Any) -> None:
    deadlines = [1000.0, 2000.0, 3000.0]
    table = make_snapshot(3, cluster="1x2", rates=TWO_GPUS, left=[50, 60, 70], deadline_s=deadlines)
    table.table.number[:] = [12, 4, 9]  # row 1 holds the oldest job
    before = moment(table.with_rows(np.array([1, 2, 0])))
    remembered = in_force(before)
    assert remembered.numbers.tolist() == [4, 9, 12]
    assert remembered.plan is not None
    planned = dict(zip([4, 9, 12], remembered.plan.end_s.tolist()))
    now = moment(table.with_rows(np.array([2, 0])))  # the oldest has ended
    kept = remembered.carried_on(now, now.can_be_kept())
    assert kept is not None
    assert kept.end_s.tolist() == [planned[9], planned[12]]


def test_a_newcomer_waits_while_an_earlier_promise_is_without_a_place(make_snapshot: Any) -> None:
    # Jobs 0 and 1 could each make it alone, but not both (a node was lost, say). Job 2 would be no trouble.
    snapshot = make_snapshot(
        3, cluster="1x1", rates=ONE_GPU, left=[100, 100, 1], deadline_s=[150, 151, 100_000]
    )
    now = moment(snapshot)
    base, comes_in = let_in(now, PlanInForce(), 2, ROUNDS)
    assert not comes_in
    assert shortfall(base, now.jobs, np.array([0, 1]))[0] == 1
    alone = snapshot.with_rows(np.array([0, 2]))
    assert let_in(moment(alone), PlanInForce(), 1, ROUNDS)[1]


@pytest.mark.parametrize("heavy", [0, 1])
def test_if_only_one_promise_can_be_kept_it_is_the_heavier_one(make_snapshot: Any, heavy: int) -> None:
    weight = [3.0 if i == heavy else 1.0 for i in range(2)]
    snapshot = make_snapshot(2, cluster="1x1", rates=ONE_GPU, left=100, deadline_s=[150, 151], weight=weight)
    now = moment(snapshot)
    plan, _ = keep_promises(now, PlanInForce(), now.can_be_kept(), ROUNDS)
    assert np.isfinite(plan.end_s).tolist() == [i == heavy for i in range(2)]


def test_a_job_whose_promise_was_lost_ends_as_early_as_the_other_promises_let_it(make_snapshot: Any) -> None:
    # Each job can run on one GPU or two; job 1 cannot end by 87 any more, and job 0 has time to follow it.
    snapshot = make_snapshot(2, cluster="1x2", left=[90, 170], gpus=[1, 0], deadline_s=[146, 87])
    now = moment(snapshot)
    assert now.can_be_kept().tolist() == [0]
    plan, calm = keep_promises(now, PlanInForce(), np.array([0]), ROUNDS)
    plan = plan_the_late(calm, plan, ROUNDS)
    assert plan.end_s.tolist() == [145, 90]


@pytest.mark.parametrize("still_s", [0.0, 300.0], ids=["anybody may grow", "nobody may grow before 300"])
def test_a_plan_on_an_empty_cluster_is_the_same_without_the_short_cut(
    make_snapshot: Any, still_s: float
) -> None:
    # One GPU that is always taken makes `reserve_in_order` look at every step of the plan.
    rng = np.random.default_rng(4)
    n = 40
    snapshot = make_snapshot(
        n,
        cluster="64x8",
        rates=[[0, *np.arange(1, 65) ** 0.8]],
        left=rng.uniform(100, 5000, n).tolist(),
        deadline_s=rng.uniform(2000, 9000, n).tolist(),
        gpus=rng.choice([0, 1, 2, 4, 8], n).tolist(),
    )
    now = moment(snapshot, still_s=np.full(n, still_s))
    order = now.can_be_kept()
    quick = reserve_in_order(now.empty, now.jobs, order)
    full = now.empty._replace(times=np.append(now.empty.times, 1e9), free=np.append(now.empty.free, 0))
    slow = reserve_in_order(full, now.jobs, order)
    assert len(order) > 30
    assert np.allclose(quick.end_s[order], slow.end_s[order])
    assert [steps(quick, i) for i in order] == [steps(slow, i) for i in order]


def test_nobody_grows_while_a_job_runs_that_a_stop_would_make_late(make_snapshot: Any) -> None:
    # Job 0 has 2 s to spare. It holds GPU 0, so two aligned GPUs are free; on 1x2 they would not be.
    for cluster, may_grow in (("1x4", True), ("1x2", False)):
        snapshot = make_snapshot(
            2, cluster=cluster, rates=[[0, 1, 1, 1, 1]], left=[50, 50], gpus=[1, 0], deadline_s=[52, 500]
        )
        now = moment(snapshot)
        assert now.bare.tolist() == [True, False]
        plan, calm = keep_promises(now, PlanInForce(), now.can_be_kept(), ROUNDS)
        assert calm is not now
        assert steps(plan, 1)[0] == (0, 1), "a single free GPU needs nobody to move"
        assert now.moves_nobody(plan)
        both = make_snapshot(
            2, cluster=cluster, rates=[[0, 1, 1, 1, 1], [0, 0, 2, 2, 2]], curve=[0, 1], left=[50, 50],
            gpus=[1, 0], deadline_s=[52, 500],
        )  # fmt: skip
        plan, _ = keep_promises(moment(both), PlanInForce(), np.array([0, 1]), ROUNDS)
        assert (steps(plan, 1)[0] == (0, 2)) is may_grow


def test_who_can_wait_the_longest_waits_for_a_job_that_a_stop_would_make_late(make_snapshot: Any) -> None:
    # Job 0 would be late after a stop. Of the two GPUs beside it job 1 needs one, and job 2 both.
    snapshot = make_snapshot(
        3, cluster="2x2", rates=[[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]], curve=[0, 0, 1], left=[30, 20, 120],
        gpus=[2, 0, 0], deadline_s=[38, 47, 183],
    )  # fmt: skip
    now = moment(snapshot)
    plan, calm = keep_promises(now, PlanInForce(), now.can_be_kept(), ROUNDS)
    assert calm.fragile is not None and calm.fragile.tolist() == [True, False, False]
    assert now.moves_nobody(plan)
    assert [steps(plan, i) for i in range(3)] == [[(0, 1)], [(0, 1)], [(0, 0), (35, 2)]]


def test_a_newcomer_may_start_beside_a_job_that_a_stop_would_make_late_if_nobody_moves(
    make_snapshot: Any,
) -> None:
    # Job 0 would be late after a stop, and job 1 has to wait for it. Job 2 cannot wait, and a GPU is free.
    snapshot = make_snapshot(
        3, cluster="2x2", rates=[[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 1, 2, 2, 4]], curve=[0, 1, 2],
        left=[100, 50, 10], gpus=[1, 2, 0], deadline_s=[110, 58, 31],
    )  # fmt: skip
    now = moment(snapshot)
    plan, comes_in = let_in(now, PlanInForce(), 2, ROUNDS)
    assert comes_in and now.moves_nobody(plan)
    assert steps(plan, 2) == [(0, 1)]


def test_somebody_may_have_to_move_only_if_somebody_grows(make_snapshot: Any) -> None:
    # Job 0 holds two of four GPUs and job 1 one. What job 0 gives back may be given to it again as spare.
    one_type, two_types = (
        make_snapshot(2, cluster=nodes, gpus=[2, 1]) for nodes in ("1x4", "1x4:T4,1x4:A100")
    )
    for shares, fits in (([2, 1], True), ([1, 1], True), ([1, 0], True), ([1, 2], True), ([1, 3], False)):
        assert fits_in_free_blocks(one_type, np.array(shares)) is fits
        nobody_grows = shares[1] <= 1
        assert fits_in_free_blocks(two_types, np.array(shares)) is nobody_grows, "it cannot be told otherwise"


@settings(max_examples=150)
@given(data=st.data())
def test_what_is_said_to_move_nobody_moves_nobody(make_snapshot: Any, data: st.DataObject) -> None:
    cluster = Cluster.parse(data.draw(st.sampled_from(["1x4", "4x4", "2x8", "3x4", "2x3", "5x2"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    placer = make_placer("buddy", cluster)
    n = 6
    held = dict.fromkeys(range(n), 0)
    for _ in range(3):  # some history, so that holes come about
        for job in rng.permutation(n).tolist():
            room = cluster.capacity - sum(held.values()) + held[job]
            held[job] = min(int(rng.choice([0, 1, 2, 4])), 1 << room.bit_length() >> 1)
            placer.place({job: held[job]})
    rates = [[float(k) for k in range(cluster.capacity + 1)]]
    snapshot = make_snapshot(n, cluster=cluster, rates=rates)
    wanted = np.array(list(held.values()))
    for job in range(n):
        placement = placer.occupancy.jobs.get(job, ())
        snapshot.table.placement[job], snapshot.table.gpus[job] = placement, len(placement)
    for job in rng.permutation(n)[:3].tolist():
        room = cluster.capacity - int(wanted.sum()) + int(wanted[job])
        wanted[job] = min(int(rng.choice([0, 1, 2, 4, 8])), 1 << room.bit_length() >> 1)
    now = moment(snapshot)
    plan = now.empty._replace(step_s=np.zeros(n), step_gpus=wanted, first=np.arange(n), last=np.arange(n) + 1)
    moves_nobody = now.moves_nobody(plan)
    # Spare GPUs let some of those that were to shrink keep what they hold.
    keeps = (wanted < snapshot.gpus) & (rng.random(n) < 0.5)
    if moves_nobody:
        wanted = np.where(keeps, snapshot.gpus, wanted)
    changes = {job: int(wanted[job]) for job in range(n) if wanted[job] != snapshot.gpus[job]}
    moved = placer.place(changes).keys() - changes.keys() if changes else set()
    if moves_nobody:
        assert not moved
