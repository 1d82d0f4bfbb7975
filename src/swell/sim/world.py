"""What is true of all jobs of a simulation: how fast they are where they run, and how far they are.

The truth of a job comes from its profile (`truth`, `workload`). A policy sees nothing of it except through
the table and the curves that it is told (`beliefs`). Where speeds are learned, each segment of a job is
observed with the job's model when the segment starts.
"""

from __future__ import annotations

import numpy as np

from swell.domain import Cluster, FloatArray, InputError, JobSpec
from swell.perf.belief import JobBelief
from swell.policies import JobTable
from swell.sim.sharing import SharedGpus
from swell.sim.truth import Shape, TrainingJob
from swell.sim.type_beliefs import TypeBeliefs
from swell.sim.workload import Workload


class World:
    """The truth of the jobs of one simulation."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        table: JobTable,
        by_type: TypeBeliefs | None,
        *,
        adaptive: bool,
    ) -> None:
        """The jobs' models are in `table` and, if types are told apart, in `by_type`.

        With `adaptive`, jobs choose their batch size.
        """
        jobs = workload.jobs
        self._workload, self._profile = workload, workload.profiles
        self._table, self._cluster = table, cluster
        self.shared = SharedGpus(cluster, [job.fill for job in jobs]) if cluster.per_gpu > 1 else None
        """Who is on which GPU, if GPUs are several slots each."""
        self._by_type = by_type
        self._total = np.zeros(len(jobs))
        """Each job's total of iterations at the tuned batch size, for finish-time fairness."""
        self._togo = np.zeros(len(jobs))
        self._speed = np.zeros(len(jobs))
        self._rates: dict[tuple[int, Shape, tuple[str, ...]], float] = {}
        self._training: list[TrainingJob | None] = [None] * len(jobs)
        for row, job in enumerate(jobs):
            self._add(row, job, adaptive)
        self.agents_plan = adaptive and any(training and training.belief for training in self._training)
        """Whether there are jobs whose agents choose the batch size by what they have learnt."""

    def _add(self, row: int, job: JobSpec, adaptive: bool) -> None:
        profile, table = self._profile[row], self._table
        table.requested[row] = min(table.requested[row], self._cluster.capacity)
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
        if job.work is None or (adaptive and trains):
            scale = 1.0 if job.work is None else job.work / full
            training = TrainingJob(job, profile, table.belief[row], scale, keeps_batch=not adaptive)
            self._training[row] = training
            table.left[row] = training.believed()[0]
        else:
            table.left[row] = job.work
            self._togo[row] = job.work

    def state_bytes(self, row: int) -> float:
        """The size of the state that is sent to a joining worker of the job.

        It is three times the job's weights, for optimizer state and the like.
        """
        return self._profile[row].model_bytes * 3

    def startup_s(self, row: int) -> float | None:
        """How long the job's start takes; None if that was not measured."""
        return self._profile[row].startup_s

    @property
    def typical_state_bytes(self) -> float:
        """The usual size of a job's state."""
        return float(np.median([profile.model_bytes for profile in self._profile])) * 3

    def wants_new_plan(self, row: int) -> bool:
        """Whether the job's agent has learnt something since it chose its batch size."""
        training = self._training[row]
        return training is not None and training.wants_new_plan()

    def start_segment(self, row: int, cluster: Cluster, new_plan: bool) -> tuple[float, float]:
        """Start a segment; returns the job's true speed, and the progress after which the segment ends."""
        table, training = self._table, self._training[row]
        placement = table.placement[row]
        shape = cluster.shape(placement)
        kinds = cluster.gpu_types if len(cluster.gpu_types) == 1 else cluster.types_of(placement)
        beside = 1.0 if self.shared is None else self.shared.speed(row)
        if self._by_type is not None and table.belief[row] is not None:
            believed = self._by_type.on(row, kinds[0])
            table.belief[row] = believed
            if training is not None:
                training.belief = believed
        if training is None:
            rate = self._steady_rate(row, shape, kinds) * beside
            table.rate[row] = rate
            self._speed[row] = rate
            belief = table.belief[row]
            if belief is not None:
                self._observe_steady(row, belief, shape, kinds, beside)
            return rate, float(self._togo[row])
        if new_plan:
            training.choose_plan(shape)
        ahead = training.segment(shape, kinds, beside)
        table.left[row], table.rate[row] = ahead.left, ahead.rate
        self._speed[row], self._togo[row] = ahead.speed, ahead.togo
        return ahead.speed, ahead.togo

    def _steady_rate(self, row: int, shape: Shape, kinds: tuple[str, ...]) -> float:
        key = (int(self._workload.row[row]), shape, kinds)
        rate = self._rates.get(key)
        if rate is None:
            profile, batch = self._profile[row], self._table.specs[row].batch_size
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
            return total - float(self._togo[row]), total, self._table.specs[row].batch_size
        gpus = int(self._table.gpus[row])
        batch = training.plan.total(gpus) if training.plan is not None and gpus else training.batch_size
        return training.progress, float(training.thresholds[-1]), batch

    def segment_over(self, row: int) -> bool:
        """End the job's present segment; returns whether the job has ended with it."""
        training = self._training[row]
        if training is None:
            return True
        training.end_epoch()
        return training.finished

    def fairness(self, jct_s: FloatArray, mean_active: FloatArray) -> FloatArray:
        """Finish-time fairness: each JCT over the job's time alone on 1/`mean_active` of the cluster."""
        useful = np.maximum.accumulate(self._workload.curves.rates, axis=1)
        rho = np.full(len(jct_s), np.nan)
        axis = np.arange(useful.shape[1])
        for row in np.flatnonzero(~np.isnan(jct_s) & ~np.isnan(mean_active)):
            curve = useful[self._workload.row[row]]
            least = int(np.argmax(curve > 0))
            share = min(self._cluster.capacity / max(mean_active[row], 1.0), self._table.max_gpus[row])
            # A share below the fewest GPUs the job can run on counts as that part of the time on the fewest.
            rate = np.interp(share, axis, curve) if share >= least else curve[least] * share / least
            rho[row] = jct_s[row] / (self._total[row] / rate)
        return rho
