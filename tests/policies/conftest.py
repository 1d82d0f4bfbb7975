"""Snapshots made by hand: a few columns in, a moment of the cluster out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from swell.domain import Cluster, IntArray, JobSpec
from swell.perf.curves import Curves
from swell.policies import JobTable, Snapshot

Column = float | Sequence[float]
MakeSnapshot = Callable[..., Snapshot]


def linear(max_gpus: int) -> list[float]:
    """The curve of a job that uses every GPU fully: k GPUs do k units of work a second."""
    return [float(k) for k in range(max_gpus + 1)]


def make(
    jobs: int,
    *,
    cluster: str | Cluster = "2x4",
    now_s: float = 0.0,
    rates: Sequence[Sequence[float]] | None = None,
    requested: Column = 1,
    left: Column = 1000.0,
    submit_s: Column = 0.0,
    deadline_s: Column = np.inf,
    min_gpus: Column = 1,
    max_gpus: Column | None = None,
    rows: Sequence[int] | None = None,
    **columns: Column,
) -> Snapshot:
    """A snapshot of `jobs` active jobs. A column is one value for all or one value per job.

    `rates` are the curves, linear up to the whole cluster unless given; `curve` says which one is whose.
    Every other keyword is a column of `JobTable` (gpus, attained_gpu_s, run_s, ...), true as of `now_s`. Jobs
    that hold GPUs hold the first free ones and progress at the rate of their curve. `rows` names the active
    jobs where the table holds more than those.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster

    def column(values: Column) -> list[float]:
        return np.broadcast_to(np.asarray(values, dtype=float), (jobs,)).tolist()

    bounds = [None] * jobs if max_gpus is None else [int(k) for k in column(max_gpus)]
    specs = [
        JobSpec(
            job_id=f"job-{i}",
            submit_s=submit,
            model="made-up",
            batch_size=32,
            gpus=int(gpus),
            deadline_s=None if np.isinf(deadline) else deadline,
            min_gpus=int(least),
            max_gpus=most,
        )
        for i, (submit, gpus, deadline, least, most) in enumerate(
            zip(column(submit_s), column(requested), column(deadline_s), column(min_gpus), bounds)
        )
    ]
    table = JobTable(specs)
    curves = Curves(np.array(rates if rates is not None else [linear(cluster.capacity)], dtype=float))
    table.left[:] = left
    table.since_s[:] = now_s
    for name, values in columns.items():
        getattr(table, name)[:] = values
    held = table.gpus
    first = 0
    for row in range(jobs):
        table.placement[row] = tuple(range(first, first + int(held[row])))
        first += int(held[row])
    if "rate" not in columns:
        table.rate[:] = curves.rates[table.curve, np.minimum(held, curves.max_gpus)]
    active = np.arange(jobs, dtype=np.int64) if rows is None else np.array(rows, dtype=np.int64)
    return Snapshot(now_s, cluster, table, active, curves)


@st.composite
def any_snapshot(draw: st.DrawFn, max_jobs: int = 12) -> Snapshot:
    """Some moment of a small cluster: jobs waiting and running, rows in any order, curves of any kind."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    capacity = nodes * per_node
    jobs = draw(st.integers(1, max_jobs))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    holes = draw(st.booleans())
    now_s = float(draw(st.integers(0, 100_000)))
    columns = draw(st.sampled_from([capacity, max(1, capacity // 2), 2 * capacity]))
    curves = int(rng.integers(1, 4))
    k = np.arange(columns + 1)
    rates = k ** rng.uniform(0.2, 1.0, (curves, 1)) / (1 + rng.uniform(0, 0.2, (curves, 1)) * k)
    if holes:
        rates = rates * (rng.random((curves, columns + 1)) > 0.3)
    rates[:, 0] = 0.0
    submit_s = np.sort(rng.uniform(0, now_s, jobs)) if now_s else np.zeros(jobs)
    requested = 2 ** rng.integers(0, 5, jobs)
    left = rng.uniform(1, 1e5, jobs)
    gpus = np.zeros(jobs, dtype=int)
    free = capacity
    for i in range(jobs):
        want = int(requested[i]) if rng.random() < 0.7 else int(rng.integers(1, 5))
        want = min(want, columns)
        if rng.random() < 0.6 and want <= free:
            gpus[i] = want
            free -= want
    ran = np.where(gpus > 0, 1.0, rng.random(jobs) < 0.5) > 0
    start_s = submit_s + (now_s - submit_s) * rng.random(jobs)
    run_s = np.where(ran, (now_s - start_s) * rng.random(jobs), 0.0)
    snapshot = make(
        jobs,
        cluster=f"{nodes}x{per_node}",
        now_s=now_s,
        rates=rates.tolist(),
        requested=requested.tolist(),
        left=left.tolist(),
        submit_s=submit_s.tolist(),
        deadline_s=(now_s + rng.uniform(1, 1e5, jobs)).tolist() if draw(st.booleans()) else np.inf,
        max_gpus=None if draw(st.booleans()) else rng.integers(1, capacity + 1, jobs).tolist(),
        curve=rng.integers(0, curves, jobs).tolist(),
        gpus=gpus.tolist(),
        run_s=run_s.tolist(),
        attained_gpu_s=(run_s * requested).tolist(),
        first_start_s=np.where(ran, start_s, np.inf).tolist(),
        last_start_s=np.where(ran, start_s, np.inf).tolist(),
        resizes=np.where(ran, rng.integers(0, 5, jobs), 0).tolist(),
    )
    return in_any_rows(snapshot, rng.permutation(jobs))


def in_any_rows(snapshot: Snapshot, order: IntArray) -> Snapshot:
    """The same moment with job `order[r]` in row r of the table: rows say nothing about the order of jobs."""
    for column in vars(snapshot.table).values():
        column[:] = [column[job] for job in order]
    return snapshot.with_rows(np.argsort(order))


@pytest.fixture(scope="session")
def make_snapshot() -> MakeSnapshot:
    """The function `make`: snapshots by hand."""
    return make


@pytest.fixture(scope="session")
def snapshots() -> Any:
    """A hypothesis strategy for snapshots; draw from it with `data.draw(snapshots)`."""
    return any_snapshot()
