"""AFS: the paper's test, its tournament and its leases, by hand and against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swell.policies import make_policy
from swell.policies.afs import legal_shares


def shares(policy: str, snapshot: Any) -> list[int]:
    return make_policy(policy).allocate(snapshot).gpus.tolist()


def test_contended_the_shortest_on_one_gpu_run(make_snapshot: Any) -> None:
    snapshot = make_snapshot(5, cluster="1x2", left=[50, 10, 40, 20, 30], gpus=[1, 1, 0, 0, 0])
    assert shares("afs-l", snapshot) == [0, 1, 0, 1, 0]


def test_contended_with_very_many_jobs_the_shortest_run_too(make_snapshot: Any) -> None:
    left = np.random.default_rng(0).permutation(500) + 1.0
    snapshot = make_snapshot(500, cluster="2x4", left=left)
    gpus = np.array(shares("afs-l", snapshot))
    assert set(np.flatnonzero(gpus)) == set(np.argsort(left)[:8])
    assert gpus.max() == 1


@pytest.mark.parametrize("jobs", [9, 16, 17, 500])
def test_contended_with_equal_jobs_the_oldest_run(make_snapshot: Any, jobs: int) -> None:
    assert np.flatnonzero(shares("afs-l", make_snapshot(jobs, cluster="2x4"))).tolist() == list(range(8))


def test_equally_elastic_jobs_the_short_one_takes_all_it_can(make_snapshot: Any) -> None:
    # With linear curves (k+1)/k - 1 = 1/k beats 1/(k+1) of the long job as long as the short has fewer; then
    # 1/k_a > 1/(k_b + 1) fails once k_a > k_b: the short job is served first, but not alone.
    snapshot = make_snapshot(2, cluster="1x5", left=[1000, 10])
    assert shares("afs-l:shares=any", snapshot) == [2, 3]


def test_a_long_job_that_scales_beats_a_short_one_that_does_not(make_snapshot: Any) -> None:
    flat = [0, 1, 1.1, 1.15, 1.2]
    snapshot = make_snapshot(2, cluster="1x4", rates=[[0, 1, 2, 3, 4], flat], curve=[0, 1], left=[1000, 10])
    # At (1, 1): 0.1 for the short one against 1/2. At (2, 1): 0.1 against 1/3.
    assert shares("afs-l:shares=any", snapshot) == [3, 1]
    # A step to 4 GPUs would not fit.
    assert shares("afs-l", snapshot) == [2, 2]


def test_a_dip_where_a_node_is_crossed_is_stepped_over(make_snapshot: Any) -> None:
    snapshot = make_snapshot(1, cluster="2x4", rates=[[0, 1, 2, 3, 4, 3, 3.5, 5, 6]])
    assert shares("afs-l", snapshot) == [8]
    assert shares("afs-l:shares=any", snapshot) == [8]


def test_nobody_is_given_gpus_that_do_not_help(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="2x4", rates=[[0, 1, 1.9, 1.9, 1.5, 1, 1, 1, 1]])
    assert shares("afs-l", snapshot) == [2, 2]
    assert shares("afs-p", snapshot) == [2, 2]


def test_coddl_shares_are_factors_and_multiples_of_a_node(make_snapshot: Any) -> None:
    assert np.flatnonzero(legal_shares("coddl", 4, 16)).tolist() == [0, 1, 2, 4, 8, 12, 16]
    assert np.flatnonzero(legal_shares("coddl", 6, 18)).tolist() == [0, 1, 2, 3, 6, 12, 18]
    snapshot = make_snapshot(2, cluster="2x4", left=[1000, 10])
    assert set(shares("afs-l", snapshot)) <= {0, 1, 2, 4, 8}


@pytest.mark.parametrize("policy", ["afs-l", "afs-p"])
@given(data=st.data())
def test_shares_are_legal(policy: str, data: Any, snapshots: Any) -> None:
    snapshot = data.draw(snapshots)
    legal = legal_shares("coddl", snapshot.cluster.gpus_per_node, snapshot.curves.max_gpus)
    for i, share in enumerate(shares(policy, snapshot)):
        if not legal[share]:
            most = min(snapshot.max_gpus[i], snapshot.curves.max_gpus)
            within = range(snapshot.min_gpus[i], most + 1)
            runs = [k for k in within if snapshot.curves.rates[snapshot.curve[i], k] > 0]
            assert share == runs[0] and not any(legal[k] for k in runs), "its bounds contain no legal share"


def beats(i: int, j: int, rate: Any, up: Any, left: Any) -> bool:
    """The paper's test, as it is written."""
    if left[i] / rate[i] <= left[j] / rate[j]:
        return bool((up[i] - rate[i]) / rate[i] > (up[j] - rate[j]) / up[j])
    return not beats(j, i, rate, up, left)


@given(
    left=st.lists(st.integers(1, 10**6), min_size=1, max_size=9, unique=True),
    power=st.lists(st.floats(0.3, 0.95), min_size=9, max_size=9, unique=True),
    spare=st.integers(0, 20),
)
def test_a_job_that_beats_all_others_takes_the_gpu(
    left: list[int], power: list[float], spare: int, make_snapshot: Any
) -> None:
    n = len(left)
    rates = np.arange(n + spare + 1, dtype=float) ** np.array(power[:n])[:, None]
    expected = np.ones(n, dtype=int)
    for _ in range(spare):
        rate, up = rates[np.arange(n), expected], rates[np.arange(n), expected + 1]
        best = [i for i in range(n) if all(i == j or beats(i, j, rate, up, left) for j in range(n))]
        assume(best)  # three jobs may beat each other in a circle
        expected[best[0]] += 1
    snapshot = make_snapshot(n, cluster=f"1x{n + spare}", rates=rates, curve=np.arange(n), left=left)
    assert shares("afs-l:shares=any", snapshot) == expected.tolist()


def test_afs_p_gives_to_the_job_that_wins_whoever_is_shorter(make_snapshot: Any) -> None:
    # From 1 GPU: doubling beats +10% whether it is the short one (1 > 0.09) or the long one (0.5 > 0.1).
    flat = [0, 1, 1.1, 1.15, 1.2]
    for left in ([1, 1000], [1000, 1]):
        snapshot = make_snapshot(2, cluster="1x4", rates=[[0, 1, 2, 3, 4], flat], curve=[0, 1], left=left)
        assert shares("afs-p:shares=any", snapshot) == [3, 1]


def test_afs_p_does_not_look_at_the_work_left(make_snapshot: Any) -> None:
    one = make_snapshot(3, cluster="2x4", left=[1, 100, 10_000])
    other = make_snapshot(3, cluster="2x4", left=[10_000, 100, 1])
    assert shares("afs-p", one) == shares("afs-p", other)


def test_the_seed_decides_the_toss(make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x3", left=100)  # shares: any, since 2 is no factor of 3
    outcomes = {tuple(shares(f"afs-p:shares=any,seed={seed}", snapshot)) for seed in range(10)}
    assert outcomes == {(2, 1), (1, 2)}


def test_contended_afs_p_goes_by_leases_used_then_first_start_then_arrival(make_snapshot: Any) -> None:
    snapshot = make_snapshot(
        4,
        cluster="1x2",
        now_s=9000.0,
        gpus=[1, 1, 0, 0],
        run_s=[7200, 7100, 0, 0],
        first_start_s=[0, 100, np.inf, np.inf],
    )
    policy = make_policy("afs-p")
    decision = policy.allocate(snapshot)
    assert decision.gpus.tolist() == [0, 1, 1, 0]
    assert policy.next_wakeup_s(snapshot, decision) == pytest.approx(9000.0 + 100.0)
