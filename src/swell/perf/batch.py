"""Splitting a global batch over GPUs: per-GPU batch and gradient accumulation, within limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swell.domain import InputError

EPSILON = 1e-8
"""Tolerance for rounding errors in divisions whose exact result is a whole number."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What batch sizes a job may use."""

    init_batch: int
    """Global batch size the user tuned for."""
    max_batch: int
    """Largest global batch size that still trains well."""
    min_local: int
    """Smallest batch per GPU worth running."""
    max_local: int
    """Largest batch per GPU that fits its memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.init_batch <= self.max_batch:
            raise InputError(
                f"init_batch must be between 1 and max_batch ({self.max_batch}), got {self.init_batch}",
                field="init_batch",
            )
        if not 1 <= self.min_local <= self.max_local:
            raise InputError(
                f"min_local must be between 1 and max_local ({self.max_local}), got {self.min_local}",
                field="min_local",
            )

    def as_dict(self) -> dict[str, int]:
        """The limits as a dictionary, for reports and the history; `BatchLimits(**d)` reads it back."""
        return {
            "init_batch": self.init_batch,
            "max_batch": self.max_batch,
            "min_local": self.min_local,
            "max_local": self.max_local,
        }

    @property
    def max_gpus(self) -> int:
        """The most GPUs that can all be given at least the smallest local batch."""
        return max(self.max_batch // self.min_local, 1)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a job splits its batch: each GPU computes `accumulation + 1` gradients of `local_batch` a step."""

    local_batch: int
    accumulation: int

    def total(self, gpus: int) -> int:
        """The global batch size on that many GPUs."""
        return gpus * self.local_batch * (self.accumulation + 1)


def fixed_plan(limits: BatchLimits, batch_size: int, gpus: int) -> BatchPlan:
    """How a fixed global batch is split over the GPUs: with the least accumulation that fits memory.

    A single GPU whose batch is above the tuned one accumulates at least once, because gradient noise cannot
    be estimated from a single gradient. Rounding never takes the total above the largest batch allowed.
    """
    local = math.ceil(batch_size / gpus - EPSILON)
    accumulation = math.ceil(local / limits.max_local - EPSILON) - 1
    if gpus == 1 and batch_size > limits.init_batch:
        accumulation = max(accumulation, 1)
    parts = accumulation + 1
    local_batch = min(math.ceil(local / parts - EPSILON), limits.max_batch // (gpus * parts))
    return BatchPlan(max(local_batch, 1), accumulation)
