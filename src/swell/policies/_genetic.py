"""Genetic search over allocations with repair, compiled: the engine room of Pollux (OSDI'21, section 4.2).

An individual is a matrix of GPU counts, jobs x nodes. The power mean that Pollux maximises comes from a sum
over jobs. A job's term in that sum depends only on how many GPUs the job has, on whether they lie on one node
or on several, and on whether they differ from what the job holds now. So the caller passes tables of these
terms, called *losses* (see `Problem`), and the search minimises their sum; it never calls a model.

The population, the single-point crossover over jobs, the three mutations, the repair and its order, and the
warm start are those of the authors' search. Selection differs. The authors use NSGA-II with cluster utility
as a second objective, and then use only the point with the best fitness. Ours selects by fitness alone
(binary tournament; the best of parents and children survive; no individual twice). In addition, our search
starts from a greedy solution given by the caller, stops once the best individual has not improved for a
while, and has a second kind of child: a copy of its mother in which two jobs exchange GPUs, which the
mutations hardly ever do.

Loops and sorting are written out even where numpy has a function, because compiling numpy's functions takes
seconds at the first use on a machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled

Cells = npt.NDArray[np.int16]
"""GPUs per job and node."""
Population = npt.NDArray[np.int16]
"""Individuals x jobs x nodes."""

RESET = 0.1
"""Share of the jobs that a mutation puts back on the GPUs they hold now."""
THIN = 0.1
"""Share of the jobs that a mutation takes GPUs from, and share of those jobs' cells that it empties."""
HAND_OVER = 0.5
"""Share of the children that only exchange GPUs between two jobs."""
TRADE = 0.5
"""Share of these in which a job gives all its GPUs on one node for all GPUs of the other job."""
MAX_NODES = 16
"""A job is never spread over more nodes than this."""


class Problem(NamedTuple):
    """The input of one search. Jobs are in order of precedence: where two collide, the earlier one wins."""

    present: Cells
    """The GPUs that each job holds now, jobs x nodes."""
    capacity: IntArray
    """GPUs in service on each node."""
    min_gpus: IntArray
    max_gpus: IntArray
    loss: FloatArray
    """`loss[j, s, k]`: loss of job j if it changes to k GPUs, on one node (s = 0) or several (s = 1)."""
    loss_kept: FloatArray
    """Loss of each job if it keeps exactly the GPUs it holds now."""
    one_distributed: bool
    """Interference avoidance: at most one job that spans nodes on each node."""


class Found(NamedTuple):
    """The population at the end, best first."""

    population: Population
    losses: FloatArray
    generations: int


@compiled
def _copy(target: Cells, source: Cells, first: int, last: int) -> None:
    for j in range(first, last):
        for m in range(target.shape[1]):
            target[j, m] = source[j, m]


@compiled
def rank_by(values: FloatArray, order: IntArray, start: int, stop: int) -> None:
    """Sort `order[:stop]` by ascending value, stably; `order[:start]` is sorted already."""
    for i in range(start, stop):
        which = order[i]
        low = 0
        high = i
        while low < high:
            middle = (low + high) // 2
            if values[order[middle]] <= values[which]:
                low = middle + 1
            else:
                high = middle
        for j in range(i, low, -1):
            order[j] = order[j - 1]
        order[low] = which


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
        for m in range(nodes):
            used[m] = 0
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
    for m in range(nodes):
        used[m] = 0
    for j in range(jobs):
        gpus = 0
        for m in range(nodes):
            if cells[j, m] > 0:
                left = problem.capacity[m] - used[m]
                if cells[j, m] > left:
                    cells[j, m] = left
                used[m] += cells[j, m]
                gpus += cells[j, m]
        # These GPUs do not go to later jobs: as in the authors' search, this repair comes last.
        if gpus < problem.min_gpus[j]:
            for m in range(nodes):
                cells[j, m] = 0


