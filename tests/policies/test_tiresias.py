"""Tiresias and its Gittins version, on cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swell.policies import make_policy
from swell.policies.tiresias import gittins_index


def later(snapshot: Any, seconds: float, gpus: Any) -> Any:
    """Carry out the shares and let time pass, in place."""
    table, rows = snapshot.table, snapshot.rows
    table.attained_gpu_s[rows] = snapshot.attained_gpu_s
    table.run_s[rows] = snapshot.run_s
    table.gpus[rows] = gpus
    table.since_s[rows] = snapshot.now_s
    started = rows[(np.asarray(gpus) > 0) & np.isinf(table.first_start_s[rows])]
    table.first_start_s[started] = snapshot.now_s
    moved = snapshot.with_rows(rows)
    moved.now_s = snapshot.now_s + seconds
    return moved


def test_a_job_falls_behind_newcomers_once_its_service_passes_the_threshold(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", requested=[4, 4])
    policy = make_policy("tiresias")
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [4, 0]
    assert policy.next_wakeup_s(snapshot, decision) == 57600 / 4

    shortly_before = later(snapshot, 14399.0, [4, 0])
    assert policy.allocate(shortly_before).gpus.tolist() == [4, 0]
    at_the_threshold = later(shortly_before, 1.0, [4, 0])
    assert policy.allocate(at_the_threshold).gpus.tolist() == [0, 4]


def test_the_last_queue_is_served_in_order_of_demotion(make_snapshot: Any) -> None:
    # The younger job is demoted first, so it keeps its place before the older one.
    snapshot = make_snapshot(3, cluster="1x4", requested=[4, 4, 4], attained_gpu_s=[50_000, 60_000, 0])
    policy = make_policy("tiresias")
    assert policy.allocate(snapshot).gpus.tolist() == [4, 0, 0]
    both = later(snapshot, 2000.0, [4, 0, 0])
    assert policy.allocate(both).gpus.tolist() == [0, 0, 4]
    assert policy.allocate(both.with_rows(np.array([0, 1]))).gpus.tolist() == [0, 4]


def test_jobs_that_are_demoted_at_the_same_moment_keep_their_order(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x4", requested=4, attained_gpu_s=60_000)
    policy = make_policy("tiresias")
    assert policy.allocate(snapshot).gpus.tolist() == [4, 0, 0]
    assert policy.allocate(snapshot.with_rows(np.array([1, 2]))).gpus.tolist() == [4, 0]


def test_smaller_jobs_behind_one_that_does_not_fit_are_served(make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="2x4", requested=[4, 8, 2, 2])
    assert make_policy("tiresias").allocate(snapshot).gpus.tolist() == [4, 0, 2, 2]


def test_three_queues_are_served_in_turn(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x1", attained_gpu_s=[8000, 5000, 100])
    policy = make_policy("tiresias:thresholds=3250/7200")
    assert policy.allocate(snapshot).gpus.tolist() == [0, 0, 1]
    assert policy.allocate(snapshot.with_rows(np.array([0, 1]))).gpus.tolist() == [0, 1]


def test_by_first_start_an_older_job_that_never_ran_waits_for_a_younger_that_did(make_snapshot: Any) -> None:
    snapshot = make_snapshot(
        2, cluster="1x4", requested=4, gpus=[0, 4], first_start_s=[np.inf, 5.0], now_s=9.0
    )
    assert make_policy("tiresias:fifo=start").allocate(snapshot).gpus.tolist() == [0, 4]
    assert make_policy("tiresias").allocate(snapshot).gpus.tolist() == [4, 0]


def test_a_starving_job_is_promoted_after_waiting_its_run_time_times_the_knob(make_snapshot: Any) -> None:
    snapshot = make_snapshot(
        2, cluster="1x1", now_s=100.0, attained_gpu_s=[100, 0], run_s=[100, 0], gpus=[1, 0], first_start_s=0.0
    )
    policy = make_policy("tiresias:thresholds=100/1000,promote=2")
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [0, 1]
    # The second job reaches its own threshold at 200; the first has starved for 2 x 100 s at 300.
    assert policy.next_wakeup_s(snapshot, decision) == pytest.approx(200.0)
    snapshot.table.attained_gpu_s[1] = -500.0  # so that it stays in the first queue meanwhile
    waits_on = later(snapshot.with_rows(snapshot.rows), 150.0, [0, 1])
    decision = policy.allocate(waits_on)
    assert decision.gpus.tolist() == [0, 1]
    assert policy.next_wakeup_s(waits_on, decision) == pytest.approx(300.0)
    assert policy.allocate(later(waits_on, 50.0, [0, 1])).gpus.tolist() == [1, 0]


def test_the_gittins_index_is_chance_of_ending_over_expected_service() -> None:
    history = np.array([1.0, 2.0, 4.0, 10.0])
    sums = np.concatenate([[0.0], np.cumsum(history)])
    index = gittins_index(history, sums, np.array([0.0, 2.0, 2.0, 20.0]), np.array([2.0, 3.0, np.inf, 5.0]))
    # a=0, d=2: 2 of 4 end; expected min(S, 2) = (1 + 2 + 2 + 2) / 4.  a=2, d=3: 1 of 2; (2 + 3) / 2.
    assert index.tolist() == pytest.approx([2 / 7, 1 / 5, 2 / 10, 0.0])


def test_gittins_prefers_the_job_that_history_says_is_about_to_end(make_snapshot: Any) -> None:
    policy = make_policy("tiresias-gittins:learn=4,thresholds=1000")
    # Four jobs leave after 100 GPU-s each: whoever has received 90 is likely to be nearly done.
    first = make_snapshot(6, cluster="1x4", requested=1, gpus=[1, 1, 1, 1, 0, 0])
    policy.allocate(first)
    after = later(first, 100.0, [1, 1, 1, 1, 0, 0])
    after.table.attained_gpu_s[[4, 5]] = [10.0, 90.0]
    after.table.requested[[4, 5]] = 4
    assert policy.allocate(after.with_rows(np.array([4, 5]))).gpus.tolist() == [0, 4]


def test_until_it_has_seen_enough_jobs_leave_gittins_is_2d_las(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", requested=4, attained_gpu_s=[10.0, 90.0])
    assert make_policy("tiresias-gittins").allocate(snapshot).gpus.tolist() == [4, 0]


# EDL's elastic version of Tiresias, on cases worked out by hand.


def test_elastic_tiresias_shrinks_running_jobs_to_let_a_waiting_one_in(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", requested=[4, 2], gpus=[4, 0])
    assert make_policy("tiresias").allocate(snapshot).gpus.tolist() == [4, 0]
    gpus = make_policy("elastic-tiresias").allocate(snapshot).gpus
    # Least shares are 2 and 1; relative to the rate at request the spare GPU adds 1/4 here and 1/2 there.
    assert gpus.tolist() == [2, 2]


def test_elastic_tiresias_does_not_shrink_for_fewer_jobs_than_it_is_told(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", requested=[4, 2], gpus=[4, 0])
    assert make_policy("elastic-tiresias:pending=1").allocate(snapshot).gpus.tolist() == [4, 0]


def test_elastic_tiresias_grows_into_idle_gpus_where_the_rate_grows_most(make_snapshot: Any) -> None:
    flat = [0, 1, 1, 1, 1, 1, 1, 1, 1]
    snapshot = make_snapshot(
        2, cluster="2x4", rates=[flat, list(range(9))], curve=[0, 1], requested=[1, 2], gpus=[1, 2]
    )
    assert make_policy("elastic-tiresias").allocate(snapshot).gpus.tolist() == [1, 7]
