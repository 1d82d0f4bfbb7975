"""The length of a job that trains until a target: predicted from its losses so far (Optimus, section 3.1).

A length is counted in iterations at the batch size the job was tuned for, like all progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray

# Optimus's convergence predictor (EuroSys'18, section 3.1): how many steps until the loss is good enough.
#
# Losses of stochastic gradient descent fall like 1/step, so the model is
#
#     loss(step) = 1 / (b0 * step + b1) + b2        b0 > 0, b1, b2 >= 0, losses divided by the largest.
#
# For a given b2, the reciprocal 1 / (loss - b2) is linear in b0 and b1. So the fit is a search over the one
# number b2, with a non-negative least-squares problem in two unknowns, solved exactly, for each value
# tried.


FEWEST_POINTS = 5
"""With fewer losses than this there is no fit: three parameters need more than three points."""

_WINDOW = 5
"""A loss is compared with this many neighbours on each side to find out whether it is an outlier."""

_FAR = 6.0
"""A loss whose distance from the curve is this many times the median distance is left out of the next fit."""

_FLOORS = 48
"""Values of b2 tried in each round of the search."""


@dataclass(frozen=True, slots=True)
class Convergence:
    """A fitted loss curve. `largest` undoes the normalisation; losses in the methods are as reported."""

    b0: float
    b1: float
    b2: float
    largest: float
    residual: float
    """Root mean squared error of the fit, as a share of the largest loss."""

    def loss(self, step: npt.ArrayLike) -> FloatArray:
        return self.largest * (1.0 / (self.b0 * np.asarray(step, dtype=np.float64) + self.b1) + self.b2)

    @property
    def floor(self) -> float:
        """The loss that the curve approaches and never falls below."""
        return self.largest * self.b2

    def steps_to_loss(self, target: float, sigmas: float = 0.0) -> float:
        """Steps from the start until the loss is at most `target`; infinite if it never gets there.

        With `sigmas`, the loss must be below `target` by that many standard errors of the fit. A positive
        value gives a cautious (late) answer, a negative one an early answer.
        """
        above = target / self.largest - sigmas * self.residual - self.b2
        if above <= 0:
            return math.inf
        return max((1.0 / above - self.b1) / self.b0, 0.0)


def without_outliers(losses: FloatArray) -> FloatArray:
    """The losses with spikes replaced by the median of their neighbours.

    A loss is a spike if it is far above the losses just before it, or far below those just after it, compared
    with how much its neighbourhood varies. A falling curve does neither.
    """
    padded = np.pad(losses, _WINDOW, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * _WINDOW + 1)
    before, after = windows[:, :_WINDOW], windows[:, _WINDOW + 1 :]
    around = np.concatenate([before, after], axis=1)
    middle = np.median(around, axis=1)
    spread = np.median(np.abs(around - middle[:, None]), axis=1)
    far = 4.0 * spread
    spike = (losses > np.median(before, axis=1) + far) | (losses < np.median(after, axis=1) - far)
    spike[[0, -1]] = False  # these two have neighbours on one side only
    return np.where(spike, middle, losses)


def fit_convergence(steps: npt.ArrayLike, losses: npt.ArrayLike) -> Convergence | None:
    """The curve that fits the losses best; None while there are too few losses or they do not fall."""
    at = np.asarray(steps, dtype=np.float64)
    raw = np.asarray(losses, dtype=np.float64)
    if at.shape != raw.shape or at.ndim != 1:
        raise ValueError(f"steps and losses must be two lists of one length, got {at.shape} and {raw.shape}")
    finite = np.isfinite(raw) & np.isfinite(at)
    at, raw = at[finite], raw[finite]
    if len(at) < FEWEST_POINTS or np.any(raw < 0) or raw.max() <= 0:
        return None
    order = np.argsort(at, kind="stable")
    at, raw = at[order], without_outliers(raw[order])
    fit = _fit(at, raw)
    # Spikes that are close together make each other look normal, so they are also compared with the curve.
    for _ in range(2):
        if fit is None:
            return None
        off = np.abs(fit.loss(at) - raw)
        kept = off <= _FAR * np.median(off) + 1e-9 * fit.largest
        if kept.all() or np.count_nonzero(kept) < FEWEST_POINTS:
            return fit
        at, raw = at[kept], raw[kept]
        fit = _fit(at, raw)
    return fit


def _fit(at: FloatArray, raw: FloatArray) -> Convergence | None:
    """The least-squares curve through cleaned losses in order of steps."""
    largest, longest = float(raw.max()), max(float(at[-1]), 1.0)
    y, x = raw / largest, at / longest
    # The floor lies below the true losses, but noise puts some reported losses below the curve. So the bound
    # on the floor ignores the lowest few.
    highest = float(np.quantile(y, 0.1)) * (1.0 - 1e-6)
    low, high = 0.0, highest
    best: tuple[float, float, float, float] | None = None
    for _ in range(3):
        floors = np.linspace(low, high, _FLOORS)
        b0, b1, error = _fit_above(x, y, floors)
        i = int(np.argmin(error))
        if np.isfinite(error[i]) and (best is None or error[i] < best[0]):
            best = float(error[i]), float(b0[i]), float(b1[i]), float(floors[i])
        width = (high - low) / (_FLOORS - 1)
        low, high = max(floors[i] - width, 0.0), min(floors[i] + width, highest)
    if best is None:
        return None
    error_, slope, offset, floor = best
    return Convergence(slope / longest, offset, floor, largest, math.sqrt(error_))


def _fit_above(x: FloatArray, y: FloatArray, floors: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For each floor the best b0 > 0 and b1 >= 0, and the mean squared error of the losses."""
    above = y[None, :] - floors[:, None]
    usable = above > 1e-9
    inverse = 1.0 / np.where(usable, above, 1.0)
    # An error d in 1/(y - b2) is an error of about d * (y - b2)^2 in the loss, which sets the weights.
    weight = np.where(usable, above**4, 0.0)
    s0, s1, s2 = weight.sum(1), (weight * x).sum(1), (weight * x * x).sum(1)
    t0, t1 = (weight * inverse).sum(1), (weight * inverse * x).sum(1)
    det = s0 * s2 - s1 * s1
    with np.errstate(divide="ignore", invalid="ignore"):
        b0, b1 = (s0 * t1 - s1 * t0) / det, (s2 * t0 - s1 * t1) / det
        alone = t1 / s2
    b0, b1 = np.where(b1 < 0, alone, b0), np.maximum(b1, 0.0)
    good = (det > 0) & (b0 > 0)
    denominator = np.where(good[:, None], b0[:, None] * x + b1[:, None], 1.0)
    # With b1 = 0 the curve is infinite at step 0; the large error there rules such a candidate out.
    fitted = 1.0 / np.maximum(denominator, 1e-9) + floors[:, None]
    error = np.mean((fitted - y) ** 2, axis=1)
    return b0, b1, np.where(good, error, np.inf)


