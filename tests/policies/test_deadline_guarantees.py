"""Promises are kept: by a small reference simulator that plays out exactly what a policy admitted, and by the
real one, where the placer moves jobs and each move costs a pause that no policy planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swell.domain import Cluster, JobSpec
from swell.perf.curves import Curves
from swell.perf.profiles import ProfileSet
from swell.policies import JobTable, Policy, Snapshot, make_policy
from swell.sim import simulate
from swell.sim.generate import generate_jobs


@dataclass(frozen=True)
class Workload:
    cluster: Cluster
    specs: tuple[JobSpec, ...]
    curves: Curves
    curve: tuple[int, ...]
    work: tuple[float, ...]


def play(load: Workload, policy: Policy, pause_s: float) -> tuple[np.ndarray, np.ndarray]:
    """When each job ends (infinite for refused ones), and which were refused.

    Every change of share stops a job for `pause_s`, and nothing else ever happens to it.
    """
    table = JobTable(load.specs)
    table.curve[:] = load.curve
    table.left[:] = load.work
    n = len(load.specs)
    end_s, refused = np.full(n, np.inf), np.zeros(n, dtype=bool)
    active: list[int] = []
    now_s, wake_s, coming = 0.0, np.inf, 0
    for _ in range(200 * n):
        ends = {
            row: max(table.since_s[row], table.paused_until_s[row]) + table.left[row] / table.rate[row]
            for row in active
            if table.gpus[row]
        }
        events = [wake_s, *ends.values()] + ([table.submit_s[coming]] if coming < n else [])
        if min(events) == np.inf:
            break
        now_s = min(events)
        for row in list(active):
            ran_s = max(now_s - max(table.since_s[row], table.paused_until_s[row]), 0.0)
            table.left[row] = max(table.left[row] - table.rate[row] * ran_s, 0.0)
            table.since_s[row] = now_s
            if ends.get(row, np.inf) <= now_s:
                end_s[row] = now_s
                table.gpus[row], table.rate[row] = 0, 0.0
                active.remove(row)
        while coming < n and table.submit_s[coming] <= now_s:
            rows = np.array([*active, coming])
            snapshot = Snapshot(now_s, load.cluster, table, rows, load.curves, pause_s)
            answer = policy.admit(snapshot, len(rows) - 1)
            if answer.admitted:
                policy.accepted(snapshot, len(rows) - 1, answer)
                active.append(coming)
            else:
                refused[coming] = True
            coming += 1
        wake_s = np.inf
        if not active:
            continue
        snapshot = Snapshot(now_s, load.cluster, table, np.array(active), load.curves, pause_s)
        decision = policy.allocate(snapshot)
        wake_s = policy.next_wakeup_s(snapshot, decision)
        assert wake_s > now_s
        assert decision.gpus.sum() <= load.cluster.capacity
        for row, gpus in zip(active, decision.gpus, strict=True):
            if gpus != table.gpus[row]:
                assert gpus == 0 or gpus & (gpus - 1) == 0, "a share is a power of two"
                assert gpus == 0 or load.curves.rates[table.curve[row], gpus] > 0, (
                    "a job can run on its share"
                )
                table.gpus[row] = gpus
                table.rate[row] = load.curves.rates[table.curve[row], gpus]
                table.paused_until_s[row] = now_s + pause_s
    return end_s, refused


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 14 jobs in a tight spot; curves that saturate, fall, or have holes; some without deadline."""
    cluster = Cluster.parse(f"{draw(st.integers(1, 4))}x{draw(st.sampled_from([1, 2, 4]))}")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 14))
    k = np.arange(cluster.capacity + 1)
    rates = k ** rng.uniform(0.1, 1.0, (3, 1)) / (1 + rng.uniform(0, 0.15, (3, 1)) * k)
    if draw(st.booleans()):
        rates *= rng.random(rates.shape) > 0.25
    rates[:, 0] = 0.0
    curve = rng.integers(0, 3, n)
    gap_s = draw(st.sampled_from([0.0, 20.0, 200.0]))
    submit_s = np.cumsum(rng.exponential(gap_s, n)) if gap_s else np.zeros(n)
    work = rng.uniform(10, 500, n)
    slack = rng.uniform(0.3, draw(st.sampled_from([1.0, 3.0])), n)
    deadline_s = submit_s + slack * work
    best_effort = rng.random(n) < 0.2
    specs = tuple(
        JobSpec(
            job_id=f"job-{i}",
            submit_s=float(submit_s[i]),
            model="made-up",
            batch_size=32,
            deadline_s=None if best_effort[i] else float(deadline_s[i]),
        )
        for i in range(n)
    )
    return Workload(cluster, specs, Curves(rates), tuple(curve), tuple(work))


