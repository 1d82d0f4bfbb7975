"""Optimus's greedy, on cases worked out by hand and against trying every step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swell.policies import make_policy


def test_each_job_has_one_gpu_in_order_of_arrival_while_they_last(make_snapshot: Any) -> None:
    snapshot = make_snapshot(5, cluster="1x3", left=[9, 8, 7, 6, 5])
    assert make_policy("optimus").allocate(snapshot).gpus.tolist() == [1, 1, 1, 0, 0]


def test_the_next_gpu_goes_where_it_saves_most_time(make_snapshot: Any) -> None:
    # From 1 to 2 GPUs the long job saves 1000/2 s, then 1000/2 - 1000/3 = 167 s, then 83 s, then 50 s;
    # the short one saves 90/2 = 45 s.
    snapshot = make_snapshot(2, cluster="1x6", left=[1000, 90])
    assert make_policy("optimus").allocate(snapshot).gpus.tolist() == [5, 1]


def test_it_stops_when_one_more_gpu_saves_nothing(make_snapshot: Any) -> None:
    across_nodes = [0, 1, 2, 3, 4, 3, 5, 6, 7]
    snapshot = make_snapshot(1, cluster="2x4", rates=[across_nodes])
    assert make_policy("optimus").allocate(snapshot).gpus.tolist() == [4]


def test_jobs_are_placed_smallest_first(make_snapshot: Any) -> None:
    snapshot = make_snapshot(3, cluster="2x4", left=[1000, 1, 100])
    decision = make_policy("optimus").allocate(snapshot)
    assert decision.order is not None
    assert np.all(np.diff(decision.gpus[decision.order]) >= 0)


@given(
    left=st.lists(st.floats(1, 1e6), min_size=1, max_size=6),
    power=st.lists(st.floats(0.1, 1.0), min_size=3, max_size=3),
    gpus=st.integers(1, 12),
)
def test_the_heap_agrees_with_trying_all_jobs_for_every_gpu(
    left: list[float], power: list[float], gpus: int, make_snapshot: Any
) -> None:
    n = len(left)
    rates = np.arange(gpus + 1) ** np.array(power)[:, None]
    rates[:, 0] = 0
    curve = np.arange(n) % 3
    snapshot = make_snapshot(n, cluster=f"1x{gpus}", rates=rates, curve=curve, left=left)
    shares = np.zeros(n, dtype=int)
    shares[:gpus] = 1
    for _ in range(gpus - shares.sum()):
        best, who = 0.0, -1
        for i in np.flatnonzero((shares > 0) & (shares < gpus)):
            row = rates[curve[i]]
            gain = left[i] * (1 / row[shares[i]] - 1 / row[shares[i] + 1])
            if gain > best:
                best, who = gain, i
        if who < 0:
            break
        shares[who] += 1
    assert make_policy("optimus").allocate(snapshot).gpus.tolist() == shares.tolist()
