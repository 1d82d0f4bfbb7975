"""The length of a job that trains until a target: predicted from its losses so far (Optimus, section 3.1).

A length is counted in iterations at the batch size the job was tuned for, like all progress.
"""

from __future__ import annotations

import math

from swell.perf.convergence import LossHistory

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
