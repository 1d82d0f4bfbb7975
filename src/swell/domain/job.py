"""A training job as policies and the simulator see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swell.domain.errors import InputError
from swell.domain.teams import NORMAL, OTHERS, PRIORITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job as submitted.

    `work` counts iterations at `batch_size`; None means the length that the model's profile gives (its
    epochs). `gpus` is the number that a person would have asked for on a cluster without elasticity: rigid
    policies give exactly that, elastic ones ignore it.
    """

    job_id: str
    submit_s: float
    model: str
    """Name of the performance profile, which has the job's speed."""
    batch_size: int
    """The global batch size that the user tuned the job for."""
    gpus: int = 1
    work: float | None = None
    deadline_s: float | None = None
    """The moment (not a duration) by which the job must be done; None for best effort."""
    min_gpus: int = 1
    max_gpus: int | None = None
    """Most GPUs that the job may get; None for no bound."""
    gpus_per_replica: int = 1
    """The job gets GPUs in multiples of this, because this number of them shares one copy of its model."""
    weight: float = 1.0
    """The job counts as this many jobs, for policies that obey weights."""
    user: str = ""
    """The user whose limits count for the job."""
    team: str = OTHERS
    """The team whose slots the job uses."""
    priority: str = NORMAL
    """The job's class, one of `PRIORITIES`."""
    fill: float = 1.0
    """Which part of a GPU's time one of its workers uses alone; it matters where slots share a GPU."""

    def __post_init__(self) -> None:
        def refuse(field: str, given: object, allowed: str) -> None:
            raise InputError(f"job '{self.job_id}': {field} must be {allowed}, got {given!r}", field=field)

        if not self.job_id:
            refuse("job_id", self.job_id, "a non-empty text")
        if not (math.isfinite(self.submit_s) and self.submit_s >= 0):
            refuse("submit_s", self.submit_s, "a time of at least 0")
        if self.batch_size < 1:
            refuse("batch_size", self.batch_size, "at least 1")
        if self.gpus < 1:
            refuse("gpus", self.gpus, "at least 1")
        if self.min_gpus < 1:
            refuse("min_gpus", self.min_gpus, "at least 1")
        size = self.gpus_per_replica
        if size < 1:
            refuse("gpus_per_replica", size, "at least 1")
        for name in ("gpus", "min_gpus", "max_gpus") if size > 1 else ():
            given = getattr(self, name)
            if given == 1 and name != "max_gpus":  # nothing was asked for: one replica
                object.__setattr__(self, name, size)
            elif given is not None and given % size:
                refuse(name, given, f"a multiple of gpus_per_replica ({size})")
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            refuse("max_gpus", self.max_gpus, f"at least min_gpus ({self.min_gpus})")
        if not (math.isfinite(self.weight) and self.weight > 0):
            refuse("weight", self.weight, "a positive number")
        if not 0 < self.fill <= 1:
            refuse("fill", self.fill, "more than 0 and at most 1")
        if self.priority not in PRIORITIES:
            refuse("priority", self.priority, ", ".join(PRIORITIES))
        if self.work is not None and not (math.isfinite(self.work) and self.work > 0):
            refuse("work", self.work, "a positive number of iterations")
        if self.deadline_s is not None and not self.deadline_s > self.submit_s:
            refuse("deadline_s", self.deadline_s, f"after the submission at {self.submit_s:g}")
