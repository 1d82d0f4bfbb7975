"""Pollux: GPUs, batch size and learning rate chosen together for goodput and fairness (OSDI'21).

Each job's agent fits a goodput model and picks its own batch size; what is decided here is the allocation
(section 4.2). The fitness of an allocation is a power mean over jobs of their speed-ups: goodput there,
divided by goodput on a fair share of the cluster. A job whose GPUs would change has its speed-up
multiplied by max(T - R d, 0) / (T + d), with its age T, its resizes so far R, and the cost d of one.
The search is in `_genetic`, its greedy seed in `_greedy`; here a snapshot becomes their problem.

As in the authors' simulator the fair share is ceil(GPUs / jobs) GPUs taken to lie on one node, speed-ups
are scaled by nodes / GPUs, and 1e-3 is added before the power so that a job left out costs much, not
everything. GPU types are not told apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies.base import Decision, Knowledge, Policy
from swell.policies.snapshot import Snapshot

if TYPE_CHECKING:
    from swell.perf.belief import JobBelief
    from swell.policies._genetic import Cells, Population, Problem

FLOOR = 1e-3
"""Added to every speed-up: what a job without GPUs counts as."""
MOST_GPUS = 64
"""No job is given more: beyond, the authors' measurements end."""


class _Goodput(NamedTuple):
    """A job's goodput, row 0 on one node and row 1 on several, by GPU count; and at the fair share."""

    version: int
    max_gpus: int
    fair_gpus: int
    table: FloatArray
    fair: float


@dataclass
class _Memory:
    """What is kept from one decision to the next."""

    rng: np.random.Generator
    goodput: dict[int, _Goodput] = field(default_factory=dict)
    """By the job's row in the table."""
    rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Which jobs the population is about."""
    population: Population | None = None


@dataclass(kw_only=True)
class Pollux(Policy):
    """Search allocations for the best power mean of the jobs' speed-ups over their fair share."""

    name: ClassVar[str] = "pollux"
    paper: ClassVar[str] = "Pollux (OSDI'21)"
    goal: ClassVar[str] = "high goodput with fairness: GPUs, batch size and learning rate chosen together"
    knows: ClassVar[Knowledge] = "fitted"
    adaptive_batch: ClassVar[bool] = True
    interval_s: ClassVar[float | None] = 60.0

    p: float = -1.0
    """Fairness exponent: lower is fairer, 1 is the plain mean."""
    generations: int = 100
    patience: int = 20
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
        if not math.isfinite(self.p):
            raise InputError(f"policy 'pollux': p must be a finite number, got {self.p}", field="p")
        self._memory = _Memory(np.random.default_rng(self.seed))

    def allocate(self, snapshot: Snapshot) -> Decision:
        """The best allocation found, no worse in fitness than keeping the present one where that is legal."""
        nodes = len(snapshot.cluster.nodes)
        per_node = np.zeros((len(snapshot), nodes), dtype=np.int64)
        if len(snapshot) and snapshot.capacity:
            # Imported late: they bring numba, which takes a while and only this policy needs.
            from swell.policies._genetic import evolve
            from swell.policies._greedy import greedy

            order = np.lexsort((snapshot.submit_s, snapshot.attained_gpu_s))
            problem = self.problem(snapshot, order)
            rows = snapshot.rows[order]
            start = [problem.present[None], greedy(problem)[None], self._last_population(rows, nodes)]
            found = evolve(
                problem,
                np.concatenate(start),
                size=self.population,
                generations=self.generations,
                patience=self.patience,
                rng=self._memory.rng,
            )
            self._memory.rows, self._memory.population = rows, found.population
            per_node[order] = found.population[0]
        return Decision(per_node.sum(axis=1), per_node)

    def fitness(self, loss: float, jobs: int) -> float:
        """The power mean that a sum of losses stands for."""
        if self.p == 0:
            return math.exp(-loss / jobs)
        return float((abs(loss) / jobs) ** (1.0 / self.p))

    def problem(self, snapshot: Snapshot, order: IntArray) -> Problem:
        """What the search needs to know, with the jobs in the given order of precedence."""
        from swell.policies._genetic import Problem

        cluster = snapshot.cluster
        fair_gpus = math.ceil(snapshot.capacity / len(snapshot))
        beliefs, goodput = snapshot.beliefs, self._memory.goodput
        max_gpus = np.minimum(snapshot.max_gpus, MOST_GPUS)
        current: dict[int, _Goodput] = {}
        for i, row in enumerate(snapshot.rows.tolist()):
            belief = beliefs[i]
            if belief is None:
                curve = snapshot.curves.rates[snapshot.curve[i]]
                current[row] = _from_curve(curve, int(max_gpus[i]), fair_gpus)
            else:
                most = _most_gpus(belief, int(max_gpus[i]), int(snapshot.min_gpus[i]))
                current[row] = _from_belief(belief, most, fair_gpus, goodput.get(row))
        self._memory.goodput = current

        tables = [current[row] for row in snapshot.rows[order].tolist()]
        limits = np.array([t.max_gpus for t in tables], dtype=np.int64)
        speedup = np.zeros((len(tables), 2, int(limits.max()) + 1))
        for j, (_, most, _, table, fair) in enumerate(tables):
            if fair > 0:
                speedup[j, :, : most + 1] = table / fair
        speedup *= np.count_nonzero(cluster.node_gpus) / cluster.capacity

        present = _present(snapshot, order)
        held, span = present.sum(axis=1), np.count_nonzero(present, axis=1)
        inside = np.minimum(held, limits)  # a bound that fell below what the job holds: repaired anyway
        kept = speedup[np.arange(len(tables)), (span > 1).astype(np.int64), inside]
        age_s, resizes = snapshot.age_s[order], snapshot.resizes[order]
        worth = np.maximum(age_s - resizes * self.restart_cost_s, 0.0)
        lasting = np.divide(
            worth, age_s + self.restart_cost_s, out=np.ones_like(age_s), where=age_s + self.restart_cost_s > 0
        )
        return Problem(
            present=present,
            capacity=cluster.node_gpus,
            min_gpus=snapshot.min_gpus[order],
            max_gpus=limits,
            loss=self._loss(speedup * lasting[:, None, None]),
            loss_kept=self._loss(kept),
            one_distributed=self.avoid_interference,
        )

    def _loss(self, speedup: FloatArray) -> FloatArray:
        """What one job adds to the sum whose least is the largest power mean."""
        if self.p == 0:
            return -np.log(np.maximum(speedup, FLOOR))
        return -np.sign(self.p) * (speedup + FLOOR) ** self.p

    def _last_population(self, rows: IntArray, nodes: int) -> Population:
        """The last population with the jobs of today: newcomers hold nothing, the finished are gone."""
        last = self._memory.population
        if last is None or last.shape[2] != nodes:
            return np.zeros((0, len(rows), nodes), dtype=np.int16)
        out = np.zeros((len(last), len(rows), nodes), dtype=np.int16)
        _, now, before = np.intersect1d(rows, self._memory.rows, assume_unique=True, return_indices=True)
        out[:, now] = last[:, before]
        return out


