"""The speeds of the jobs that a simulated policy sees.

That is the truth at first. It may be made wrong on purpose (`mistake`), or the speeds are learned as the jobs
run (`learn`): then each job has a model that observes its segments (`world`), and the policy sees the speeds
of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from swell.board import Board
from swell.domain import Cluster, InputError, IntArray
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves, beside_neighbours, in_steps
from swell.perf.gpu_types import RatioLedger, carried_belief
from swell.policies import JobTable
from swell.sim.workload import Workload, widest_node

# What is believed of simulated jobs on each GPU type, for policies that learn speeds as jobs run.
#
# A job has a belief on each type that it has run on. On the other types it has one that is carried over, by
# the ratios between types that all jobs have shown so far (`perf.gpu_types`). Once the job runs there, its
# own observations complete the carried model.


class TypeBeliefs:
    """The beliefs about all jobs of a simulation on all types."""

    def __init__(self, width: Mapping[str, int], models: Sequence[str], exact: Curves, row: IntArray) -> None:
        """`width`: for each type the GPUs of its largest node; `row`: each job's row in `exact`."""
        self._width = dict(width)
        self._models = models
        self._exact, self._exact_row = exact, row
        self._beliefs: list[dict[str, JobBelief]] = [{} for _ in models]
        self._ran_on: list[list[str]] = [[] for _ in models]
        """The types that each job has run on, the latest last."""
        self._ledger = RatioLedger()
        self._versions: dict[tuple[int, str], tuple[JobBelief, int]] = {}
        """By job and type: the belief that its curve was computed from, and its version."""
        self._rates = {kind: exact.rates[row].copy() for kind in self._width}

    def add(self, row: int, make: Callable[[], JobBelief]) -> Mapping[str, JobBelief]:
        """Enter a job of which nothing is known; returns its beliefs by type, which change as it runs."""
        self._beliefs[row].update({kind: make() for kind in self._width})
        return self._beliefs[row]

    def on(self, row: int, kind: str) -> JobBelief:
        """The belief about a job that runs on a type from now on."""
        if self._ran_on[row][-1:] != [kind]:
            self._ran_on[row] = [known for known in self._ran_on[row] if known != kind] + [kind]
        return self._beliefs[row][kind]

    def curves(self, active: Sequence[int]) -> Curves:
        """The believed curves on each type; those of jobs that are not active may be out of date."""
        learned = self._learn(active)
        for row in active:
            if self._beliefs[row]:
                self._carry_over(row, learned)
                for kind, belief in self._beliefs[row].items():
                    self._compute(row, kind, belief)
        by_type = {kind: Curves(rates.copy()) for kind, rates in self._rates.items()}
        return Curves(next(iter(self._rates.values())).copy(), by_type)

    def _learn(self, active: Sequence[int]) -> bool:
        """Learn the ratios anew if a job's model has changed; returns whether they were."""
        learned = False
        for row in active:
            for kind in self._ran_on[row]:
                learned |= self._ledger.note(self._models[row], kind, self._beliefs[row][kind])
        if learned:
            self._ledger.learn()
        return learned

    def _carry_over(self, row: int, learned: bool) -> None:
        ran_on, beliefs = self._ran_on[row], self._beliefs[row]
        if not ran_on or beliefs[ran_on[-1]].params is None:
            return
        source = ran_on[-1]
        known = beliefs[source]
        if not learned and self._versions.get((row, source)) == (known, known.version):
            return
        for kind in self._width:
            if kind not in ran_on:
                beliefs[kind] = carried_belief(
                    known, self._ledger.ratios.between(self._models[row], source, kind)
                )

    def _compute(self, row: int, kind: str, belief: JobBelief) -> None:
        version = (belief, belief.version)
        if belief.known and self._versions.get((row, kind)) == version:
            return
        self._versions[row, kind] = version
        curve = belief.curve(self._exact.max_gpus, self._width[kind])
        if not belief.known:  # nothing is known but how the types compare
            curve = curve * self._ledger.relative_speed(kind)
        self._rates[kind][row] = curve

    def show_exact(self, row: int) -> None:
        """Enter the true curves of a job whose speed cannot be learned."""
        for kind in self._width:
            self._rates[kind][row] = np.array(self._exact.on(kind).rates[self._exact_row[row]])


