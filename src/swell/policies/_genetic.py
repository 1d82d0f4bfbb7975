"""Genetic search over allocations with repair, compiled: the engine room of Pollux (OSDI'21, section 4.2).

An individual is a matrix, jobs x nodes, of GPUs. The power mean that Pollux maximises is a sum over jobs of
something that depends only on how many GPUs the job has, on whether they lie on one node or on several, and
on whether they differ from what it holds now. So the caller hands over tables of *losses* (see
`Problem`) and the search minimises their sum; it never calls a model.

What is as in the authors' search: population, single-point crossover over jobs, the three mutations, the
repair and its order, warm start. What differs: theirs selects by NSGA-II with cluster utility as a second
objective, whose Pareto front is then thrown away but for the point of best fitness; ours selects on the
fitness alone (binary tournament, the best of parents and children survive, no individual twice), is seeded
with a greedy solution by the caller, and stops once the best has not improved for a while.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled

Cells = npt.NDArray[np.int16]
"""GPUs per job and node."""
Population = npt.NDArray[np.int16]
"""Individuals x jobs x nodes."""

RESET = 0.1
"""Share of the jobs that a mutation puts back on what they hold now."""
THIN = 0.1
"""Share of the jobs that a mutation thins out, and of their cells that it empties."""
MAX_NODES = 16
"""A job is never spread over more nodes than this."""


class Problem(NamedTuple):
    """One decision. Jobs are in order of precedence: where two collide, the earlier one wins."""

    present: Cells
    """What each job holds now."""
    capacity: IntArray
    """GPUs in service on each node."""
    min_gpus: IntArray
    max_gpus: IntArray
    loss: FloatArray
    """`loss[j, s, k]`: of job j on k GPUs, on one node (s = 0) or several (s = 1), if that is a change."""
    loss_kept: FloatArray
    """Of each job if it keeps exactly what it holds now."""
    one_distributed: bool
    """Interference avoidance: at most one job that spans nodes on each node."""


class Found(NamedTuple):
    """The population at the end, best first."""

    population: Population
    losses: FloatArray
    generations: int


@compiled
def row_loss(problem: Problem, job: int, row: Cells) -> float:
    """The loss of one job on one row of GPUs per node."""
    gpus = 0
    nodes = 0
    changed = False
    present = problem.present[job]
    for m in range(row.size):
        gpus += row[m]
        nodes += row[m] > 0
        changed |= row[m] != present[m]
    if not changed:
        return problem.loss_kept[job]
    return problem.loss[job, 1 if nodes > 1 else 0, gpus]


@compiled
def total_loss(problem: Problem, cells: Cells) -> float:
    """What the search minimises: the sum of the jobs' losses."""
    total = 0.0
    for j in range(cells.shape[0]):
        total += row_loss(problem, j, cells[j])
    return total


@compiled
def repair(problem: Problem, cells: Cells, rng: np.random.Generator, order: IntArray, used: IntArray) -> None:
    """Make an individual legal in place; `order` and `used` are scratch, one entry per node."""
    jobs, nodes = cells.shape
    if problem.one_distributed:
        used[:] = 0
        for j in range(jobs):
            span = 0
            for m in range(nodes):
                span += cells[j, m] > 0
            if span > 1:
                for m in range(nodes):
                    if cells[j, m] > 0:
                        if used[m]:
                            cells[j, m] = 0
                        else:
                            used[m] = 1
    for j in range(jobs):
        gpus = 0
        span = 0
        for m in range(nodes):
            gpus += cells[j, m]
            span += cells[j, m] > 0
        if gpus > problem.max_gpus[j] or span > MAX_NODES:
            _clip(cells[j], problem.max_gpus[j], rng, order)
    used[:] = 0
    for j in range(jobs):
        gpus = 0
        for m in range(nodes):
            if cells[j, m] > 0:
                left = problem.capacity[m] - used[m]
                if cells[j, m] > left:
                    cells[j, m] = left
                used[m] += cells[j, m]
                gpus += cells[j, m]
        # Not given back to later jobs, as in the authors' order: this repair is the last.
        if gpus < problem.min_gpus[j]:
            cells[j] = 0


@compiled
def _clip(row: Cells, max_gpus: int, rng: np.random.Generator, order: IntArray) -> None:
    """At most `max_gpus` GPUs on at most `MAX_NODES` nodes, kept in a random order of the nodes."""
    count = 0
    for m in range(row.size):
        if row[m] > 0:
            order[count] = m
            count += 1
    gpus = 0
    for i in range(count):
        pick = i + int(rng.random() * (count - i))
        order[i], order[pick] = order[pick], order[i]
        m = order[i]
        if i >= MAX_NODES:
            row[m] = 0
        elif gpus + row[m] > max_gpus:
            row[m] = max_gpus - gpus
        gpus += row[m]


