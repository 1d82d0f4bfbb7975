"""The length of a job that trains until a target: predicted from its losses so far (Optimus, section 3.1).

A length is counted in iterations at the batch size the job was tuned for, like all progress.
"""

from __future__ import annotations

import math

from swell.perf.convergence import LossHistory

AGAIN = 1.02
"""A prediction is made again once the job has come this many times as far: fitting takes a while."""

AHEAD_ERROR = 0.10
"""Relative error added per doubling of the steps beyond those seen: not every loss falls like the model's."""

REPEAT_ERROR = 0.10
"""Relative error of the length that an earlier job of the same kind had."""


class TargetLength:
    """When the loss of one job will be at most `target`.

    Before its own losses tell more, the length of an earlier job of its kind is the prediction.
    """

    def __init__(self, target: float, earlier: float | None = None) -> None:
        """`earlier` is how long a job of the same kind and with the same target took."""
        self.target = target
        self.earlier = earlier
        self.predicted = earlier
        """Iterations in all, None while nothing can be said."""
        self.deviation = 0.0 if earlier is None else REPEAT_ERROR * earlier
        """One standard deviation of `predicted`."""
        self._losses = LossHistory()
        self._next = 0.0

    def add(self, done: float, loss: float, at_most: float | None) -> None:
        """The job has come so far and has that loss; it ends at `at_most` whatever its loss is then."""
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
        """The end that the losses so far point to, and its deviation."""
        fit = self._losses.fit
        if fit is None:
            return None
        early, likely, late = (
            min(max(fit.steps_to_loss(self.target, sigmas), done), at_most) for sigmas in (-1.0, 0.0, 1.0)
        )
        if not math.isfinite(likely):
            return None
        # Where a cautious reading never arrives, the prediction may be off by all of itself.
        late = late if math.isfinite(late) else likely + max(likely - early, likely)
        ahead = AHEAD_ERROR * math.log2(likely / max(done, 1.0)) * likely if likely > done else 0.0
        return likely, math.hypot((late - early) / 2.0, ahead)
