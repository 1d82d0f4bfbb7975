"""Truth and belief about all jobs of a simulation.

The engine keeps the clock. The world knows what is true of each job (its profile and progress) and what is
believed of it (exact curves if the policy is given profiles, fitted models if it learns). A policy sees
nothing of the truth except through the table and the curves that this module fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from swell.domain import Cluster, FloatArray, InputError, IntArray, JobSpec
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves, beside_neighbours, in_steps
from swell.perf.profiles import ProfileSet
from swell.policies import JobTable, Policy
from swell.sim.sharing import SharedGpus, alone_speeds
from swell.sim.truth import Shape, TrainingJob
from swell.sim.type_beliefs import TypeBeliefs

_WIDEST_CURVE = 512
"""Curves are not computed beyond this many GPUs unless a job asks for more: rates fall long before that."""


class World:
    """The jobs of one simulation: their table, their truth and what is believed of them."""

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        profiles: ProfileSet,
        cluster: Cluster,
        policy: Policy,
        belief: str | None,
        table: JobTable,
        active: Callable[[], IntArray],
        tells_types_apart: bool = False,
        throughput_only: bool = False,
    ) -> None:
        """`active` says which rows are active.

        With `tells_types_apart`, what is believed of a job depends on the GPU type, as the truth does. With
        `throughput_only`, jobs that adapt their batch size choose the one with the most samples per second.
        """
        if belief not in (None, "profiles", "fitted"):
            raise InputError(f"belief must be 'profiles' or 'fitted', got '{belief}'", field="belief")
        self.table = table
        self.active = active
        self._throughput_only = throughput_only
        self.cluster = cluster
        self.shared = SharedGpus(cluster, [job.fill for job in jobs]) if cluster.per_gpu > 1 else None
        """Who is on which GPU, if GPUs are several slots each."""
        self._profile = [profiles.get(job.model) for job in jobs]
        self._main_type = max(cluster.gpu_types, key=lambda kind: _gpus_of_type(cluster, kind))
        self._kinds_told = cluster.gpu_types if tells_types_apart else ()
        """GPU types that have curves of their own."""
        self._total = np.zeros(len(jobs))
        """Each job's total of iterations at the tuned batch size, for finish-time fairness."""
        self._exact = self._exact_curves(jobs)
        self._told = self._exact
        """What a policy that is told curves is told: the truth, unless `mistake` was called."""
        self._promised: tuple[Curves, Curves] | None = None
        """The curves that were told last, and what promises count on of them."""
        self._togo = np.zeros(len(jobs))
        self._speed = np.zeros(len(jobs))
        self._rates: dict[tuple[int, Shape, tuple[str, ...]], float] = {}
        self._training: list[TrainingJob | None] = [None] * len(jobs)

        self.learns = (belief or policy.knows) == "fitted" and any(p.trains for p in self._profile)
        self.belief_shown = _shown(policy, belief, self.learns)
        self._curve_version = np.full(len(jobs), -1)
        self._fitted_rates = np.zeros((0, 0))
        self._by_type: TypeBeliefs | None = None
        """What is believed of jobs on each type, if types are told apart and speeds are learned."""
        if self.learns and self._kinds_told:
            models = [job.model for job in jobs]
            width = {kind: _widest_node(cluster, kind) for kind in self._kinds_told}
            self._by_type = TypeBeliefs(width, models, self._exact, self._exact_row)
        for row, job in enumerate(jobs):
            self._add(row, job, adaptive=policy.adaptive_batch)
        if self.learns:
            self._fitted_rates = np.zeros((len(jobs), self._exact.max_gpus + 1))
            self.table.curve = np.arange(len(jobs))
        self.typical_state_bytes = float(np.median([p.model_bytes for p in self._profile])) * 3
        """The usual size of a job's state: three times its weights, for optimizer state and the like."""

    def _add(self, row: int, job: JobSpec, adaptive: bool) -> None:
        profile, table = self._profile[row], self.table
        table.requested[row] = min(table.requested[row], self.cluster.capacity)
        if profile.max_gpus is not None:
            table.max_gpus[row] = min(table.max_gpus[row], profile.max_gpus)
        trains = profile.epochs is not None
        if job.work is None and not trains:
            raise InputError(
                f"job '{job.job_id}': work is missing, and profile '{profile.name}' has no epochs to run;"
                " add a column work",
                field="work",
            )
        full = profile.iterations(job.batch_size, -1) if trains else 0.0
        self._total[row] = full if job.work is None else job.work
        believed: JobBelief | None = None
        if self.learns and profile.trains:
            pinned = profile.pinned_batch if adaptive else job.batch_size
            make = partial(
                JobBelief, profile.limits, fixed_batch=pinned, throughput_only=self._throughput_only
            )
            believed = make()
            if self._by_type is not None:
                own = self._by_type.add(row, make)
                table.belief_by_type[row], believed = own, own[self._kinds_told[0]]
            table.belief[row] = believed
        elif self._by_type is not None:
            self._by_type.tell_exact(row)
        if job.work is None or (adaptive and trains):
            scale = 1.0 if job.work is None else job.work / full
            training = TrainingJob(job, profile, believed, scale, keeps_batch=not adaptive)
            self._training[row] = training
            table.left[row] = training.believed()[0]
        else:
            table.left[row] = job.work
            self._togo[row] = job.work

    def _exact_curves(self, jobs: Sequence[JobSpec]) -> Curves:
        widest = max(_WIDEST_CURVE, int(self.table.requested.max()))
        columns = min(self.cluster.capacity, widest)
        known: dict[tuple[str, int, int, float], int] = {}
        kinds = tuple(dict.fromkeys((self._main_type, *self._kinds_told)))
        width = {kind: _widest_node(self.cluster, kind) for kind in kinds}
        if not self._kinds_told:
            width[self._main_type] = self.cluster.gpus_per_node
        rates: dict[str, list[FloatArray]] = {kind: [] for kind in kinds}
        for row, job in enumerate(jobs):
            fill = 1.0 if self.shared is None else job.fill
            key = (job.model, job.batch_size, job.gpus_per_replica, fill)
            if key not in known:
                profile = self._profile[row]
                found = {
                    kind: in_steps(
                        profile.curve(job.batch_size, columns, width[kind], profile.resolve(kind)),
                        job.gpus_per_replica,
                    )
                    for kind in kinds
                }
                if self.shared is not None:
                    per_gpu = self.cluster.per_gpu
                    found = {
                        kind: curve * alone_speeds(fill, columns, width[kind], per_gpu)
                        for kind, curve in found.items()
                    }
                if not any(np.any(curve > 0) for curve in found.values()):
                    raise InputError(
                        f"job '{job.job_id}': profile '{job.model}' cannot run at batch_size {job.batch_size}"
                        f" on any number of GPUs up to {columns}; give another batch_size",
                        field="batch_size",
                    )
                known[key] = len(rates[self._main_type])
                for kind, curve in found.items():
                    rates[kind].append(curve)
            self.table.curve[row] = known[key]
        self._exact_row = self.table.curve.copy()
        by_type = {kind: Curves(np.array(rates[kind])) for kind in self._kinds_told}
        return Curves(np.array(rates[self._main_type]), by_type)

    # -- belief ------------------------------------------------------------------------------------------

    def mistake(self, error: float, seed: int) -> None:
        """From now on tell curves that are wrong, each job's by a factor of its own; the truth stays."""
        if not 0 <= error < np.inf:
            raise InputError(f"belief_error must be at least 0, got {error}", field="belief_error")
        factors = np.exp(np.random.default_rng([seed, 77]).normal(0.0, error, len(self._exact_row)))

        def wrong(curves: Curves) -> Curves:
            return Curves(
                curves.rates[self._exact_row] * factors[:, None],
                {kind: wrong(own) for kind, own in curves.by_type.items()},
            )

        self._told = wrong(self._exact)
        self.table.curve = np.arange(len(factors))

    def curves(self) -> Curves:
        """What the policy is told of the jobs' speed right now."""
        if not self.learns:
            return self._told
        if self._by_type is not None:
            return self._by_type.curves(self.active().tolist())
        for row in self.active().tolist():
            belief = self.table.belief[row]
            if belief is not None and belief.version != self._curve_version[row]:
                self._curve_version[row] = belief.version
                rates = belief.curve(self._exact.max_gpus, self.cluster.gpus_per_node)
                self._fitted_rates[row] = in_steps(rates, int(self.table.per_replica[row]))
            elif belief is None:
                self._fitted_rates[row] = self._exact.rates[self._exact_row[row]]
        return Curves(self._fitted_rates.copy())

    def promised_curves(self) -> Curves:
        """What a policy that gives promises is told: as if neighbours filled every GPU that is shared."""
        curves = self.curves()
        if self.shared is None:
            return curves
        if self._promised is None or self._promised[0] is not curves:
            self._promised = curves, beside_neighbours(curves, self.cluster)
        return self._promised[1]

    def wants_new_plan(self, row: int) -> bool:
        """Whether the job's agent has learnt something since it chose its batch size."""
        training = self._training[row]
        return training is not None and training.wants_new_plan()

    # -- truth -------------------------------------------------------------------------------------------

    def state_bytes(self, row: int) -> float:
        """The size of the state that is sent to a joining worker of the job."""
        return self._profile[row].model_bytes * 3

    def start_segment(self, row: int, cluster: Cluster, new_plan: bool) -> tuple[float, float]:
        """Start a segment; returns the job's true speed, and the progress after which the segment ends."""
        table, training = self.table, self._training[row]
        placement = table.placement[row]
        shape = cluster.shape(placement)
        beside = 1.0 if self.shared is None else self.shared.speed(row)
        if self._by_type is not None and table.belief[row] is not None:
            believed = self._by_type.on(row, self._kinds(row, cluster)[0])
            table.belief[row] = believed
            if training is not None:
                training.belief = believed
        if training is None:
            rate = self._steady_rate(row, shape, cluster) * beside
            table.rate[row] = rate
            self._speed[row] = rate
            belief = table.belief[row]
            if belief is not None:
                self._observe_steady(row, belief, shape, self._kinds(row, cluster), beside)
            return rate, float(self._togo[row])
        if new_plan:
            training.choose_plan(shape)
        ahead = training.segment(shape, self._kinds(row, cluster), beside)
        table.left[row], table.rate[row] = ahead.left, ahead.rate
        self._speed[row], self._togo[row] = ahead.speed, ahead.togo
        return ahead.speed, ahead.togo

    def _kinds(self, row: int, cluster: Cluster) -> tuple[str, ...]:
        """The GPU types a job is on."""
        if len(cluster.gpu_types) == 1:
            return (self._main_type,)
        touched = cluster.nodes_of(self.table.placement[row])
        return tuple(sorted({cluster.nodes[n].gpu_type for n in touched}))

    def _steady_rate(self, row: int, shape: Shape, cluster: Cluster) -> float:
        kinds = self._kinds(row, cluster)
        key = (int(self._exact_row[row]), shape, kinds)
        rate = self._rates.get(key)
        if rate is None:
            profile, batch = self._profile[row], self.table.specs[row].batch_size
            # Data-parallel workers wait for the slowest worker.
            rate = min(profile.rate(shape, batch, profile.resolve(kind)) for kind in kinds)
            self._rates[key] = rate
        return rate

    def _observe_steady(
        self, row: int, belief: JobBelief, shape: Shape, gpu_types: tuple[str, ...], beside: float
    ) -> None:
        profile = self._profile[row]
        plan = belief.plan(len(shape), sum(shape))
        step_s, sync_s = max(
            profile.step_time(shape, plan.local_batch, profile.resolve(kind)) for kind in gpu_types
        )
        belief.observe(len(shape), sum(shape), plan.local_batch, step_s / beside, sync_s / beside)

    def advance(self, row: int, ran_s: float) -> None:
        """Record that the job ran for that long at its present speed."""
        progress = self._speed[row] * ran_s
        self._togo[row] -= progress
        training = self._training[row]
        if training is not None:
            training.advance(progress)

    def progress(self, row: int) -> tuple[float, float, int]:
        """How far a job is and of how much, in iterations at its tuned batch, and its present batch size."""
        training = self._training[row]
        if training is None:
            total = float(self._total[row])
            return total - float(self._togo[row]), total, self.table.specs[row].batch_size
        gpus = int(self.table.gpus[row])
        batch = training.plan.total(gpus) if training.plan is not None and gpus else training.batch_size
        return training.progress, float(training.thresholds[-1]), batch

    def segment_over(self, row: int) -> bool:
        """End the job's present segment; returns whether the job has ended with it."""
        training = self._training[row]
        if training is None:
            return True
        training.end_epoch()
        return training.finished

    # -- figures -----------------------------------------------------------------------------------------

    def fairness(self, jct_s: FloatArray, mean_active: FloatArray) -> FloatArray:
        """Finish-time fairness: each JCT over the job's time alone on 1/`mean_active` of the cluster."""
        useful = np.maximum.accumulate(self._exact.rates, axis=1)
        rho = np.full(len(jct_s), np.nan)
        axis = np.arange(useful.shape[1])
        for row in np.flatnonzero(~np.isnan(jct_s) & ~np.isnan(mean_active)):
            curve = useful[self._exact_row[row]]
            least = int(np.argmax(curve > 0))
            share = min(self.cluster.capacity / max(mean_active[row], 1.0), self.table.max_gpus[row])
            # A share below the fewest GPUs the job can run on counts as that part of the time on the fewest.
            rate = np.interp(share, axis, curve) if share >= least else curve[least] * share / least
            rho[row] = jct_s[row] / (self._total[row] / rate)
        return rho


def _gpus_of_type(cluster: Cluster, kind: str) -> int:
    return sum(node.gpus for node in cluster.nodes if node.gpu_type == kind)


def _widest_node(cluster: Cluster, kind: str) -> int:
    return max(node.gpus for node in cluster.nodes if node.gpu_type == kind)


def _shown(policy: Policy, belief: str | None, learns: bool) -> str:
    if learns:
        return "fitted"
    asked: Any = belief or policy.knows
    return "none" if asked == "nothing" else "oracle"
