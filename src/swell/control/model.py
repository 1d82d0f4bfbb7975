"""What the control plane keeps of a job, and what it promises. `JobRequest` is in `swell.domain`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swell.domain import JobRequest, Placement

__all__ = ["Estimate", "JobRecord", "JobRequest", "Phase", "Promise"]


class Phase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    """Accepted; waits for GPUs."""
    RUNNING = "running"
    """Holds GPUs (starting and resizing included)."""
    PAUSED = "paused"
    """Paused by a person: holds no GPUs and gets none."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """Its deadline could not be promised."""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED, Phase.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """When a job will be done, as far as is known."""

    finish_s: float | None
    """Most likely finish (Unix time); None if nothing at all is known yet."""
    earliest_s: float | None = None
    latest_s: float | None = None
    source: str = "none"
    """'model' (its own, fitted), 'history' (earlier runs), 'kin' (the same script with other arguments),
    'profile' (a short profiling run), 'none'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer to a submission or a quote."""

    admitted: bool
    pending: bool = False
    """The deadline is decided after a short profiling run; `reason` says when at the latest."""
    guaranteed_s: float | None = None
    """The guaranteed finish (Unix time) of a job with a deadline."""
    estimate: Estimate
    earliest_deadline_s: float | None = None
    """For a refused job: the earliest deadline that would be admitted."""
    reason: str = ""
    """For a refused job: why. For a queued job: why it waits."""
    gpu_type: str | None = None
    """On a cluster with several GPU types: the type that the guaranteed finish is planned on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the control plane keeps it. Replaced whole at every change."""

    job_id: str
    owner: str
    request: JobRequest
    submitted_s: float
    phase: Phase
    promise: Promise
    wanted: Placement = ()
    """The slots that the job should have, as last decided."""
    held: Placement = ()
    """The slots that its workers are on, as the engine last reported."""
    started_s: float | None = None
    ended_s: float | None = None
    done: float = 0.0
    """Progress in iterations; 0 until the job's first report."""
    of: float | None = None
    """Iterations that the job consists of; None until the job has reported it."""
    batch_size: int | None = None
    resizes: int = 0
    pause_s: float = 0.0
    """Sum of the pauses that resizes cost."""
    restarts: int = 0
    exit_code: int | None = None
    reason: str = ""
    """Why the job is in its phase, in a line for people."""
    most_workers: int | None = None
    """Most workers that the job itself says it can use; None if it has said nothing."""
    confined: str = ""
    """Why it can use no more than `most_workers`."""

    @property
    def max_workers(self) -> int | None:
        """Most workers that the job may get: what its request allows and the job can use; None for any."""
        bounds = [most for most in (self.request.max_workers, self.most_workers) if most is not None]
        return min(bounds, default=None)