class Beliefs:
    """The curves that a policy sees."""

    def __init__(self, workload: Workload, cluster: Cluster, board: Board) -> None:
        self._workload, self._cluster, self._board = workload, cluster, board
        self._table = board.table
        self._shown = workload.curves
        """The curves, unless speeds are learned."""
        self._fitted: FittedCurves | TypeBeliefs | None = None
        """The models of the jobs, if speeds are learned."""
        self._promised: tuple[Curves, Curves] | None = None
        """The curves that were shown last, and those that promises count on."""
        self._table.curve = workload.row.copy()

    @property
    def learned(self) -> bool:
        """Whether the speeds are learned as the jobs run."""
        return self._fitted is not None

    @property
    def by_type(self) -> TypeBeliefs | None:
        """The jobs' models on each GPU type, if speeds are learned and types are distinguished."""
        return self._fitted if isinstance(self._fitted, TypeBeliefs) else None

    def mistake(self, error: float, seed: int) -> None:
        """From now on show wrong curves, each job's by a factor of its own; the truth stays."""
        if not 0 <= error < np.inf:
            raise InputError(f"belief_error must be at least 0, got {error}", field="belief_error")
        row = self._workload.row
        factors = np.exp(np.random.default_rng([seed, 77]).normal(0.0, error, len(row)))

        def wrong(curves: Curves) -> Curves:
            return Curves(
                curves.rates[row] * factors[:, None],
                {kind: wrong(own) for kind, own in curves.by_type.items()},
            )

        self._shown = wrong(self._workload.curves)
        self._table.curve = np.arange(len(row))

    def learn(self, *, adaptive: bool, throughput_only: bool) -> None:
        """From now on show the curves of the jobs' models, on each GPU type if types are distinguished.

        A job whose profile has no model of the kind that is fitted keeps its true curve; if all are so,
        nothing is learned. With `adaptive`, jobs choose their batch size; with `throughput_only` the one with
        the most samples per second.
        """
        jobs, profiles, exact, curve_row = self._workload
        if not any(profile.trains for profile in profiles):
            return
        by_type: TypeBeliefs | None = None
        if exact.by_type:
            width = {kind: widest_node(self._cluster, kind) for kind in exact.by_type}
            by_type = TypeBeliefs(width, [job.model for job in jobs], exact, curve_row)
        for row, (job, profile) in enumerate(zip(jobs, profiles, strict=True)):
            pinned = profile.pinned_batch if adaptive else job.batch_size
            make = partial(JobBelief, profile.limits, fixed_batch=pinned, throughput_only=throughput_only)
            if not profile.trains:
                if by_type is not None:
                    by_type.show_exact(row)
            elif by_type is None:
                self._table.belief[row] = make()
            else:
                own = by_type.add(row, make)
                self._table.belief_by_type[row], self._table.belief[row] = own, next(iter(own.values()))
        self._fitted = by_type or FittedCurves(self._table, self._workload, self._cluster.gpus_per_node)
        self._table.curve = np.arange(len(jobs))

    def curves(self) -> Curves:
        """The curves that the policy sees right now."""
        return self._shown if self._fitted is None else self._fitted.curves(self._board.active.tolist())

    def promised_curves(self) -> Curves:
        """The curves for a policy that gives promises: as if neighbours filled every GPU that is shared."""
        curves = self.curves()
        if self._cluster.per_gpu == 1:
            return curves
        if self._promised is None or self._promised[0] is not curves:
            self._promised = curves, beside_neighbours(curves, self._cluster)
        return self._promised[1]


class FittedCurves:
    """The curves of the jobs' models, where GPU types are not distinguished."""

    def __init__(self, table: JobTable, workload: Workload, gpus_per_node: int) -> None:
        self._table, self._workload, self._gpus_per_node = table, workload, gpus_per_node
        self._rates = np.zeros((len(table), workload.curves.max_gpus + 1))
        self._version = np.full(len(table), -1)
        """Which version of each job's model its rates were computed from."""

    def curves(self, active: Sequence[int]) -> Curves:
        """The believed curves; those of jobs that are not active may be out of date."""
        exact = self._workload.curves
        for row in active:
            belief = self._table.belief[row]
            if belief is None:
                self._rates[row] = exact.rates[self._workload.row[row]]
            elif belief.version != self._version[row]:
                self._version[row] = belief.version
                rates = belief.curve(exact.max_gpus, self._gpus_per_node)
                self._rates[row] = in_steps(rates, int(self._table.per_replica[row]))
        return Curves(self._rates.copy())
