"""Curves: the rate of progress of a job as a function of its GPUs, as arrays.

No policy evaluates a model in a loop. It gets a `Curves` table, one row per distinct curve and
one column per GPU count, computed once and shared by all the jobs that have that curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from swell.domain import Cluster, FloatArray, IntArray
from swell.perf.sharing import promised_part


@dataclass(frozen=True)
class Curves:
    """Rates of progress: `rates[c, k]` is the work per second of curve `c` on `k` packed GPUs, 0 on none.

    A job may be given at most `max_gpus` GPUs, the last column. A rate of 0 means that the job cannot run
    on that many GPUs (it does not fit, or was never measured there).
    """

    rates: FloatArray
    by_type: Mapping[str, Curves] = field(default_factory=dict)
    """The same curves on each GPU type, with the same rows; empty where types are not distinguished."""

    def __post_init__(self) -> None:
        if self.rates.ndim != 2 or self.rates.shape[1] < 2 or np.any(self.rates[:, 0] != 0):
            raise ValueError("rates must be a matrix with a zero first column and at least two columns")
        self.rates.setflags(write=False)

    @property
    def max_gpus(self) -> int:
        """The most GPUs a job can be given: the last column."""
        return self.rates.shape[1] - 1

    def on(self, gpu_type: str) -> Curves:
        return self.by_type.get(gpu_type, self)

    @cached_property
    def best_gpus(self) -> IntArray:
        """For each curve the smallest GPU count with the highest rate: more GPUs would not help."""
        return np.argmax(self.rates, axis=1).astype(np.int64)


def beside_neighbours(curves: Curves, cluster: Cluster) -> Curves:
    """The curves that promises count on: as if neighbours that fill the GPU were on all its other slots.

    The same curves where slots do not share GPUs.
    """
    if cluster.per_gpu == 1:
        return curves
    part = promised_part(cluster.per_gpu)
    return Curves(
        curves.rates * part, {kind: Curves(own.rates * part) for kind, own in curves.by_type.items()}
    )


def in_steps(rates: FloatArray, per_replica: int) -> FloatArray:
    """A curve of a job that can use GPUs only in multiples of `per_replica`: the others bring no speed."""
    counts = np.arange(len(rates))
    return rates if per_replica == 1 else rates[counts - counts % per_replica]


def powers_of_two(up_to: int) -> IntArray:
    """1, 2, 4, ... not above `up_to`."""
    return 2 ** np.arange(max(up_to, 1).bit_length(), dtype=np.int64)
