"""The control plane's words: what people ask for, what it keeps of a job, what it promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from swell.domain import InputError, Placement


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
class JobRequest:
    """What a person hands in. Never a number of GPUs; bounds only if they insist."""

    name: str
    script: str
    """Path of the training script, relative to workdir or absolute."""
    args: tuple[str, ...] = ()
    workdir: str = "."
    env: dict[str, str] = field(default_factory=dict)
    auto: bool = False
    deadline_s: float | None = None
    """Moment (Unix time) by which it must be done."""
    min_workers: int = 1
    max_workers: int | None = None
    workers: int = 1
    """What rigid policies give."""
    memory_bytes: int | None = None
    checkpoint_s: float = 60.0
    max_restarts: int = 3
    """How often it may be started again after all its workers died for reasons not its own."""
    pip: tuple[str, ...] = ()
    """Requirements to install for it, where the engine can."""

    def __post_init__(self) -> None:
        def refuse(name: str, given: object, allowed: str) -> None:
            raise InputError(f"{name} must be {allowed}, got {given!r}", field=name)

        if not self.name or len(self.name) > 100 or not all(c.isalnum() or c in "._-" for c in self.name):
            refuse("name", self.name, "1 to 100 letters, digits, '.', '_' or '-'")
        if self.name.startswith("."):
            refuse("name", self.name, "a name that does not start with '.'")
        if not self.script:
            refuse("script", self.script, "the path of a training script")
        if self.min_workers < 1:
            refuse("min_workers", self.min_workers, "at least 1")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            refuse("max_workers", self.max_workers, f"at least min_workers ({self.min_workers})")
        if self.workers < 1:
            refuse("workers", self.workers, "at least 1")
        if self.memory_bytes is not None and self.memory_bytes < 1 << 20:
            refuse("memory_bytes", self.memory_bytes, "at least 1 MiB")
        if not self.checkpoint_s > 0:
            refuse("checkpoint_s", self.checkpoint_s, "a positive number of seconds")
        if self.max_restarts < 0:
            refuse("max_restarts", self.max_restarts, "at least 0")


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
