"""OASiS: prices, the schedules they lead to, and who comes in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import InputError
from swell.policies import Admission
from swell.policies.oasis import Bidder, Oasis, Schedule, _reserved, _slots, best_schedule


def bidder(**changes: Any) -> Bidder:
    linear = Bidder(
        work=100.0,
        rates=np.array([0.0, 1.0, 2.0, 4.0]),
        counts=np.array([0, 1, 2, 4]),
        held=0,
        worth=100.0,
        submit_s=0.0,
        deadline_s=110.0,
        sharpness=50.0,
        run_s=100.0,
    )
    return linear._replace(**changes)


def bid(
    job: Bidder, free: list[int], prices: list[float], pause_s: float = 0.0
) -> tuple[float, float, list[int]]:
    edges = np.linspace(0.0, 110.0, len(free) + 1)
    payoff, end_s, gpus = best_schedule(job, edges, np.array(free), np.array(prices), pause_s, 128)
    return payoff, end_s, gpus.tolist()


def test_a_schedule_takes_the_cheap_slots() -> None:
    payoff, end_s, gpus = bid(bidder(), [4] * 10, [0.5] * 5 + [0.1] * 5)
    assert gpus[:5] == [0] * 5
    assert end_s <= 110
    assert payoff == pytest.approx(100 - 100 * 0.1, rel=0.1)


def test_a_schedule_stays_within_what_is_free() -> None:
    _, end_s, gpus = bid(bidder(deadline_s=1000.0), [1, 0, 2, 4, 1, 0, 2, 4, 4, 4], [0.1] * 10)
    assert end_s < 110
    assert all(share <= free for share, free in zip(gpus, [1, 0, 2, 4, 1, 0, 2, 4, 4, 4]))


def test_there_is_no_schedule_where_too_little_is_free() -> None:
    payoff, _, _ = bid(bidder(work=300.0), [2] * 10, [0.1] * 10)
    assert payoff == -np.inf


def test_pauses_are_part_of_the_schedule() -> None:
    assert bid(bidder(work=109.0), [1] * 10, [0.1] * 10)[0] > -np.inf
    assert bid(bidder(work=109.0), [1] * 10, [0.1] * 10, pause_s=2.0)[0] == -np.inf
    assert bid(bidder(work=109.0, held=1), [1] * 10, [0.1] * 10, pause_s=2.0)[0] > -np.inf


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_programme_finds_the_best_of_all_schedules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free, prices = rng.integers(0, 5, 5), rng.uniform(0.01, 1.0, 5)
    job = bidder(work=float(rng.uniform(20, 250)), rates=np.array([0.0, 1.0, 1.7, 2.6]), deadline_s=115.0)
    best = -np.inf
    for choice in np.ndindex(4, 4, 4, 4, 4):
        done = cost = 0.0
        for b, share in enumerate(choice):
            if job.counts[share] > free[b]:
                break
            start, left = b * 22.0, job.work - done
            if job.rates[share] * 22 >= left:
                end_s = start + left / job.rates[share]
                cost += prices[b] * job.counts[share] * (end_s - start)
                value = job.worth / (1 + np.exp(50 * (end_s - 115) / 115))
                best = max(best, value - cost)
                break
            done += job.rates[share] * 22
            cost += prices[b] * job.counts[share] * 22
    found, _, _ = bid(job, free.tolist(), prices.tolist())
    assert found <= best + 1e-9, "nothing beats trying everything"
    assert found >= best - 2.0 or best == -np.inf, "parts of 1/128 cost at most a few of them"


def come_in(policy: Oasis, snapshot: Any, index: int) -> Admission:
    """Ask for a job and, if the answer is yes, let it in."""
    answer = policy.admit(snapshot, index)
    if answer.admitted:
        policy.accepted(snapshot, index, answer)
    return answer


def test_a_full_cluster_is_too_dear_for_a_newcomer_of_equal_worth(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x4", left=[400, 400, 100], deadline_s=[110, 1000, 110])
    policy = Oasis()
    assert come_in(policy, snapshot.with_rows(np.array([0])), 0).admitted
    assert come_in(policy, snapshot.with_rows(np.array([0, 1])), 1).admitted, "it has time to wait"
    answer = come_in(policy, snapshot, 2)
    assert not answer.admitted
    assert answer.reason


def test_a_refused_job_reserves_nothing(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[400, 100], deadline_s=[110, 20])
    policy = Oasis()
    assert come_in(policy, snapshot.with_rows(np.array([0])), 0).admitted
    assert not come_in(policy, snapshot, 1).admitted
    assert policy.allocate(snapshot.with_rows(np.array([0]))).gpus.tolist() == [4]


def test_a_quote_takes_nothing_from_the_next_job(make_snapshot: Any) -> None:
    # Each needs the whole cluster until its deadline: a schedule kept for one would shut out the other.
    snapshot = make_snapshot(2, cluster="1x4", left=400, deadline_s=110)
    policy = Oasis()
    assert policy.admit(snapshot.with_rows(np.array([0])), 0).admitted
    assert come_in(policy, snapshot.with_rows(np.array([1])), 0).admitted
    assert not policy.admit(snapshot, 0).admitted, "the second one has the cluster now"


def test_a_job_without_deadline_is_never_refused(make_snapshot: Any) -> None:
    snapshot = make_snapshot(6, cluster="1x2", left=1000)
    policy = Oasis()
    for i in range(6):
        assert come_in(policy, snapshot.with_rows(np.arange(i + 1)), i).admitted
    assert policy.allocate(snapshot).gpus.sum() > 0


def test_a_job_without_a_schedule_gets_one(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="1x4", left=100, deadline_s=1000)
    policy = Oasis()
    come_in(policy, snapshot, 0)
    late = make_snapshot(1, cluster="1x4", now_s=5000.0, left=100, deadline_s=1000)
    assert policy.allocate(late).gpus.sum() > 0


def test_a_job_with_a_deadline_whose_schedule_fits_no_more_is_endangered(make_snapshot: Any) -> None:
    jobs: dict[str, Any] = {"left": [400, 400, 50], "deadline_s": [110, 1000, np.inf]}
    whole, policy = make_snapshot(3, cluster="1x4", **jobs), Oasis()
    assert policy.endangered(whole).tolist() == [], "nobody has a schedule"
    for i in range(3):
        assert come_in(policy, whole.with_rows(np.arange(i + 1)), i).admitted
    assert policy.endangered(whole).tolist() == []
    assert 0 in policy.endangered(make_snapshot(3, cluster="1x2", **jobs)).tolist()
    assert 2 not in policy.endangered(make_snapshot(3, cluster="1x1", **jobs)).tolist(), "it has no deadline"
    over = make_snapshot(3, cluster="1x2", now_s=5000.0, **jobs)
    assert policy.endangered(over).tolist() == [], "their schedules are over"


def test_slots_are_equal_or_grow() -> None:
    assert np.allclose(np.diff(_slots(10.0, 110.0, 60.0, 10)), 10.0)
    widths = np.diff(_slots(0.0, 1000.0, 1.0, 20))
    assert widths[0] == pytest.approx(1.0, rel=0.01)
    assert np.all(np.diff(widths) > 0)
    assert widths.sum() == pytest.approx(1000.0)


def test_what_is_reserved_in_a_slot_is_its_peak() -> None:
    schedules = [
        Schedule(np.array([0.0, 15.0]), np.array([2, 4]), 18.0),
        Schedule(np.array([10.0]), np.array([1]), 40.0),
    ]
    assert _reserved(schedules, np.array([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])).tolist() == [2, 5, 1, 1, 0]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="worth"):
        Oasis(worth="gold")
    with pytest.raises(InputError, match="slots"):
        Oasis(slots=0)