def _most_gpus(belief: JobBelief, bound: int, least: int) -> int:
    """Exploration: not far beyond what was profiled, nor more replicas than the largest batch can feed."""
    limits = belief.limits
    bound = max(min(bound, limits.max_batch // limits.min_local), 1)
    return max(belief.max_gpus(bound), min(least, bound))


def _from_belief(belief: JobBelief, max_gpus: int, fair_gpus: int, last: _Goodput | None) -> _Goodput:
    """The goodput table of a job, taken over from the last decision where nothing has changed."""
    fresh = last is not None and last.version == belief.version
    if last is not None and fresh and last.max_gpus == max_gpus and last.fair_gpus == fair_gpus:
        return last
    if last is not None and fresh and last.max_gpus == max_gpus:
        table = last.table
    else:
        gpus = np.arange(1, max_gpus + 1)
        table = np.zeros((2, max_gpus + 1))
        # The throughput model knows one node and several, so two stand for any number above.
        table[0, 1:] = belief.goodput(np.ones_like(gpus), gpus)
        table[1, 2:] = belief.goodput(np.full(max_gpus - 1, 2), gpus[1:])
    share = min(fair_gpus, belief.limits.max_batch // belief.limits.min_local)
    fair = float(belief.goodput(np.array([1]), np.array([max(share, 1)]))[0])
    return _Goodput(belief.version, max_gpus, fair_gpus, table, fair)


def _from_curve(rates: FloatArray, max_gpus: int, fair_gpus: int) -> _Goodput:
    """The same from a curve on packed GPUs, where no model of the job is kept."""
    curve = rates[: max_gpus + 1]
    fair = float(rates[min(fair_gpus, len(rates) - 1)]) or float(rates.max())
    return _Goodput(0, max_gpus, fair_gpus, np.stack([curve, curve]), fair)


def _present(snapshot: Snapshot, order: IntArray) -> Cells:
    """What each job holds now, jobs x nodes."""
    placements = snapshot.placements
    held = [placements[i] for i in order.tolist()]
    cells = np.zeros((len(held), len(snapshot.cluster.nodes)), dtype=np.int16)
    jobs = np.repeat(np.arange(len(held)), [len(p) for p in held])
    gpus = np.fromiter((g for p in held for g in p), dtype=np.int64, count=len(jobs))
    np.add.at(cells, (jobs, snapshot.cluster.node_of_gpu[gpus]), 1)
    return cells
