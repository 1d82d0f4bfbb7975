"""Fifo and Srtf on cases small enough to do by hand."""

from __future__ import annotations

from typing import Any

from swell.policies import make_policy


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
