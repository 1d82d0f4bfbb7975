"""The truth about all jobs of a simulation: how fast they are where they run, and how far they are.

The truth of a job comes from its profile (`workload`). A policy sees nothing of it except through
the table and the curves that it is given (`beliefs`). Where speeds are learned, each segment of a job is
observed with the job's model when the segment starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swell.domain import Cluster, FloatArray, InputError, JobSpec
from swell.perf.belief import JobBelief
from swell.perf.efficiency import gain_at
from swell.perf.goodput import BatchPlan, fixed_plan
from swell.perf.profiles import Profile
from swell.policies import JobTable
from swell.sim.beliefs import TypeBeliefs
from swell.sim.workload import SharedGpus, Workload

# What a change of allocation costs a job: a pause in which it makes no progress.
#
# constant    the same for every job and every change (the Pollux authors' simulator: 30 s)
# modelled    a fixed part for processes and connections, plus the job's state over the network


class ResizeCost(Protocol):
    """Seconds of pause for a job that goes from `before` to `after` GPUs; it starts if `before` is 0.

    `startup_s`: how long the job's start takes, where that was measured.
    """

    def seconds(
        self, state_bytes: float, before: int, after: int, startup_s: float | None = None
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Every change costs the same."""

    pause_s: float

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return self.pause_s


@dataclass(frozen=True, slots=True)
class ModelledCost:
    """A fixed part, plus sending the job's state once if a worker joins; shrinking sends nothing."""

    fixed_s: float = 0.5
    bytes_per_s: float = 1.25e9
    """10 Gbit/s."""
    start_s: float = 10.0
    """Added when a job starts: the start of its processes, and their imports."""

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        if before == 0:
            start_s = self.start_s if startup_s is None else startup_s
            return start_s + state_bytes / self.bytes_per_s
        return self.fixed_s + (state_bytes / self.bytes_per_s if after > before else 0.0)


def parse_cost(text: str) -> ResizeCost:
    """A cost from text: a number of seconds, or 'model'."""
    if text == "model":
        return ModelledCost()
    try:
        pause_s = float(text)
    except ValueError:
        pause_s = -1.0
    if not 0 <= pause_s < float("inf"):
        raise InputError(
            f"resize cost must be seconds of at least 0, or 'model', got '{text}'", field="resize-cost"
        )
    return ConstantCost(pause_s)


# The truth of a simulated job: how fast it really trains on the GPUs it has.
#
# There are two kinds of job. A *steady* job runs a number of iterations at its batch size, and its rate
# depends only on its placement. A *training* job goes through the epochs of its profile. How much progress
# one of its iterations makes depends on the gradient noise of the epoch and on the batch size. The batch
# size is either the user's, or the job's agent chooses it for the present GPUs according to its belief
# (Pollux). Progress is counted in iterations at the initial batch size.
#
# The engine sees only segments: periods of constant speed that last until a given amount of progress.


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeedSegment:
    """A period of constant true `speed` that lasts for `togo` more progress.

    `left` and `rate` are what a policy sees: the job's remaining work and its rate, in the unit of its
    curve.
    """

    speed: float
    togo: float
    rate: float
    left: float


class TrainingJob:
    """One job that trains through its profile's epochs."""

    def __init__(
        self,
        spec: JobSpec,
        profile: Profile,
        belief: JobBelief | None,
        scale: float = 1.0,
        keeps_batch: bool = True,
    ) -> None:
        assert profile.epochs is not None
        self.keeps_batch = keeps_batch
        self.profile = profile
        self.belief = belief
        """The model of the job's agent, if it has one: it chooses the batch size of a job that adapts it."""
        self.batch_size = spec.batch_size
        self.epoch = 0
        self.progress = 0.0
        self.thresholds = profile.epochs.progress * scale
        self.plan: BatchPlan | None = None
        self._plan_version = -1
        self._iterations = [
            scale * profile.iterations(spec.batch_size, epoch) for epoch in range(len(self.thresholds))
        ]

    @property
    def finished(self) -> bool:
        return self.epoch >= len(self.thresholds)

    def advance(self, progress: float) -> None:
        """Add progress within the present epoch."""
        self.progress += progress

    def end_epoch(self) -> None:
        """Go to the next epoch."""
        self.progress = float(self.thresholds[self.epoch])
        self.epoch += 1

    def wants_new_plan(self) -> bool:
        """Whether the job's agent has learnt something since it last chose the batch size."""
        return not self.keeps_batch and self.belief is not None and self.belief.version != self._plan_version

    def choose_plan(self, shape: Shape) -> None:
        """Choose batch size and accumulation for the job's present GPUs."""
        gpus = sum(shape)
        if self.belief is None or self.keeps_batch:
            self.plan = fixed_plan(self.profile.limits, self.batch_size, gpus)
        else:
            self.plan = self.belief.plan(len(shape), gpus)
            self._plan_version = self.belief.version

    def segment(self, shape: Shape, gpu_types: tuple[str, ...], beside: float = 1.0) -> SpeedSegment:
        """The next segment with the present plan on GPUs of these types; the job's agent observes it.

        `beside`: the job's speed beside its neighbours on the same GPUs, relative to alone.
        """
        assert self.plan is not None
        plan, limits = self.plan, self.profile.limits
        batch = plan.total(sum(shape))
        # Data-parallel workers wait for the slowest worker.
        step_s, sync_s = max(self.profile.step_time(shape, plan.local_batch, kind) for kind in gpu_types)
        step_s, sync_s = step_s / beside, sync_s / beside
        sqr, var = self.profile.grad_stats(batch, self.epoch)
        iteration_s = step_s + plan.accumulation * (step_s - sync_s)
        speed = gain_at(sqr, var, batch / limits.init_batch) / iteration_s
        if self.belief is not None:
            self.belief.observe(len(shape), sum(shape), plan.local_batch, step_s, sync_s)
            self.belief.observe_gradients(sqr, var)
        togo = float(self.thresholds[self.epoch]) - self.progress
        left, rate = self.believed(speed)
        return SpeedSegment(speed, togo, rate, left)

    def believed(self, speed: float = 0.0) -> tuple[float, float]:
        """The work left, in the unit of the job's curve, and how fast it falls until the next segment.

        A job that adapts its batch reports its progress. For a job that keeps its batch, the work left is
        known only by epochs: the iterations from the start of the present epoch to the end of the job. (The
        Pollux authors' simulator does the same but leaves out the present epoch.)
        """
        if not self.keeps_batch:
            return float(self.thresholds[-1]) - self.progress, speed
        return self._iterations[-1] - (self._iterations[self.epoch - 1] if self.epoch else 0.0), 0.0


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
        """The jobs' models are in `table` and, if types are distinguished, in `by_type`.

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