@compiled
def _clip(row: Cells, max_gpus: int, rng: np.random.Generator, order: IntArray) -> None:
    """Cut a job to `max_gpus` GPUs on at most `MAX_NODES` nodes; a random order says which nodes stay."""
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
    """Apply the three mutations in place; `used` and `holders` are scratch, one entry per node."""
    jobs, nodes = cells.shape
    for m in range(nodes):
        used[m] = 0
        holders[m] = 0
    for j in range(jobs):
        if rng.random() < RESET:
            _copy(cells, problem.present, j, j + 1)
        if rng.random() < THIN:
            for m in range(nodes):
                if cells[j, m] > 0 and rng.random() < THIN:
                    cells[j, m] = 0
        for m in range(nodes):
            used[m] += cells[j, m]
            holders[m] += cells[j, m] > 0
    # Growth: on every node with free GPUs, on average one job of all and one of the jobs already there grow.
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
def hand_over(cells: Cells, rng: np.random.Generator) -> None:
    """Our own mutation: a job gives one GPU on a node to another job, or all of them for all that job has."""
    jobs, nodes = cells.shape
    m = int(rng.random() * nodes)
    count = 0
    giver = -1
    for j in range(jobs):
        if cells[j, m] > 0:
            count += 1
            if rng.random() * count < 1.0:
                giver = j
    taker = int(rng.random() * jobs)
    if giver < 0 or taker == giver:
        return
    if rng.random() < TRADE:
        gpus = cells[giver, m]
        cells[giver, m] = 0
        for other in range(nodes):
            cells[giver, other] += cells[taker, other]
            cells[taker, other] = 0
        cells[taker, m] = gpus
    else:
        cells[giver, m] -= 1
        cells[taker, m] += 1


@compiled
def _skip(jobs: int, rng: np.random.Generator) -> int:
    """The number of jobs to skip until the next one, if each is taken with probability 1 / jobs."""
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
def _survivors(pool: Population, losses: FloatArray, ranked: IntArray, count: int, size: int) -> int:
    """Move the best `size` of the ranked to the front, no individual twice; returns how many there are."""
    alive = 0
    for r in range(count):
        i = ranked[r]
        twin = False
        back = alive - 1
        while back >= 0 and losses[ranked[back]] == losses[i] and not twin:
            twin = _same(pool[ranked[back]], pool[i])
            back -= 1
        if not twin:
            ranked[r] = ranked[alive]
            ranked[alive] = i
            alive += 1
            if alive == size:
                break
    return alive


