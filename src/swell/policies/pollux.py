"""Pollux: GPUs, batch size and learning rate chosen together for goodput and fairness (OSDI'21).

Each job's agent fits a goodput model and picks its own batch size; this policy decides the allocation
(section 4.2). The fitness of an allocation is the power mean of the jobs' speed-ups. A job's speed-up is its
goodput with the allocation divided by its goodput on a fair share of the cluster. If the job's GPUs would
change, the speed-up is multiplied by max(T - R d, 0) / (T + d), with the job's age T, its resizes so far R,
and the cost d of one resize. The search and its greedy seed are in `_genetic`; this module turns
a snapshot into their `Problem`.

As in the authors' simulator, the fair share is ceil(GPUs / jobs) GPUs that are taken to lie on one node,
speed-ups are scaled by nodes / GPUs, and 1e-3 is added before the power so that a job without GPUs makes the
fitness much worse but not zero. The policy does not distinguish GPU types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies.base import Decision, Knowledge, Policy
from swell.policies.snapshot import Snapshot

if TYPE_CHECKING:
    from swell.policies._genetic import Cells, Population, Problem

FLOOR = 1e-3
"""Added to every speed-up; so this is what a job without GPUs counts as."""


@dataclass
class _Memory:
    """What the policy keeps from one decision to the next."""

    rng: np.random.Generator
    numbers: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The numbers of the jobs in the population."""
    population: Population | None = None


