"""A greedy answer to Pollux's allocation problem, to seed the genetic search with.

GPUs go one step at a time to the job whose loss falls most per GPU. A step may take several GPUs at once,
because the loss of a job is not convex: it jumps where the job outgrows one node, and it dips at the number
of GPUs the job holds now, which needs no restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swell.domain import IntArray
from swell.perf._compiled import compiled
from swell.policies._genetic import MAX_NODES, Cells, Problem, rank_by

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