class LossHistory:
    """The losses of one job, thinned so that memory and fitting time stay bounded however long it runs."""

    def __init__(self, most_points: int = 256) -> None:
        self._most = max(most_points, 2 * FEWEST_POINTS)
        self._steps: list[float] = []
        self._losses: list[float] = []
        self._every = 1
        """The number of reports that are averaged into one kept point."""
        self._open: list[tuple[float, float]] = []
        self._fit: Convergence | None = None
        self._stale = False

    def add(self, step: float, loss: float) -> None:
        """Record a reported loss; NaN and infinity are left out."""
        if not (math.isfinite(loss) and math.isfinite(step)):
            return
        self._open.append((step, loss))
        if len(self._open) < self._every:
            return
        mean_step, mean_loss = np.mean(self._open, axis=0).tolist()
        self._open = []
        self._steps.append(mean_step)
        self._losses.append(mean_loss)
        self._stale = True
        if len(self._steps) >= self._most:
            pairs = len(self._steps) // 2
            self._steps = np.mean(np.reshape(self._steps[: 2 * pairs], (-1, 2)), axis=1).tolist()
            self._losses = np.mean(np.reshape(self._losses[: 2 * pairs], (-1, 2)), axis=1).tolist()
            self._every *= 2

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def fit(self) -> Convergence | None:
        """The curve fitted to the losses reported so far; None while there is no fit."""
        if self._stale:
            self._fit = fit_convergence(self._steps, self._losses)
            self._stale = False
        return self._fit


AGAIN = 1.02
"""A new prediction is made each time the job's progress has grown by this factor, because fitting is slow."""

AHEAD_ERROR = 0.10
"""Relative error added per doubling of the steps beyond those reported: not every loss follows the model."""

REPEAT_ERROR = 0.10
"""Relative error of a prediction that is the length of an earlier job of the same kind."""


class TargetLength:
    """Predicts when the loss of one job will be at most `target`.

    Until the job's own losses give a better prediction, it is the length of an earlier job of the same kind.
    """

    def __init__(self, target: float, earlier: float | None = None) -> None:
        """`earlier`: the iterations that a job of the same kind took to reach the same target."""
        self.target = target
        self.earlier = earlier
        self.predicted = earlier
        """The predicted total of iterations; None while there is no prediction."""
        self.deviation = 0.0 if earlier is None else REPEAT_ERROR * earlier
        """One standard deviation of `predicted`."""
        self._losses = LossHistory()
        self._next = 0.0

    def add(self, done: float, loss: float, at_most: float | None) -> None:
        """Record the job's loss after `done` iterations; the job ends after `at_most` whatever its loss."""
        self._losses.add(done, loss)
        if done < self._next:
            return
        self._next = AGAIN * done
        if loss <= self.target:
            self.predicted, self.deviation = done, 0.0
            return
        found = self._from_losses(done, math.inf if at_most is None else at_most)
        if self.earlier is not None and self.earlier > done:
            error = REPEAT_ERROR * self.earlier
            if found is None or found[1] > error:
                found = (self.earlier, error)
        if found is not None:
            self.predicted, self.deviation = found
        elif self.predicted is not None and self.predicted <= done:
            self.predicted, self.deviation = at_most, 0.0

    def _from_losses(self, done: float, at_most: float) -> tuple[float, float] | None:
        """The total of iterations that the reported losses predict, and its standard deviation."""
        fit = self._losses.fit
        if fit is None:
            return None
        early, expected, late = (
            min(max(fit.steps_to_loss(self.target, sigmas), done), at_most) for sigmas in (-1.0, 0.0, 1.0)
        )
        if not math.isfinite(expected):
            return None
        # If the cautious curve never reaches the target, assume an error as large as the prediction itself.
        late = late if math.isfinite(late) else expected + max(expected - early, expected)
        ahead = AHEAD_ERROR * math.log2(expected / max(done, 1.0)) * expected if expected > done else 0.0
        return expected, math.hypot((late - early) / 2.0, ahead)