@dataclass(kw_only=True)
class Pollux(Policy):
    """Search allocations for the best power mean of the jobs' speed-ups over their fair share."""

    name: ClassVar[str] = "pollux"
    paper: ClassVar[str] = "Pollux, OSDI'21"
    goal: ClassVar[str] = "high goodput with fairness: GPUs, batch size and learning rate chosen together"
    knows: ClassVar[Knowledge] = "fitted"
    adaptive_batch: ClassVar[bool] = True
    interval_s: ClassVar[float | None] = 60.0

    p: float = -1.0
    """Fairness exponent: lower is fairer, 1 is the plain mean."""
    generations: int = 100
    patience: int = 40
    """Generations without a gain after which the search stops."""
    population: int = 100
    restart_cost_s: float = 30.0
    avoid_interference: bool = True
    """At most one job that spans nodes on each node."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("generations", 0), ("patience", 1), ("population", 1), ("restart_cost_s", 0)):
            if getattr(self, name) < least:
                raise InputError(
                    f"policy 'pollux': {name} must be at least {least}, got {getattr(self, name)}", field=name
                )
        if not -50 <= self.p <= 50:  # beyond that, the sum of powers overflows a float
            raise InputError(f"policy 'pollux': p must be between -50 and 50, got {self.p}", field="p")
        self._memory: _Memory | None = None

    def allocate(self, snapshot: Snapshot) -> Decision:
        """The best allocation found: never worse in fitness than the present one, if that one is legal."""
        nodes = len(snapshot.cluster.nodes)
        per_node = np.zeros((len(snapshot), nodes), dtype=np.int64)
        if len(snapshot) and snapshot.capacity:
            # Imported here because they import numba, which takes a while and which not all policies need.
            from swell.policies._genetic import evolve, greedy

            if self._memory is None:
                self._memory = _Memory(np.random.default_rng(self.seed))
            order = precedence(snapshot)
            numbers = snapshot.numbers[order]
            problem = self.problem(snapshot, order)
            last = _last_population(self._memory, numbers, nodes)
            found = evolve(
                problem,
                np.concatenate([problem.present[None], greedy(problem)[None], last]),
                size=self.population,
                generations=self.generations,
                patience=self.patience,
                rng=self._memory.rng,
            )
            self._memory.numbers, self._memory.population = numbers, found.population
            per_node[order] = found.population[0]
        return Decision(per_node.sum(axis=1), per_node)

    def fitness(self, loss: float, jobs: int) -> float:
        """The power mean that corresponds to a sum of losses."""
        if self.p == 0:
            return math.exp(-loss / jobs)
        return float((abs(loss) / jobs) ** (1.0 / self.p))

    def problem(self, snapshot: Snapshot, order: IntArray) -> Problem:
        """The input of the search, with the jobs in the given order of precedence."""
        from swell.policies._genetic import Problem

        speedup, max_gpus = speedups(snapshot, order)
        speedup *= np.count_nonzero(snapshot.cluster.node_gpus) / snapshot.capacity
        present = _present(snapshot, order)
        held, across = present.sum(axis=1), np.count_nonzero(present, axis=1) > 1
        # If a job holds more than its bound allows, the search takes the rest away.
        kept = speedup[np.arange(len(order)), across.astype(np.int64), np.minimum(held, max_gpus)]
        age_s, cost_s = snapshot.age_s[order], self.restart_cost_s
        ahead_s = np.maximum(age_s - snapshot.resizes[order] * cost_s, 0.0)
        lasting = np.divide(ahead_s, age_s + cost_s, out=np.ones_like(age_s), where=age_s + cost_s > 0)
        return Problem(
            present=present,
            capacity=snapshot.cluster.node_gpus,
            min_gpus=snapshot.min_gpus[order],
            max_gpus=max_gpus,
            loss=self._loss(speedup * lasting[:, None, None]),
            loss_kept=self._loss(kept),
            one_distributed=self.avoid_interference,
        )

    def _loss(self, speedup: FloatArray) -> FloatArray:
        """The loss of one job: the smaller the sum of losses, the larger the power mean."""
        if self.p == 0:
            return -np.log(np.maximum(speedup, FLOOR))
        return -np.sign(self.p) * (speedup + FLOOR) ** self.p


def precedence(snapshot: Snapshot) -> IntArray:
    """Jobs in order of precedence: those that have received the least come first, then the oldest."""
    return np.lexsort((snapshot.submit_s, snapshot.attained_gpu_s))


def speedups(snapshot: Snapshot, order: IntArray) -> tuple[FloatArray, IntArray]:
    """Speed-up of each job over its fair share (by one or several nodes, and by GPUs); and its most GPUs."""
    from swell.policies._genetic import MAX_NODES

    fair_gpus = math.ceil(snapshot.capacity / len(snapshot))
    widest = min(snapshot.capacity, MAX_NODES * snapshot.cluster.gpus_per_node)
    beliefs, least = snapshot.beliefs, snapshot.min_gpus
    bounds = np.minimum(snapshot.table.max_gpus[snapshot.rows], widest)
    max_gpus = np.empty(len(order), dtype=np.int64)
    speedup = np.zeros((len(order), 2, int(bounds.max()) + 1))
    for j, i in enumerate(order.tolist()):
        belief, most = beliefs[i], int(bounds[i])
        if belief is None:
            most = min(most, snapshot.curves.max_gpus)
            rates = snapshot.curves.rates[snapshot.curve[i]]
            goodput = np.stack([rates, rates])
            fair = rates[min(fair_gpus, len(rates) - 1)] or rates.max()
        else:
            most = max(belief.max_gpus(most), min(int(least[i]), most))
            share = min(fair_gpus, belief.limits.max_gpus)
            goodput = belief.table(max(most, share))
            fair = goodput[0, share]
        max_gpus[j] = most
        if fair > 0:
            np.divide(goodput[:, : most + 1], fair, out=speedup[j, :, : most + 1])
    return speedup[:, :, : int(max_gpus.max()) + 1], max_gpus


def _last_population(memory: _Memory, numbers: IntArray, nodes: int) -> Population:
    """The last population for the jobs of now: new jobs hold nothing, finished ones are left out."""
    last = memory.population
    out = np.zeros((0 if last is None else len(last), len(numbers), nodes), dtype=np.int16)
    if last is not None:
        _, now, before = np.intersect1d(numbers, memory.numbers, assume_unique=True, return_indices=True)
        known = min(nodes, last.shape[2])  # nodes may have joined since
        out[:, now, :known] = last[:, before, :known]
    return out


def _present(snapshot: Snapshot, order: IntArray) -> Cells:
    """The GPUs that each job holds now, jobs x nodes."""
    placements = snapshot.placements
    held = [placements[i] for i in order.tolist()]
    cells = np.zeros((len(held), len(snapshot.cluster.nodes)), dtype=np.int16)
    jobs = np.repeat(np.arange(len(held)), [len(p) for p in held])
    gpus = np.fromiter((g for p in held for g in p), dtype=np.int64, count=len(jobs))
    np.add.at(cells, (jobs, snapshot.cluster.node_of_gpu[gpus]), 1)
    return cells
