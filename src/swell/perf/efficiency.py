"""Statistical efficiency: how much progress a sample of a larger batch makes (Pollux, section 3.1).

`sqr` is the squared norm of the true gradient and `var` its variance, both at the batch size the user tuned
for; `scale` is the present batch size over that one. One iteration of gain g makes as much progress as g
iterations at the tuned batch size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray


def gain(sqr: npt.ArrayLike, var: npt.ArrayLike, scale: npt.ArrayLike) -> FloatArray:
    """Progress of one iteration, counted in iterations at the tuned batch size."""
    sqr, var = np.asarray(sqr, dtype=np.float64), np.asarray(var, dtype=np.float64)
    below = var / np.asarray(scale, dtype=np.float64) + sqr
    known = below > 0  # estimates of a vanishing gradient can come out at or below zero
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
