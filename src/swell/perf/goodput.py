"""Goodput: throughput times statistical efficiency, and the batch that makes the most of a placement.

Goodput is measured in iterations at the tuned batch size per second (gain / iteration time), so that the work
of a job is its number of iterations whatever batch it uses (Pollux, sections 3 and 4.1).

The throughput model distinguishes only 'one node' and 'several nodes'. So a job's goodput is a table of two
rows and one column per GPU count. The legal (local batch, accumulation) pairs behind that table depend on the
limits alone: they are listed once and shared by all jobs with the same limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, InputError, IntArray
from swell.perf.throughput import ThroughputParams

# Splitting a global batch over GPUs: per-GPU batch and gradient accumulation, within limits.


EPSILON = 1e-8
"""Tolerance for rounding errors in divisions whose exact result is a whole number."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Batch sizes that a job may use."""

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


__all__ = ["BatchLimits", "BatchPlan", "Candidates", "best_goodput", "candidates", "fixed_plan"]

SAMPLES = 50
"""Global batch sizes tried, evenly spaced in the logarithm."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Batch plans to choose from: those for k GPUs are at `first[k]` up to `first[k + 1]`."""

    first: IntArray
    gpus: IntArray
    local_batch: IntArray
    accumulation: IntArray
    inverse_scale: FloatArray
    """Tuned batch over total batch."""

    @property
    def max_gpus(self) -> int:
        """The largest GPU count covered."""
        return len(self.first) - 2


@lru_cache(maxsize=1024)
def candidates(limits: BatchLimits, max_gpus: int, fixed_batch: int | None = None) -> Candidates:
    """The legal batch plans for 0 to `max_gpus` GPUs; only the one for `fixed_batch` if that is given."""
    first = [0]
    rows: list[tuple[int, int, int]] = []
    for gpus in range(max_gpus + 1):
        if gpus:
            if fixed_batch is None:
                plans = _sampled_plans(limits, gpus)
            else:
                plans = [fixed_plan(limits, fixed_batch, gpus)]
            rows += [
                (gpus, p.local_batch, p.accumulation)
                for p in plans
                if limits.min_local <= p.local_batch <= limits.max_local
            ]
        first.append(len(rows))
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    gpu_column, local, accumulation = (np.ascontiguousarray(c) for c in table.T)
    totals = gpu_column * local * (accumulation + 1)
    return Candidates(
        np.array(first, dtype=np.int64), gpu_column, local, accumulation, limits.init_batch / totals
    )


def _sampled_plans(limits: BatchLimits, gpus: int) -> list[BatchPlan]:
    """About 50 total batches from the smallest useful to the largest allowed, split over the GPUs."""
    smallest = max(limits.init_batch, limits.min_local * gpus)
    if smallest > limits.max_batch:
        return []
    local = np.geomspace(smallest, limits.max_batch, SAMPLES) / gpus
    accumulation = np.ceil(local / limits.max_local - EPSILON) - 1
    if gpus == 1:
        above = local > limits.init_batch + EPSILON
        accumulation = np.where(above, np.maximum(accumulation, 1), accumulation)
    local_batch = np.ceil(local / (accumulation + 1) - EPSILON)
    local_batch = np.minimum(local_batch, limits.max_batch // (gpus * (accumulation + 1)))
    pairs = zip(local_batch.astype(int).tolist(), accumulation.astype(int).tolist(), strict=True)
    return [BatchPlan(m, s) for m, s in dict.fromkeys(pairs)]


def best_goodput(
    params: ThroughputParams,
    sqr: float,
    var: float,
    limits: BatchLimits,
    nodes: npt.ArrayLike,
    gpus: npt.ArrayLike,
) -> tuple[FloatArray, IntArray, IntArray]:
    """The highest goodput on each placement, and the local batch and accumulation that reach it.

    All three are 0 where no legal batch exists (more GPUs than the largest batch can feed, or none at all).
    """
    nodes, gpus = np.broadcast_arrays(np.asarray(nodes), np.asarray(gpus))
    table = candidates(limits, int(gpus.max(initial=1)))
    goodput, choice = goodput_table(table, candidate_times(params, table), sqr, var)
    across = (nodes > 1).astype(np.int64)
    chosen = choice[across, gpus]
    if len(table.local_batch) == 0:
        return goodput[across, gpus], np.zeros_like(chosen), np.zeros_like(chosen)
    local_batch = np.where(chosen >= 0, table.local_batch[chosen], 0)
    accumulation = np.where(chosen >= 0, table.accumulation[chosen], 0)
    return goodput[across, gpus], local_batch, accumulation


def candidate_times(params: ThroughputParams, table: Candidates) -> FloatArray:
    """Seconds per iteration of every candidate: row 0 on one node, row 1 on several."""
    from swell.perf._kernels import times

    return times(params.as_array(), table.gpus, table.local_batch, table.accumulation)


def goodput_table(
    table: Candidates, times_s: FloatArray, sqr: float, var: float
) -> tuple[FloatArray, IntArray]:
    """The best goodput and the index of its candidate (-1 for none), each [several nodes?, GPUs]."""
    from swell.perf._kernels import best

    return best(table.first, table.inverse_scale, times_s, float(sqr), float(var))