@compiled
def mutate(
    problem: Problem, cells: Cells, rng: np.random.Generator, used: IntArray, holders: IntArray
) -> None:
    """The three mutations in place; `used` and `holders` are scratch, one entry per node."""
    jobs, nodes = cells.shape
    used[:] = 0
    holders[:] = 0
    for j in range(jobs):
        if rng.random() < RESET:
            cells[j] = problem.present[j]
        if rng.random() < THIN:
            for m in range(nodes):
                if cells[j, m] > 0 and rng.random() < THIN:
                    cells[j, m] = 0
        for m in range(nodes):
            used[m] += cells[j, m]
            holders[m] += cells[j, m] > 0
    # Growth: on every node with free GPUs on average one job of all, and one of those already there.
    for m in range(nodes):
        most = problem.capacity[m]
        if used[m] >= most:
            continue
        if holders[m] > 0:
            chance = 1.0 / holders[m]
            for j in range(jobs):
                if cells[j, m] > 0 and rng.random() < chance:
                    cells[j, m] += int(rng.random() * (most - cells[j, m] + 1))
        j = _skip(jobs, rng)
        while j < jobs:
            cells[j, m] += int(rng.random() * (most - cells[j, m] + 1))
            j += 1 + _skip(jobs, rng)


@compiled
def _skip(jobs: int, rng: np.random.Generator) -> int:
    """How many jobs are passed over when each is taken with probability 1 / jobs."""
    if jobs == 1:
        return 0
    return int(np.log(1.0 - rng.random()) / np.log(1.0 - 1.0 / jobs))


@compiled
def _tournament(alive: int, rng: np.random.Generator) -> int:
    """The better of two individuals drawn at random; they are sorted, best first."""
    return min(int(rng.random() * alive), int(rng.random() * alive))


@compiled
def _same(one: Cells, other: Cells) -> bool:
    for j in range(one.shape[0]):
        for m in range(one.shape[1]):
            if one[j, m] != other[j, m]:
                return False
    return True


@compiled
def _survivors(pool: Population, losses: FloatArray, ranked: IntArray, size: int, kept: IntArray) -> int:
    """Fill `kept` with the best of the pool, no individual twice; how many there are."""
    alive = 0
    for i in ranked:
        twin = False
        back = alive - 1
        while back >= 0 and losses[kept[back]] == losses[i] and not twin:
            twin = _same(pool[kept[back]], pool[i])
            back -= 1
        if not twin:
            kept[alive] = i
            alive += 1
            if alive == size:
                break
    return alive


@compiled
def _evolve(
    problem: Problem,
    start: Population,
    size: int,
    generations: int,
    patience: int,
    rng: np.random.Generator,
) -> tuple[Population, FloatArray, int]:
    jobs, nodes = problem.present.shape
    order = np.empty(nodes, np.int64)
    used = np.empty(nodes, np.int64)
    holders = np.empty(nodes, np.int64)
    children = size + size % 2
    slots = max(size + children, start.shape[0])
    # Individuals stay where they are; `kept` lists the living, best first, and `spare` the other places.
    pool = np.empty((slots, jobs, nodes), np.int16)
    losses = np.empty(slots, np.float64)
    for i in range(start.shape[0]):
        pool[i] = start[i]
        repair(problem, pool[i], rng, order, used)
        losses[i] = total_loss(problem, pool[i])
    kept = np.empty(slots, np.int64)
    ranked = np.argsort(losses[: start.shape[0]], kind="mergesort")
    alive = _survivors(pool, losses, ranked, size, kept)
    spare = np.empty(slots, np.int64)
    living = np.empty(slots, np.bool_)
    candidates = np.empty(slots, np.int64)
    idle = 0
    generation = 0
    while generation < generations and idle < patience:
        generation += 1
        best = losses[kept[0]]
        living[:] = False
        living[kept[:alive]] = True
        count = 0
        for i in range(slots):
            if not living[i]:
                spare[count] = i
                count += 1
        for c in range(0, children, 2):
            mother = pool[kept[_tournament(alive, rng)]]
            father = pool[kept[_tournament(alive, rng)]]
            cut = int(rng.random() * jobs)
            for twin in range(2):
                if twin == 1:
                    mother, father = father, mother
                child = pool[spare[c + twin]]
                child[:cut] = mother[:cut]
                child[cut:] = father[cut:]
                mutate(problem, child, rng, used, holders)
                repair(problem, child, rng, order, used)
                losses[spare[c + twin]] = total_loss(problem, child)
        # Parents before children: of two equals the older one stays.
        candidates[:alive] = kept[:alive]
        candidates[alive : alive + children] = spare[:children]
        pooled = candidates[: alive + children].copy()
        ranked = pooled[np.argsort(losses[pooled], kind="mergesort")]
        alive = _survivors(pool, losses, ranked, size, kept)
        idle = 0 if losses[kept[0]] < best else idle + 1
    return pool[kept[:alive]], losses[kept[:alive]], generation


def evolve(
    problem: Problem,
    start: Population,
    *,
    size: int,
    generations: int,
    patience: int,
    rng: np.random.Generator,
) -> Found:
    """Search from the individuals in `start` until `generations` or `patience` of them without a gain."""
    result: Any = _evolve(problem, start, size, generations, patience, rng)
    return Found(*result)