@compiled
def _evolve(
    problem: Problem,
    pool: Population,
    losses: FloatArray,
    ranked: IntArray,
    count: int,
    size: int,
    generations: int,
    patience: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Evolve the first `count` individuals of the pool; returns the survivors' number and the generations.

    Individuals stay at their place in the pool. `ranked` lists the places: first those of the survivors, best
    first, then the places that the children of the next generation take.
    """
    jobs, nodes = problem.present.shape
    order = np.empty(nodes, np.int64)
    used = np.empty(nodes, np.int64)
    holders = np.empty(nodes, np.int64)
    for i in range(count):
        repair(problem, pool[i], rng, order, used)
        losses[i] = total_loss(problem, pool[i])
    rank_by(losses, ranked, 0, count)
    alive = _survivors(pool, losses, ranked, count, size)
    idle = 0
    generation = 0
    while generation < generations and idle < patience:
        generation += 1
        best = losses[ranked[0]]
        for c in range(size):
            mother = pool[ranked[_tournament(alive, rng)]]
            place = ranked[alive + c]
            child = pool[place]
            if rng.random() < HAND_OVER:
                _copy(child, mother, 0, jobs)
                hand_over(child, rng)
            else:
                cut = int(rng.random() * jobs)
                _copy(child, mother, 0, cut)
                _copy(child, pool[ranked[_tournament(alive, rng)]], cut, jobs)
                mutate(problem, child, rng, used, holders)
            repair(problem, child, rng, order, used)
            losses[place] = total_loss(problem, child)
        # Of two equal individuals the older one stays.
        rank_by(losses, ranked, alive, alive + size)
        alive = _survivors(pool, losses, ranked, alive + size, size)
        idle = 0 if losses[ranked[0]] < best else idle + 1
    return alive, generation


def evolve(
    problem: Problem,
    start: Population,
    *,
    size: int,
    generations: int,
    patience: int,
    rng: np.random.Generator,
) -> Found:
    """Search from the individuals in `start`, for `generations` or until `patience` pass without a gain."""
    count = len(start)
    places = max(2 * size, count)
    pool = np.empty((places, *problem.present.shape), dtype=np.int16)
    pool[:count] = start
    losses, ranked = np.empty(places), np.arange(places)
    alive, ran = _evolve(problem, pool, losses, ranked, count, size, generations, patience, rng)
    best = ranked[:alive]
    return Found(pool[best], losses[best], ran)


# A greedy answer to Pollux's allocation problem, to seed the genetic search with.
#
# GPUs go one step at a time to the job whose loss falls most per GPU. A step may take several GPUs at once,
# because the loss of a job is not convex: it jumps where the job outgrows one node, and it dips at the number
# of GPUs the job holds now, which needs no restart.


BoolArray = npt.NDArray[np.bool_]


@compiled
def greedy_counts(problem: Problem) -> IntArray:
    """How many GPUs each job should have if jobs could be packed perfectly."""
    jobs = problem.present.shape[0]
    per_node = 0
    free = 0
    for gpus in problem.capacity:
        per_node = max(per_node, gpus)
        free += gpus
    held = np.zeros(jobs, np.int64)
    for j in range(jobs):
        for m in range(problem.present.shape[1]):
            held[j] += problem.present[j, m]
    counts = np.zeros(jobs, np.int64)
    rate = np.zeros(jobs, np.float64)
    step = np.zeros(jobs, np.int64)
    for j in range(jobs):
        rate[j], step[j] = _best_step(problem, j, 0, held[j], per_node, free)
    while free > 0:
        j = 0
        for i in range(jobs):
            if rate[i] > rate[j]:
                j = i
        if rate[j] <= 0.0:
            break
        if step[j] <= free:
            counts[j] += step[j]
            free -= step[j]
        rate[j], step[j] = _best_step(problem, j, counts[j], held[j], per_node, free)
    return counts


@compiled
def _best_step(
    problem: Problem, job: int, count: int, held: int, per_node: int, free: int
) -> tuple[float, int]:
    """The largest fall of the loss per GPU that a step up from `count` gives, and that step in GPUs."""
    now = _packed_loss(problem, job, count, held, per_node)
    best = 0.0
    step = 0
    for gpus in range(max(count + 1, problem.min_gpus[job]), min(problem.max_gpus[job], count + free) + 1):
        fall = (now - _packed_loss(problem, job, gpus, held, per_node)) / (gpus - count)
        if fall > best:
            best = fall
            step = gpus - count
    return best, step


@compiled
def _packed_loss(problem: Problem, job: int, gpus: int, held: int, per_node: int) -> float:
    if gpus == held:
        return problem.loss_kept[job]
    return problem.loss[job, 1 if gpus > per_node else 0, gpus]


@compiled
def place_counts(problem: Problem, counts: IntArray) -> Cells:
    """Put counts on nodes: a job that keeps its count stays, the others go on few nodes, largest first."""
    jobs, nodes = problem.present.shape
    cells = np.zeros((jobs, nodes), np.int16)
    free = np.empty(nodes, np.int64)
    for m in range(nodes):
        free[m] = problem.capacity[m]
    crossed = np.zeros(nodes, np.bool_)
    moving = np.zeros(jobs, np.float64)
    order = np.empty(jobs, np.int64)
    for j in range(jobs):
        held = 0
        span = 0
        fits = True
        for m in range(nodes):
            held += problem.present[j, m]
            span += problem.present[j, m] > 0
            fits &= problem.present[j, m] <= free[m]
        if held == counts[j] and fits:
            for m in range(nodes):
                cells[j, m] = problem.present[j, m]
                free[m] -= cells[j, m]
                crossed[m] |= span > 1 and cells[j, m] > 0
        else:
            moving[j] = -counts[j]
        order[j] = j
    rank_by(moving, order, 0, jobs)
    for i in range(jobs):
        j = order[i]
        if moving[j] == 0:
            break
        _place(cells[j], counts[j], free, crossed, problem.one_distributed)
    return cells


@compiled
def _place(row: Cells, gpus: int, free: IntArray, crossed: BoolArray, one_distributed: bool) -> None:
    """Use the fullest node that can hold all GPUs, or else the emptiest nodes that no spanning job is on."""
    tightest = -1
    emptiest = 0
    for m in range(free.size):
        if free[m] >= gpus and (tightest < 0 or free[m] < free[tightest]):
            tightest = m
        if free[m] > free[emptiest]:
            emptiest = m
    if tightest >= 0:
        row[tightest] = gpus
        free[tightest] -= gpus
        return
    left = gpus
    span = 0
    while left > 0 and span < MAX_NODES:
        next_node = -1
        for m in range(free.size):
            usable = row[m] == 0 and free[m] > 0 and not (one_distributed and crossed[m])
            if usable and (next_node < 0 or free[m] > free[next_node]):
                next_node = m
        if next_node < 0:
            break
        row[next_node] = min(left, free[next_node])
        left -= row[next_node]
        span += 1
    if gpus - left <= free[emptiest]:
        for m in range(free.size):
            row[m] = 0
        row[emptiest] = free[emptiest]
        span = 1
    for m in range(free.size):
        free[m] -= row[m]
        crossed[m] |= span > 1 and row[m] > 0


def greedy(problem: Problem) -> Cells:
    """An allocation by marginal gain. It may break a constraint, which the search's repair then mends."""
    cells: Cells = place_counts(problem, greedy_counts(problem))
    return cells