@pytest.mark.parametrize("name", ["elasticflow", "edf-admission", "oasis"])
@pytest.mark.parametrize("pause_s", [0.0, 5.0])
@settings(max_examples=100)
@given(load=workloads())
def test_no_admitted_deadline_is_missed(name: str, pause_s: float, load: Workload) -> None:
    end_s, refused = play(load, make_policy(name), pause_s)
    for i, spec in enumerate(load.specs):
        if spec.deadline_s is not None and not refused[i]:
            assert end_s[i] <= spec.deadline_s, f"{spec.job_id} ended {end_s[i] - spec.deadline_s} s late"


@pytest.mark.parametrize("name", ["elasticflow", "oasis"])
@settings(max_examples=60)
@given(load=workloads())
def test_best_effort_jobs_end_as_well(name: str, load: Workload) -> None:
    end_s, refused = play(load, make_policy(name), 0.0)
    can_run = load.curves.rates[:, [k for k in (1, 2, 4, 8, 16) if k <= load.cluster.capacity]].any(axis=1)
    for i, spec in enumerate(load.specs):
        if spec.deadline_s is None:
            assert not refused[i]
            assert np.isfinite(end_s[i]) == can_run[load.curve[i]]


@settings(max_examples=60)
@given(load=workloads())
def test_the_same_workload_gives_the_same_ends(load: Workload) -> None:
    once, _ = play(load, make_policy("elasticflow"), 5.0)
    again, _ = play(load, make_policy("elasticflow"), 5.0)
    assert np.array_equal(once, again)


@pytest.fixture(scope="module")
def profiles() -> ProfileSet:
    return ProfileSet.load(None)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    jobs=st.integers(5, 60),
    hours=st.sampled_from([0.2, 1.0, 5.0]),
    cluster=st.sampled_from(["1x4", "2x4", "4x4", "2x8", "3x4"]),
    resize_cost_s=st.sampled_from([0.0, 5.0, 60.0]),
)
@example(seed=18, jobs=54, hours=1.0, cluster="2x4", resize_cost_s=60.0)
@example(seed=71, jobs=57, hours=0.2, cluster="4x4", resize_cost_s=5.0)
@example(seed=91, jobs=45, hours=0.2, cluster="4x4", resize_cost_s=60.0)
@example(seed=10000, jobs=53, hours=0.2, cluster="3x4", resize_cost_s=5.0)
@example(seed=910, jobs=50, hours=0.2, cluster="2x8", resize_cost_s=5.0)
@example(seed=2092, jobs=50, hours=0.2, cluster="2x8", resize_cost_s=60.0)
def test_elasticflow_keeps_promises_though_jobs_are_moved(
    profiles: ProfileSet, seed: int, jobs: int, hours: float, cluster: str, resize_cost_s: float
) -> None:
    load = generate_jobs(
        profiles, jobs=jobs, hours=hours, deadlines=0.9, seed=seed, max_gpus=8, max_gpu_hours=20
    )
    result = simulate(load, profiles, Cluster.parse(cluster), "elasticflow", resize_cost=resize_cost_s)
    assert result.promises_broken == 0
