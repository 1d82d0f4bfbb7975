"""Gandiva's time slices and loans, on cases worked out by hand."""

from __future__ import annotations

from typing import Any

from swell.policies import make_policy


def at(snapshot: Any, now_s: float, gpus: Any = None) -> Any:
    """The same jobs at another time, holding `gpus`."""
    moved = snapshot.with_rows(snapshot.rows)
    moved.now_s = now_s
    table, rows = snapshot.table, snapshot.rows
    table.run_s[rows] += (table.gpus[rows] > 0) * (now_s - table.since_s[rows])
    table.since_s[rows] = now_s
    if gpus is not None:
        table.gpus[rows] = gpus
        table.rate[rows] = moved.rate_at(moved.gpus)
    return moved


def test_over_subscribed_jobs_take_turns_of_a_quantum(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="1x4", requested=4)
    policy = make_policy("gandiva")
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [4, 0, 0]
    assert policy.next_wakeup_s(snapshot, decision) == 60.0
    assert policy.allocate(at(snapshot, 30.0, [4, 0, 0])).gpus.tolist() == [4, 0, 0]
    assert policy.allocate(at(snapshot, 60.0)).gpus.tolist() == [0, 4, 0]
    assert policy.allocate(at(snapshot, 120.0, [0, 4, 0])).gpus.tolist() == [0, 0, 4]
    assert policy.allocate(at(snapshot, 180.0, [0, 0, 4])).gpus.tolist() == [4, 0, 0]


def test_a_large_job_is_not_starved_by_small_ones(make_snapshot: Any) -> None:
    snapshot = make_snapshot(5, cluster="1x4", requested=[1, 1, 1, 1, 4])
    policy = make_policy("gandiva")
    assert policy.allocate(snapshot).gpus.tolist() == [1, 1, 1, 1, 0]
    assert policy.allocate(at(snapshot, 60.0, [1, 1, 1, 1, 0])).gpus.tolist() == [0, 0, 0, 0, 4]


def test_idle_gpus_are_lent_by_doubling_and_taken_back_on_arrival(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", requested=[2, 6], gpus=[2, 0])
    alone = snapshot.with_rows(snapshot.rows[:1])
    policy = make_policy("gandiva")
    decision = policy.allocate(alone)
    assert decision.gpus.tolist() == [4]
    assert policy.next_wakeup_s(alone, decision) == 60.0
    assert policy.allocate(at(alone, 60.0, [4])).gpus.tolist() == [8]
    snapshot.table.gpus[0] = 8
    assert policy.allocate(at(snapshot, 70.0)).gpus.tolist() == [2, 6]


def test_a_loan_that_did_not_help_is_given_back_and_not_tried_again(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="2x4", rates=[[0, 1, 2, 2, 1.9, 2, 2, 2, 2]], requested=2, gpus=2)
    policy = make_policy("gandiva")
    assert policy.allocate(snapshot).gpus.tolist() == [4]
    assert policy.allocate(at(snapshot, 60.0, [4])).gpus.tolist() == [2]
    settled = at(snapshot, 120.0, [2])
    decision = policy.allocate(settled)
    assert decision.gpus.tolist() == [2]
    assert policy.next_wakeup_s(settled, decision) == float("inf")


def test_without_lending_a_lone_job_has_what_it_asked_for(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="2x4", requested=2, gpus=2)
    assert make_policy("gandiva:lend=false").allocate(snapshot).gpus.tolist() == [2]
