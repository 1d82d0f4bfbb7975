"""tide: prices, lending, the cost of a change, and what it does about wrong beliefs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swell.domain import Cluster, InputError, IntArray, SlotsAhead
from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits
from swell.perf.profiles import ProfileSet
from swell.perf.sharing import promised_part
from swell.policies import Snapshot, make_policy
from swell.policies.tide import (
    EXPLORE,
    FIRST_SHARE,
    KINDS_REMEMBERED,
    PATIENCE,
    Lengths,
    SeenModels,
    SpeedErrors,
    gittins,
    legal_sizes,
    prices,
)
from swell.sim import simulate
from swell.sim.generate import generate_jobs


def shares(policy: str, snapshot: Snapshot) -> list[int]:
    return make_policy(policy).allocate(snapshot).gpus.tolist()


def costing(snapshot: Snapshot, resize_cost_s: float) -> Snapshot:
    """The same moment where a change costs this much."""
    return Snapshot(
        snapshot.now_s, snapshot.cluster, snapshot.table, snapshot.rows, snapshot.curves, resize_cost_s
    )


@pytest.mark.parametrize("scaling", [0.3, 0.5, 0.8])
def test_prices_give_the_optimal_split_if_all_jobs_scale_alike(scaling: float) -> None:
    # With speed k ** p and price w, the best split has w * p * k ** (p - 1) equal for all jobs.
    n = 6
    split = prices(np.arange(n), np.ones(n), scaling) ** (1 / (1 - scaling))
    ends = (np.arange(n + 1) / n) ** (1 / (1 - scaling))
    assert split / split.sum() == pytest.approx(np.diff(ends))


def test_prices_stay_finite_for_a_hundred_thousand_jobs() -> None:
    price = prices(np.arange(100_000), np.ones(100_000), 0.8)
    assert np.isfinite(price).all()
    assert (np.diff(price) > 0).all()


def test_a_job_of_weight_three_is_priced_as_three_jobs_of_its_length() -> None:
    # Their joint share of the cluster is the sum of shares, and a share is price ** (1 / (1 - scaling)).
    apart = prices(np.arange(5), np.ones(5), 0.5) ** 2
    joint = prices(np.arange(3), np.array([1.0, 3.0, 1.0]), 0.5) ** 2
    assert joint == pytest.approx([apart[0], apart[1:4].sum(), apart[4]])


@pytest.mark.parametrize("policy", ["tide-fixed", "tide-fixed:length=unknown"])
def test_the_heavier_of_two_equal_jobs_gets_more(make_snapshot: Any, policy: str) -> None:
    rates = [[k**0.5 for k in range(17)]]
    snapshot = make_snapshot(2, cluster="4x4", rates=rates, left=1000.0, weight=[1.0, 8.0])
    light, heavy = shares(policy, snapshot)
    assert heavy > light


def test_a_promised_job_that_is_heavier_takes_more_of_the_spare_gpus(make_snapshot: Any) -> None:
    rates = [[k**0.5 for k in range(25)]]
    for heavy in (0, 1):
        snapshot = make_snapshot(
            2, cluster="6x4", rates=rates, left=1000.0, deadline_s=50_000.0,
            weight=[8.0 if i == heavy else 1.0 for i in range(2)],
        )  # fmt: skip
        gpus = shares("tide-fixed", snapshot)
        assert gpus[heavy] > gpus[1 - heavy]


def test_with_weights_the_weighted_average_falls() -> None:
    profiles = ProfileSet.load(None)
    jobs = generate_jobs(profiles, jobs=60, hours=1.0, seed=5, max_gpu_hours=5)
    heavy = [replace(job, weight=5.0 if i % 4 == 0 else 1.0) for i, job in enumerate(jobs)]
    # The same weights in the average, but not told to the policy:
    blind, told = (simulate(load, profiles, Cluster.parse("2x4"), "tide-fixed") for load in (jobs, heavy))
    weight = np.array([job.weight for job in heavy])
    weighted_s = float(np.average(blind.finish_s - blind.submit_s, weights=weight))
    assert told.record()["weighted_jct_s"] < 0.95 * weighted_s
    assert blind.record()["weighted_jct_s"] == pytest.approx(blind.record()["avg_jct_s"])


def test_a_job_that_is_not_known_yet_starts_at_once_and_later_steps_back(make_snapshot: Any) -> None:
    # The first job's length is unknown, so its work left must not count. The cluster is full of short jobs.
    others = {"cluster": "1x4", "left": [1e9, 50, 60, 70, 80], "max_gpus": 1, "known": [False] + [True] * 4}
    fresh = make_snapshot(5, attained_gpu_s=[0, 10, 10, 10, 10], **others)
    assert shares("tide", fresh) == [1, 1, 1, 1, 0]
    old = make_snapshot(5, attained_gpu_s=[5000, 10, 10, 10, 10], **others)
    assert shares("tide", old) == [0, 1, 1, 1, 1]


def test_shares_pack_on_nodes() -> None:
    assert legal_sizes(4, 16).tolist() == [0, 1, 2, 4, 8, 12, 16]
    assert legal_sizes(6, 16).tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 16]


def test_the_shorter_of_two_equal_jobs_gets_more(make_snapshot: Any) -> None:
    rates = [[k**0.5 for k in range(17)]]
    snapshot = make_snapshot(2, cluster="4x4", rates=rates, left=[100_000, 100])
    long, short = shares("tide-fixed", snapshot)
    assert short > long > 0


def test_without_length_the_work_left_changes_nothing(make_snapshot: Any) -> None:
    rates = [[k**0.5 for k in range(17)]]
    one, other = (
        make_snapshot(3, cluster="4x4", rates=rates, left=left, now_s=100.0, attained_gpu_s=[0, 50, 90])
        for left in ([10.0, 1e6, 500.0], [1e6, 10.0, 500.0])
    )
    assert shares("tide-fixed:length=unknown", one) == shares("tide-fixed:length=unknown", other)
    assert shares("tide-fixed", one) != shares("tide-fixed", other)


def test_a_gpu_that_is_lent_to_one_job_is_no_debt_of_the_other(make_snapshot: Any) -> None:
    # One of the two GPUs may be wanted back. Without it only job 0 could run; with it job 1 is better.
    snapshot = make_snapshot(2, cluster="1x2", rates=[[0, 1, 1.5], [0, 0, 1]], curve=[0, 1], left=[60, 30])
    snapshot = snapshot.part(np.arange(2), snapshot.cluster, SlotsAhead(np.array([0.0]), np.array([1])))
    decision = make_policy("tide-fixed").allocate(snapshot)
    assert decision.gpus.tolist() == [0, 2]
    assert decision.lent is not None and decision.lent.tolist() == [0, 2]


def test_a_job_stays_where_it_is_unless_a_change_pays(make_snapshot: Any) -> None:
    rates = [[0, 1, 1.9, 2.8, 3.7, 3.75, 3.8, 3.85, 3.9]]
    snapshot = make_snapshot(1, cluster="2x4", rates=rates, left=1000.0, gpus=[4])
    assert shares("tide-fixed", snapshot) == [8]
    assert shares("tide-fixed", costing(snapshot, 30.0)) == [4]


def test_a_promised_job_with_slack_lends_its_gpu_and_takes_it_back_in_time(make_snapshot: Any) -> None:
    policy = make_policy("tide-fixed")
    first = make_snapshot(2, cluster="1x2", left=[1000.0, 100.0], deadline_s=[5000.0, np.inf])
    alone = first.with_rows(np.array([0]))
    admission = policy.admit(alone, 0)
    assert admission.admitted
    policy.accepted(alone, 0, admission)
    assert policy.allocate(first).gpus.tolist() == [0, 2]
    # The other job does not end as it should: the last moment to begin on one GPU is 4000 s.
    later = make_snapshot(
        2, cluster="1x2", now_s=3900.0, left=[1000.0, 100.0], deadline_s=[5000.0, np.inf], gpus=[0, 2]
    )
    decision = policy.allocate(later)
    assert decision.gpus[0] >= 1 or policy.next_wakeup_s(later, decision) <= 4500.0
    last = make_snapshot(
        2, cluster="1x2", now_s=4495.0, left=[1000.0, 100.0], deadline_s=[5000.0, np.inf], gpus=[0, 2]
    )
    assert policy.allocate(last).gpus.tolist() == [2, 0]


def test_a_job_that_runs_on_no_common_share_still_runs(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", rates=[[0, 0, 0, 3, 0], [0, 1, 2, 3, 4]], curve=[0, 1])
    odd, common = shares("tide-fixed", snapshot)
    assert odd == 3
    assert common == 4


def test_a_job_whose_least_share_is_odd_need_not_wait_for_a_common_one(make_snapshot: Any) -> None:
    # It runs on 3 GPUs or on 8, and the other job, which is shorter, has one of the eight.
    rates = [[0, 0, 0, 3, 0, 0, 0, 0, 8], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    snapshot = make_snapshot(2, cluster="1x8", rates=rates, curve=[0, 1], left=[1e5, 10.0])
    assert shares("tide-fixed", snapshot) == [3, 1]


def test_a_promised_job_that_waits_for_its_reservation_runs_beside_it(make_snapshot: Any) -> None:
    # The first job needs all GPUs until 100 s before its deadline at 1000 s, so the second has reserved them
    # after that. It runs well on eight GPUs alone, so a smaller share for good would make it late.
    rates = [[0, 1, 2, 3, 4, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 100]]
    columns = {"rates": rates, "curve": [0, 1], "left": [3600.0, 9_000.0], "deadline_s": [1000.0, 1100.0]}
    snapshot = make_snapshot(2, cluster="1x8", **columns)
    policy = make_policy("tide-fixed")
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [4, 1]
    assert policy.next_wakeup_s(snapshot, decision) <= 1000.0, "when its own GPUs are free"


def test_a_crowded_cluster_leaves_no_gpu_idle_that_a_job_on_odd_shares_could_use(make_snapshot: Any) -> None:
    # Promises need 28 of 31 GPUs all the time, and the last job runs on three GPUs or not at all.
    rates = [[float(k) for k in range(32)], [3.0 * (k == 3) for k in range(32)]]
    snapshot = make_snapshot(
        4, cluster="1x31", rates=rates, curve=[0, 0, 0, 1], max_gpus=[16, 8, 4, 31],
        left=[15_900.0, 7_950.0, 3_975.0, 1e5], deadline_s=[1000.0, 1000.0, 1000.0, np.inf],
    )  # fmt: skip
    assert shares("tide-fixed", snapshot) == [16, 8, 4, 3]


def test_a_job_that_waits_on_and_on_is_served_in_the_end(make_snapshot: Any) -> None:
    fresh = make_snapshot(9, cluster="1x8", left=[10_000.0] + [100.0] * 8, now_s=1.0, submit_s=0.0)
    assert shares("tide-fixed", fresh)[0] == 0
    long_ago = [0.0] + [1e6 - 1] * 8
    waited_s = 1e6
    assert waited_s / 10_000.0 > 9 * PATIENCE, "so long that its price is above all others"
    starved = make_snapshot(
        9, cluster="1x8", left=[10_000.0] + [100.0] * 8, now_s=waited_s, submit_s=long_ago
    )
    assert shares("tide-fixed", starved)[0] > 0


def test_the_error_of_a_running_job_is_known_and_a_new_one_gets_a_margin(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", now_s=10.0, gpus=[1, 2, 0], rate=[0.5, 2.0, 0.0], since_s=0.0)
    errors = SpeedErrors()
    assert errors.factors(snapshot).tolist() == [1.0, 1.0, 1.0]
    errors.observe(snapshot)
    slow, exact, waiting = errors.factors(snapshot)
    assert (slow, exact) == (2.0, 1.0)
    assert waiting == pytest.approx(np.exp(np.sqrt(np.log(2.0) ** 2 / 2)))
    errors.observe(snapshot)
    assert errors.jobs == 2, "each job is counted once"


def test_neighbours_on_a_gpu_are_no_error(make_snapshot: Any) -> None:
    part = promised_part(4)
    rates = [[0.0, part, 2 * part]]  # as promises count on: alone, a job has a rate of 1 on one slot
    shown = [part, 0.6, 1.0, 1.25, part / 2]
    snapshot = make_snapshot(5, cluster="2x4", rates=rates, now_s=10.0, gpus=[1] * 5, rate=shown, since_s=0.0)
    snapshot.cluster = Cluster.parse("2x1").shared_by(4)
    errors = SpeedErrors()
    errors.observe(snapshot)
    assert errors.factors(snapshot).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.8, 2.0])


def test_a_job_that_holds_more_than_its_curve_covers_is_no_trouble(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", rates=[[0, 1, 2]], gpus=[4, 0], rate=2.0, now_s=10.0)
    assert shares("tide-fixed", snapshot) == [2, 2]


def test_exact_beliefs_need_no_margin(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", now_s=10.0, gpus=[1, 2, 0], since_s=0.0)
    errors = SpeedErrors()
    errors.observe(snapshot)
    assert errors.factors(snapshot).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_half_with_deadlines_no_promise_is_broken_and_nobody_is_left(seed: int) -> None:
    profiles = ProfileSet.load(None)
    jobs = generate_jobs(profiles, jobs=60, hours=2.0, seed=seed, deadlines=0.5, max_gpu_hours=20)
    result = simulate(jobs, profiles, Cluster.parse("4x4"), "tide-fixed", resize_cost=5.0)
    assert result.promises_broken == 0
    assert result.deadline_met > 5
    assert not result.stalled
    assert np.isnan(result.finish_s).sum() == result.rejected.sum()


def test_wrong_beliefs_break_fewer_promises_than_under_elasticflow() -> None:
    profiles = ProfileSet.load(None)
    jobs = generate_jobs(profiles, jobs=150, hours=3.0, seed=3, deadlines=1.0, max_gpu_hours=20)
    late = {
        policy: simulate(
            jobs, profiles, Cluster.parse("4x4"), policy, resize_cost=5.0, belief_error=0.3
        ).promises_broken
        for policy in ("elasticflow", "tide-fixed")
    }
    assert late["tide-fixed"] < late["elasticflow"]


def test_a_negative_error_of_beliefs_is_refused() -> None:
    profiles = ProfileSet.load(None)
    jobs = generate_jobs(profiles, jobs=2, hours=1.0)
    with pytest.raises(InputError, match=r"belief_error must be at least 0, got -0\.1"):
        simulate(jobs, profiles, Cluster.parse("1x4"), "fifo", belief_error=-0.1)


# Lengths that nobody says: learnt from the jobs of the same kind that have ended.


def index(lengths: list[float], done: float) -> float:
    whole = np.array(sorted(lengths))
    first, last = (np.array([k], dtype=np.int64) for k in (0, len(whole)))
    return float(gittins(whole, first, last, np.array([done]))[0])


def test_if_all_of_a_kind_are_equally_long_the_rest_is_known() -> None:
    assert index([100.0], 0.0) == 100.0
    assert index([100.0, 100.0, 100.0], 30.0) == pytest.approx(70.0)


def test_if_most_are_short_a_new_job_is_probably_short_and_an_old_one_is_not() -> None:
    lengths = [10.0] * 9 + [1000.0]
    assert index(lengths, 0.0) == pytest.approx((9 * 10 + 10) / 9)
    assert index(lengths, 20.0) == pytest.approx(980.0)
    assert index(lengths, 1000.0) == np.inf


def looks(make_snapshot: Any, lefts: list[list[float]], numbers: list[list[int]]) -> tuple[Lengths, Any]:
    """Looks 10 s apart at jobs of one kind; the work left of each, and their numbers."""
    lengths, found = Lengths(), None
    for k, (left, number) in enumerate(zip(lefts, numbers, strict=True)):
        snapshot: Snapshot = make_snapshot(len(left), cluster="2x4", now_s=10.0 * k, left=left, gpus=1)
        snapshot.table.number[:] = number
        one: IntArray = np.ones(len(left))
        found = lengths.left_s(snapshot.with_rows(snapshot.rows), one)
    return lengths, found


def test_what_an_ended_job_took_is_expected_of_the_next_one(make_snapshot: Any) -> None:
    # Job 0 is seen at 25 and 15 to go, and gone 10 s later: its length was 20. Job 1 has done 5.
    _, left = looks(make_snapshot, [[25.0, 500.0], [15.0, 498.0], [495.0]], [[0, 1], [0, 1], [1]])
    assert left.tolist() == [15.0]


def test_the_work_left_is_never_looked_at_itself(make_snapshot: Any) -> None:
    for much in (0.0, 1e6):
        start = [25.0 + much, 500.0]
        _, left = looks(make_snapshot, [start, [start[0] - 10, 498.0], [495.0 - 0.0]], [[0, 1], [0, 1], [1]])
        assert left.tolist() == [15.0]


def test_before_the_first_end_a_kind_is_twice_as_long_as_its_furthest_job(
    make_snapshot: Any,
) -> None:
    _, left = looks(make_snapshot, [[100.0, 900.0], [92.0, 880.0]], [[0, 1], [0, 1]])
    assert left.tolist() == [2 * 20.0 - 8.0, 20.0]


def test_kinds_are_trusted_only_while_they_predict_lengths(make_snapshot: Any) -> None:
    """Jobs that end one after the other, each in the 10 s after it was seen with so much done."""
    for spread, trusted in ((1.0, True), (3.0, False)):
        lengths = Lengths()
        assert not lengths.trusted
        for k in range(8):
            done = 100.0 * spread ** (k % 3)
            for left, now_s in ((done + 10, 20.0 * k), (10.0, 20.0 * k + 10)):
                snapshot = make_snapshot(1, cluster="1x4", now_s=now_s, left=left, gpus=1)
                snapshot.table.number[:] = k
                lengths.left_s(snapshot.with_rows(snapshot.rows), np.ones(1))
        assert lengths.trusted is trusted


# What a job that has not run yet is taken to be like: the jobs of its model that ran before it.


LIMITS = BatchLimits(32, 1024, 8, 64)
FLAT, STEEP = [0.0, 1.0, 1.1, 1.2, 1.3] + [1.3] * 12, [float(k) for k in range(17)]


def seen_on(gpus: int, fixed_batch: int | None = None) -> JobBelief:
    """The belief about a job that has run on that many GPUs; on none for 0."""
    belief = JobBelief(LIMITS, fixed_batch)
    if gpus:
        belief.observe(1, gpus, 32, 0.1, 0.01)
    return belief


def moment(make_snapshot: Any, beliefs: list[JobBelief | None], **columns: Any) -> Snapshot:
    snapshot: Snapshot = make_snapshot(len(beliefs), cluster="4x4", rates=[FLAT, STEEP], **columns)
    snapshot.table.belief[:] = beliefs
    return snapshot


def test_a_job_of_an_unknown_kind_starts_small(make_snapshot: Any) -> None:
    found = SeenModels().believed(moment(make_snapshot, [seen_on(0), None]))
    assert found.unseen.tolist() == [True, False]
    assert found.most.tolist() == [FIRST_SHARE, 16]


def test_a_new_job_is_taken_to_be_like_the_one_of_its_kind_seen_on_the_most_gpus(make_snapshot: Any) -> None:
    models = SeenModels()
    now = moment(make_snapshot, [seen_on(1), seen_on(2), seen_on(0)], curve=[1, 0, 1])
    found = models.believed(now)
    assert not found.unseen.any()
    assert found.rates[found.curve[2]].tolist() == FLAT
    assert found.most.tolist() == [16, 16, 16], "jobs explore from where their kind was seen"
    assert EXPLORE * 2 == 16
    # The same job with another curve later: what counts is how it was when it was first seen there.
    later = moment(make_snapshot, [seen_on(2), seen_on(0)], curve=[1, 1])
    found = models.believed(later)
    assert found.rates[found.curve[1]].tolist() == FLAT
    assert found.rates[found.curve[0]].tolist() == STEEP, "a job that has run is judged by itself"


def test_jobs_that_keep_different_batch_sizes_are_of_different_kinds(make_snapshot: Any) -> None:
    now = moment(make_snapshot, [seen_on(4, 32), seen_on(0), seen_on(0, 32)], curve=0)
    assert SeenModels().believed(now).unseen.tolist() == [False, True, False]


def test_the_oldest_kind_is_forgotten(make_snapshot: Any) -> None:
    models = SeenModels()
    for number in range(KINDS_REMEMBERED + 1):
        models._observe((f"model-{number}", 0), 1, np.array(STEEP))
    assert len(models._seen) == KINDS_REMEMBERED
    assert ("model-0", 0) not in models._seen


def test_a_new_job_of_a_known_model_starts_on_the_share_that_suits_it(make_snapshot: Any) -> None:
    def first_share(others: int) -> int:
        now = moment(make_snapshot, [seen_on(others), seen_on(0)], curve=1, left=1000.0, max_gpus=[1, 8])
        return int(make_policy("tide").allocate(now).gpus[1])

    assert first_share(0) == FIRST_SHARE
    assert first_share(4) == 8
