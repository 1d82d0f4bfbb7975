"""What a person asks for: one training job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swell.domain.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job as submitted.

    `work` counts iterations at `batch_size`; None means the whole length that the model's profile gives
    (its epochs). `gpus` is what a person would have asked for on a rigid cluster: rigid policies give exactly
    that, elastic ones ignore it.
    """

    job_id: str
    submit_s: float
    model: str
    """Name of the performance profile that says how fast it trains."""
    batch_size: int
    """Global batch size the user tuned for."""
    gpus: int = 1
    work: float | None = None
    deadline_s: float | None = None
    """Moment, not duration, by which it must be done; None for best effort."""
    min_gpus: int = 1
    max_gpus: int | None = None
    """Most GPUs it may ever get; None for no bound of its own."""

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
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            refuse("max_gpus", self.max_gpus, f"at least min_gpus ({self.min_gpus})")
        if self.work is not None and not (math.isfinite(self.work) and self.work > 0):
            refuse("work", self.work, "a positive number of iterations")
        if self.deadline_s is not None and not self.deadline_s > self.submit_s:
            refuse("deadline_s", self.deadline_s, f"after the submission at {self.submit_s:g}")
