"""Fifo and Srtf on cases small enough to do by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.policies import make_policy
from swell.policies.baselines import water_fill


def shares(policy: str, snapshot: Any) -> list[int]:
    return make_policy(policy).allocate(snapshot).gpus.tolist()


def test_fifo_lets_the_first_that_does_not_fit_hold_up_the_rest(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="2x4", requested=[4, 2, 4, 1])
    assert shares("fifo", snapshot) == [4, 2, 0, 0]


def test_fifo_with_backfill_lets_smaller_jobs_pass(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="2x4", requested=[4, 2, 4, 1])
    assert shares("fifo:backfill=true", snapshot) == [4, 2, 0, 1]


def test_fifo_never_takes_gpus_from_a_running_job(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", requested=[8, 4], gpus=[0, 4])
    assert shares("fifo", snapshot) == [0, 4]


def test_srtf_runs_what_is_done_soonest_and_preempts_the_rest(make_snapshot: Any) -> None:
    # At their request the jobs need 1000/4 = 250 s, 600/2 = 300 s and 200/4 = 50 s.
    snapshot = make_snapshot(3, cluster="1x6", requested=[4, 2, 4], left=[1000, 600, 200], gpus=[4, 2, 0])
    assert shares("srtf", snapshot) == [0, 2, 4]


def test_srtf_gives_nothing_to_a_job_that_cannot_run_on_its_request(make_snapshot: Any) -> None:
    snapshot = make_snapshot(
        2,
        cluster="1x4",
        rates=[[0, 0, 0, 3, 4], [0, 1, 2, 3, 4]],
        curve=[0, 1],
        requested=[2, 4],
        left=[1, 99],
    )
    assert shares("srtf", snapshot) == [0, 4]


# Max-min shares and Themis, on cases worked out by hand.


def test_shares_are_equal_and_the_remainder_goes_to_the_oldest(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4")
    assert make_policy("max-min").allocate(snapshot).gpus.tolist() == [3, 3, 2]


def test_what_a_small_job_cannot_use_is_shared_by_the_others(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", max_gpus=[1, 8, 8])
    assert make_policy("max-min").allocate(snapshot).gpus.tolist() == [1, 4, 3]


def test_the_remainder_stays_with_whom_it_is(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", gpus=[2, 3, 3])
    assert make_policy("max-min").allocate(snapshot).gpus.tolist() == [2, 3, 3]


def test_no_job_is_given_gpus_that_slow_it_down(make_snapshot: Any) -> None:
    peaks_at_two = [0, 1, 1.5, 1.2, 1.1, 1, 1, 1, 1]
    snapshot = make_snapshot(2, cluster="2x4", rates=[peaks_at_two, list(range(9))], curve=[0, 1])
    assert make_policy("max-min").allocate(snapshot).gpus.tolist() == [2, 6]


def test_with_more_jobs_than_gpus_the_oldest_have_one_each(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="1x3")
    assert make_policy("max-min").allocate(snapshot).gpus.tolist() == [1, 1, 1, 0]


@given(
    bounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=20),
    spare=st.integers(0, 50),
)
def test_water_filling_is_max_min_fair(bounds: list[tuple[int, int]], spare: int) -> None:
    low = np.array([a for a, _ in bounds])
    high = low + np.array([b for _, b in bounds])
    capacity = int(low.sum()) + spare
    shares, level = water_fill(low, high, capacity)
    assert shares.sum() <= capacity
    # Nobody below its bound is below the level, and nobody above its floor is above it.
    assert np.all((shares >= level) | (shares == high))
    assert np.all((shares <= level) | (shares == low))
    # One more level for all would not fit (or nobody wants it).
    assert np.clip(level + 1, low, high).sum() > capacity or np.all(shares == high) or level == capacity


def test_themis_gives_the_gpus_to_the_worst_off(make_snapshot: Any) -> None:
    # Alone on 2 of 4 GPUs each would need 100 s. Having waited for 3000 s the first is at rho 30 and more
    # whatever it gets; the second is at 13 if it waits for another lease of 1200 s.
    snapshot = make_snapshot(2, cluster="1x4", now_s=3000.0, submit_s=[0.0, 3000.0], left=200.0)
    assert make_policy("themis").allocate(snapshot).gpus.tolist() == [4, 0]
    snapshot = make_snapshot(2, cluster="1x4", now_s=300.0, submit_s=[0.0, 300.0], left=200.0)
    # Now the second is worst off, until it has one GPU (rho 2); then the first is (from 5 to 3.67).
    assert make_policy("themis").allocate(snapshot).gpus.tolist() == [3, 1]


def test_themis_shares_equally_among_equals(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="2x4")
    assert make_policy("themis").allocate(snapshot).gpus.tolist() == [2, 2, 2, 2]


def test_themis_takes_no_gpus_before_their_lease_is_over(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", left=[1e6, 1e3], submit_s=[0.0, 100.0])
    policy = make_policy("themis:lease_s=1000")
    decision = policy.allocate(snapshot.with_rows(np.array([0])))
    assert decision.gpus.tolist() == [4]
    assert policy.next_wakeup_s(snapshot.with_rows(np.array([0])), decision) == pytest.approx(1000.0)

    snapshot.table.gpus[0] = 4
    during = snapshot.with_rows(snapshot.rows)
    during.now_s = 999.0
    assert policy.allocate(during).gpus.tolist() == [4, 0]
    after = snapshot.with_rows(snapshot.rows)
    after.now_s = 1000.0
    assert policy.allocate(after).gpus[1] > 0
