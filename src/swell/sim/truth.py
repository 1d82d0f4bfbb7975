"""The truth of a simulated job: how fast it really trains on the GPUs it has.

There are two kinds of job. A *steady* job runs a number of iterations at its batch size, and its rate depends
only on its placement. A *training* job goes through the epochs of its profile. How much progress one of its
iterations makes depends on the gradient noise of the epoch and on the batch size. The batch size is either
the user's, or the job's agent chooses it for the present GPUs according to its belief (Pollux). Progress is
counted in iterations at the initial batch size.

The engine sees only segments: periods of constant speed that last until a given amount of progress.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.domain import JobSpec
from swell.perf.belief import JobBelief
from swell.perf.efficiency import gain_at
from swell.perf.goodput import BatchPlan, fixed_plan
from swell.perf.profiles import Profile

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeedSegment:
    """A period of constant true `speed` that lasts for `togo` more progress.

    `left` and `rate` are what a policy is told: the job's remaining work and its rate, in the unit of its
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
