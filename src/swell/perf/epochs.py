"""The course of a training run, epoch by epoch: progress, iterations needed, gradient statistics.

Progress counts iterations at the initial batch size. A larger batch makes an epoch's progress in fewer
iterations; how many fewer depends on the gradient noise. Statistics are kept for several batch sizes and
interpolated linearly between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from swell.domain import FloatArray, InputError
from swell.perf.efficiency import gain


class Epochs:
    """Cumulative progress and iterations at the end of each epoch, and its gradient statistics."""

    def __init__(
        self,
        progress: FloatArray,
        batches: Sequence[int],
        iterations: FloatArray,
        sqr: FloatArray,
        var: FloatArray,
    ) -> None:
        """`progress` has one entry per epoch; the other three are batches x epochs."""
        shape = (len(batches), len(progress))
        if not shape[1] or not iterations.shape == sqr.shape == var.shape == shape:
            raise ValueError(f"tables of {shape[0]} batch sizes and {shape[1]} epochs do not agree")
        if list(batches) != sorted(set(batches)) or np.any(np.diff(progress, prepend=0.0) <= 0):
            raise InputError(
                "progress must grow with each epoch, and batch sizes be ascending", field="progress"
            )
        self.progress = progress
        """Progress at the end of each epoch; the last is the whole run."""
        self.progress.setflags(write=False)
        self.batches = tuple(batches)
        # Plain lists: callers read one number at a time, which is several times faster than with arrays.
        self._iterations: list[list[float]] = iterations.tolist()
        self._sqr: list[list[float]] = sqr.tolist()
        self._var: list[list[float]] = var.tolist()

    @classmethod
    def from_noise(
        cls, per_epoch: float, init_batch: int, batches: Sequence[int], noise_scale: FloatArray
    ) -> Epochs:
        """A course from the gradient noise scale (in samples) of each batch and epoch: batches x epochs.

        One epoch is worth `per_epoch` iterations at the initial batch size.
        """
        sqr, var = np.ones_like(noise_scale), noise_scale / init_batch
        scale = np.array(batches, dtype=np.float64)[:, None] / init_batch
        iterations = np.cumsum(per_epoch / gain(sqr, var, scale), axis=1)
        progress = per_epoch * np.arange(1, noise_scale.shape[1] + 1)
        return cls(progress, batches, iterations, sqr, var)

    def __len__(self) -> int:
        return len(self.progress)

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Iterations done at the end of an epoch (0-based) if the whole run uses that batch size."""
        low, high, share = self._neighbours(batch_size)
        return (1 - share) * self._iterations[low][epoch] + share * self._iterations[high][epoch]

    def grad_stats(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient during an epoch (0-based)."""
        low, high, share = self._neighbours(batch_size)
        if low == high:
            return self._sqr[low][epoch], self._var[low][epoch]
        return (
            (1 - share) * self._sqr[low][epoch] + share * self._sqr[high][epoch],
            (1 - share) * self._var[low][epoch] + share * self._var[high][epoch],
        )

    def _neighbours(self, batch_size: int) -> tuple[int, int, float]:
        """The two tabled batch sizes around this one, and how far it is from the first to the second."""
        batches = self.batches
        if batch_size <= batches[0]:
            return 0, 0, 0.0
        if batch_size >= batches[-1]:
            return len(batches) - 1, len(batches) - 1, 0.0
        high = bisect_left(batches, batch_size)
        if batches[high] == batch_size:
            return high, high, 0.0
        return high - 1, high, (batch_size - batches[high - 1]) / (batches[high] - batches[high - 1])
