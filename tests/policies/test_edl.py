"""EDL's elastic version of Tiresias, on cases worked out by hand."""

from __future__ import annotations

from typing import Any

from swell.policies import make_policy


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
