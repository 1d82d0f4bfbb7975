"""Pollux's search against the one its authors describe: fitness reached and CPU seconds, same problems.

    python -m benchmarks.pollux_fitness [--seeds 3] [--jobs 40 --jobs 640]

The reference is a plain numpy NSGA-II written from the description (population 100, 100 generations,
crossover, mutations and repair as published, cluster utility as second objective, the point of best fitness
taken). It starts from the present allocation, and looks losses up in the same tables as ours: the authors'
code asks the models again and again, so its time here is flattering. Jobs are made from the profiles that
ship.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.common import table, write_json
from swell.domain import Cluster, JobSpec
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves
from swell.perf.profiles import ProfileSet
from swell.policies import JobTable, Snapshot
from swell.policies._genetic import MAX_NODES, Problem, total_loss
from swell.policies.pollux import Pollux, precedence, speedups

NODES = {12: 16, 40: 16, 160: 16, 640: 64}
PER_NODE = 4
NOW_S = 1e6


def make_snapshot(jobs: int, seed: int, *, running: bool) -> Snapshot:
    """Jobs of all ages with models fitted on what they would have seen; on nothing, or in full swing."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.parse(f"{NODES[jobs]}x{PER_NODE}")
    profiles = [profile for profile in ProfileSet.load() if profile.trains]
    chosen = [profiles[i] for i in rng.integers(len(profiles), size=jobs)]
    age_s = np.sort(rng.uniform(30.0, 20_000.0, jobs))[::-1]
    specs = [
        JobSpec(
            job_id=f"job-{i}",
            submit_s=float(NOW_S - age_s[i]),
            model=profile.name,
            batch_size=profile.limits.init_batch,
            max_gpus=profile.max_gpus,
        )
        for i, profile in enumerate(chosen)
    ]
    rows = JobTable(specs)
    rows.since_s[:] = NOW_S
    rows.attained_gpu_s[:] = age_s * rng.uniform(0, 4, jobs)
    rows.resizes[:] = age_s / 420.0 * rng.uniform(0, 1, jobs)  # at most one each seven minutes
    for row, profile in enumerate(chosen):
        belief = JobBelief(profile.limits, fixed_batch=profile.pinned_batch)
        gpus = 1
        for _ in range(int(rng.integers(0, 6))):
            full, rest = divmod(gpus, PER_NODE)
            shape = (PER_NODE,) * full + ((rest,) if rest else ())
            plan = belief.plan(len(shape), gpus)
            step_s, sync_s = profile.step_time(shape, plan.local_batch)
            belief.observe(len(shape), gpus, plan.local_batch, step_s, sync_s)
            belief.observe_gradients(*profile.grad_stats(plan.total(gpus), 0))
            gpus = min(2 * gpus, belief.limits.max_gpus, 32)
        rows.belief[row] = belief
    curves = Curves(np.zeros((1, cluster.capacity + 1)))
    snapshot = Snapshot(NOW_S, cluster, rows, np.arange(jobs), curves)
    if running:
        # What the policy gave to the older nine tenths of them; the others have only just come.
        older = Snapshot(NOW_S, cluster, rows, np.arange(jobs * 9 // 10), curves)
        carry_out(older, Pollux(seed=seed + 1000).allocate(older).per_node)
    return snapshot


def carry_out(snapshot: Snapshot, per_node: Any) -> None:
    """Give every job GPUs on its nodes."""
    taken = snapshot.cluster.first_gpu[:-1].copy()
    for row, counts in zip(snapshot.rows, per_node):
        gpus = [gpu for node, count in enumerate(counts) for gpu in range(taken[node], taken[node] + count)]
        taken += counts
        snapshot.table.placement[row] = tuple(gpus)
        snapshot.table.gpus[row] = len(gpus)


class Reference:
    """The search as the authors describe it, in plain numpy over the whole population at once."""

    def __init__(self, problem: Problem, speedup: Any, seed: int) -> None:
        self.problem = problem
        self.speedup = speedup
        self.rng = np.random.default_rng(seed)
        self.jobs = np.arange(len(problem.present))

    def run(self, size: int = 100, generations: int = 100) -> Any:
        """The individual of best fitness after all generations."""
        alive = self.repair(self.problem.present[None].copy())
        values = self.evaluate(alive)
        rank, crowding = sort_fronts(values)
        for _ in range(generations):
            children = self.repair(self.mutate(self.mate(alive, rank, crowding, size)))
            everyone = np.concatenate([alive, children])
            distinct = {cells.tobytes(): i for i, cells in enumerate(everyone)}
            everyone = everyone[list(distinct.values())]
            values = self.evaluate(everyone)
            rank, crowding = sort_fronts(values)
            best = np.lexsort((-crowding, rank))[:size]
            alive, rank, crowding, values = everyone[best], rank[best], crowding[best], values[best]
        return alive[np.argmin(values[:, 0])]

    def evaluate(self, cells: Any) -> Any:
        """Both objectives, to be minimised: the loss, and minus the cluster's utility."""
        problem, gpus = self.problem, cells.sum(axis=2)
        across = (np.count_nonzero(cells, axis=2) > 1).astype(int)
        kept = (cells == problem.present).all(axis=2)
        loss = np.where(kept, problem.loss_kept, problem.loss[self.jobs, across, gpus]).sum(axis=1)
        active = ((cells.sum(axis=1) > 0) * problem.capacity).sum(axis=1)
        utility = self.speedup[self.jobs, across, gpus].sum(axis=1) / np.maximum(active, 1)
        return np.column_stack([loss, -utility])

    def mate(self, alive: Any, rank: Any, crowding: Any, size: int) -> Any:
        """Pairs of children of parents chosen by binary tournament, cut at one job."""
        drawn = self.rng.integers(len(alive), size=(size, 2))
        one, two = drawn.T
        better = (rank[one] < rank[two]) | ((rank[one] == rank[two]) & (crowding[one] > crowding[two]))
        mother, father = alive[np.where(better, one, two)].reshape(2, size // 2, *alive.shape[1:])
        head = (self.jobs < self.rng.integers(len(self.jobs), size=(size // 2, 1)))[:, :, None]
        return np.concatenate([np.where(head, mother, father), np.where(head, father, mother)])

    def mutate(self, cells: Any) -> Any:
        """Back to the present, thinned out, grown where there is room."""
        rng, problem = self.rng, self.problem
        cells = np.where(rng.random(cells.shape[:2])[:, :, None] < 0.1, problem.present, cells)
        thin = rng.random(cells.shape[:2])[:, :, None] < 0.1
        cells[thin & (rng.random(cells.shape) < 0.1)] = 0
        room = (cells.sum(axis=1) < problem.capacity)[:, None, :]
        anybody = room / len(self.jobs)
        there = room & (cells > 0)
        holder = there / np.maximum(there.sum(axis=1, keepdims=True), 1)
        grows = rng.random(cells.shape) < anybody + holder - anybody * holder
        more = rng.random(cells.shape) * (problem.capacity - cells + 1)
        return (cells + grows * more).astype(np.int16)

    def repair(self, cells: Any) -> Any:
        """Interference, most GPUs, most nodes, capacity; in that order, earlier jobs first."""
        problem = self.problem
        spanning = (np.count_nonzero(cells, axis=2) > 1)[:, :, None] & (cells > 0)
        cells = np.where(spanning & (spanning.cumsum(axis=1) > 1), 0, cells)
        shuffled = np.argsort(self.rng.random(cells.shape), axis=2)
        rows = np.take_along_axis(cells, shuffled, axis=2)
        rows = np.diff(np.minimum(rows.cumsum(axis=2), problem.max_gpus[:, None]), axis=2, prepend=0)
        rows = np.where((rows > 0).cumsum(axis=2) <= MAX_NODES, rows, 0)
        np.put_along_axis(cells, shuffled, rows, axis=2)
        cells = np.diff(np.minimum(cells.cumsum(axis=1), problem.capacity), axis=1, prepend=0)
        return cells.astype(np.int16)


def sort_fronts(values: Any) -> tuple[Any, Any]:
    """For each individual the number of its front of non-dominated ones, and how lonely it is there."""
    no_worse = (values[:, None] <= values[None]).all(axis=2)
    dominates = no_worse & (values[:, None] < values[None]).any(axis=2)
    rank = np.zeros(len(values), dtype=int)
    crowding = np.zeros(len(values))
    left, front = np.ones(len(values), dtype=bool), 0
    while left.any():
        members = np.flatnonzero(left & ~dominates[left].any(axis=0))
        rank[members] = front
        for objective in values[members].T:
            order = members[np.argsort(objective, kind="stable")]
            ordered = np.sort(objective)
            width = ordered[-1] - ordered[0] or 1.0
            crowding[order[[0, -1]]] = np.inf
            crowding[order[1:-1]] += (ordered[2:] - ordered[:-2]) / width
        left[members] = False
        front += 1
    return rank, crowding


def compare(jobs: int, seed: int, *, running: bool) -> dict[str, Any]:
    """Both searches on one problem."""
    snapshot = make_snapshot(jobs, seed, running=running)
    policy = Pollux(seed=seed)
    started = time.process_time()
    decision = policy.allocate(snapshot)
    ours_s = time.process_time() - started
    order = precedence(snapshot)
    problem = policy.problem(snapshot, order)

    def fitness(cells: Any) -> float:
        return policy.fitness(total_loss(problem, cells.astype(np.int16)), jobs)

    assert decision.per_node is not None
    started = time.process_time()
    theirs = Reference(problem, speedups(snapshot, order)[0], seed).run()
    theirs_s = time.process_time() - started
    return {
        "jobs": jobs,
        "gpus": snapshot.capacity,
        "state": "running" if running else "empty",
        "seed": seed,
        "keeping": fitness(problem.present),
        "reference": fitness(theirs),
        "ours": fitness(decision.per_node[order]),
        "reference_cpu_s": theirs_s,
        "ours_cpu_s": ours_s,
    }


def main() -> None:
    """Compare, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, action="append", choices=sorted(NODES))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    Pollux(generations=1).allocate(make_snapshot(40, 0, running=True))  # compile
    records = []
    for jobs in args.jobs or sorted(NODES):
        for running in (False, True):
            for seed in range(args.seeds):
                records.append(compare(jobs, seed, running=running))
                print(records[-1], flush=True)
    header = list(records[0])
    rows = [
        [f"{v:.6f}" if k in ("keeping", "reference", "ours") else v for k, v in record.items()]
        for record in records
    ]
    table("Pollux: fitness (higher is better) and CPU seconds", header, rows)
    write_json("pollux_fitness", records)
    worse = [r for r in records if r["ours"] < r["reference"]]
    print(f"\nours is no worse in {len(records) - len(worse)} of {len(records)}")


if __name__ == "__main__":
    main()
