"""The control plane's words: what it keeps of a job, what it promises. `JobRequest` is in `swell.domain`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swell.domain import JobRequest, Placement

__all__ = ["Estimate", "JobRecord", "JobRequest", "Mode", "Phase", "Promise"]


class Phase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    """Accepted; waits for GPUs."""
    RUNNING = "running"
    """Holds GPUs (starting and resizing included)."""
    PAUSED = "paused"
    """A person paused it; holds none and wants none."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """Its deadline could not be promised."""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED, Phase.REFUSED)


class Mode(StrEnum):
    """How the batch follows the workers: decided in the script, named here for estimates."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"
    CONSISTENT = "consistent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """When a job will be done, as far as is known."""

    finish_s: float | None
    """Most likely finish (Unix time); None if nothing at all is known yet."""
    earliest_s: float | None = None
    latest_s: float | None = None
    source: str = "none"
    """'model' (its own, fitted), 'history' (similar jobs), 'profile' (a short profiling run), 'none'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer to a submission or a quote."""

    admitted: bool
    pending: bool = False
    """The answer on its deadline comes after a short profiling run; `reason` says when at the latest."""
    guaranteed_s: float | None = None
    """The finish that is guaranteed, for a deadline job."""
    estimate: Estimate
    earliest_deadline_s: float | None = None
    """For a refused job: the earliest deadline that would be admitted."""
    reason: str = ""
    """For a refused job: what stands in the way. For a queued one: why it waits."""


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
    """Slots it should have, as last decided."""
    held: Placement = ()
    """Slots on which its workers are, as the engine last said."""
    started_s: float | None = None
    ended_s: float | None = None
    done: float = 0.0
    """Progress in iterations, and of how many; 0 of None until the job said so."""
    of: float | None = None
    batch_size: int | None = None
    resizes: int = 0
    pause_s: float = 0.0
    """Sum of the pauses that resizes cost."""
    restarts: int = 0
    exit_code: int | None = None
    reason: str = ""
    """Why it is where it is, in a line for people."""
