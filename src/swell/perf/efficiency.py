"""Statistical efficiency: how much progress a sample of a larger batch makes (Pollux, section 3.1).

`sqr` is the squared norm of the true gradient and `var` its variance, both at the batch size the user tuned
for; `scale` is the present batch size over that one. One iteration of gain g makes as much progress as g
iterations at the tuned batch size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray

SETTLED_UPDATES = 20
"""An estimate of the gradient noise is acted on once it is an average over this many steps."""

NOISE_ERROR = 0.10
"""Relative error of a settled estimate of the gradient noise scale."""


def gain(sqr: npt.ArrayLike, var: npt.ArrayLike, scale: npt.ArrayLike) -> FloatArray:
    """Progress of one iteration, counted in iterations at the tuned batch size."""
    sqr, var = np.asarray(sqr, dtype=np.float64), np.asarray(var, dtype=np.float64)
    below = var / np.asarray(scale, dtype=np.float64) + sqr
    known = below > 0  # the estimate for a vanishing gradient can be zero or negative
    return np.where(known, (var + sqr) / np.where(known, below, 1.0), 1.0)


def gain_at(sqr: float, var: float, scale: float) -> float:
    """The gain for one job at one batch size: the same as `gain`, without the cost of arrays."""
    below = var / scale + sqr
    return (var + sqr) / below if below > 0 else 1.0


def efficiency(sqr: npt.ArrayLike, var: npt.ArrayLike, scale: npt.ArrayLike) -> FloatArray:
    """Progress per sample, relative to the tuned batch size."""
    return gain(sqr, var, scale) / np.asarray(scale, dtype=np.float64)


def noise_scale(sqr: float, var: float, init_batch: float) -> float:
    """The gradient noise scale, in samples: the batch size at which the gain is half of what it can be."""
    if sqr <= 0:
        return float("inf") if var > 0 else 0.0
    return max(var, 0.0) / sqr * init_batch


def noise_share(sqr: float, var: float) -> float:
    """The part of a gradient's squared norm at the tuned batch that is noise, between 0 and 1."""
    whole = sqr + var
    return min(max(var / whole, 0.0), 1.0) if whole > 0 else 0.0


class MeanNoiseShare:
    """The noise share over a run, weighted by progress.

    At `scale` times the tuned batch, a unit of progress takes 1 - share * (1 - 1/scale) iterations. That is
    linear in the share, so the mean share of a run gives the time of the whole run, however the noise changed
    in its course.
    """

    def __init__(self, weight: float = 0.0, mean: float = 0.0, deviation: float = 0.0) -> None:
        self.weight = weight
        """The progress that the mean was taken over."""
        self.mean = mean
        self._squares = weight * deviation**2

    def add(self, share: float, progress: float) -> None:
        """Record the noise share that held while the job made this much progress."""
        if progress > 0:
            self.weight += progress
            off = share - self.mean
            self.mean += off * progress / self.weight
            self._squares += progress * off * (share - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the share in the course of the run."""
        return math.sqrt(max(self._squares, 0.0) / self.weight) if self.weight else 0.0


def duration_error(share: float, deviation: float, scale: float) -> float:
    """Relative error, due to gradient noise, of a duration predicted for `scale` times the tuned batch.

    The error has two parts: `deviation`, how much the noise share changes in the course of a run, and the
    error of the estimated share itself.
    """
    saved = 1.0 - 1.0 / max(scale, 1.0)
    estimate = NOISE_ERROR * share * (1.0 - share)  # the noise scale's error, expressed as one of the share
    return saved * math.hypot(deviation, estimate) / max(1.0 - share * saved, 1e-9)
