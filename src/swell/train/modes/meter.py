"""Measuring the gradient noise of a job: in which steps norms are taken, and what follows from them.

Several workers take the norms of their shares and of the sum while gradients are summed. A single worker has
only one share. It compares its first micro-batch with the rest of the step (`keep_first`), or two steps in a
row. All workers read the same numbers in the same order, so they hold the same statistics.

The statistics are averages over a thousand steps and do not need the norms of every step: large models skip
some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swell.train.modes.noise import AdamPreconditioner, GradientMemory, NoiseScale

_REFRESH_PRECONDITIONER = 10
"""Adam's second moment is read again after this many measured steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGradient:
    """Figures of one step's gradient that all workers have."""

    part_samples: Sequence[int]
    """By rank: samples behind the worker's share of the gradient."""
    part_squares: Sequence[float]
    """By rank: squared norm of the share, a share being samples / all samples times its mean."""
    total_square: float
    """Squared norm of the sum of the shares, the mean gradient."""
    whole: Callable[[], Sequence[Tensor]] | None = None
    """Gives the mean gradient as flat buffers; used where there is a single worker."""
    unscale: float = 1.0
    """The factor on squared norms that undoes the scaling of the loss."""

    @property
    def samples(self) -> int:
        """Samples in the step."""
        return sum(self.part_samples)


class NoiseMeter:
    """Turns the gradients of steps into statistics of their noise."""

    def __init__(
        self,
        *,
        every: int = 1,
        alone_every: int = 1,
        adam: AdamPreconditioner | None = None,
        weights: Sequence[Tensor] = (),
        epoch_scale: float = math.inf,
    ) -> None:
        """`adam` fills `weights`, flat buffers that match those of `StepGradient.whole` and `keep_first`.

        Norms are taken every `every` steps, or every `alone_every` by a single worker, which they cost more.
        """
        for name, value in (("every", every), ("alone_every", alone_every)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        self.noise = NoiseScale(epoch_scale=epoch_scale)
        self._every = every
        self._alone_every = alone_every
        self._adam = adam
        self._weights = list(weights)
        self._measured = 0
        self._memory = GradientMemory()
        self._first_samples = 0

    def due(self, step: int) -> bool:
        """Whether several workers take norms in that step; the same on all of them."""
        return step % self._every == 0

    @property
    def weights(self) -> list[Tensor] | None:
        """The element-wise factors on the gradients before norms are taken; or None."""
        return self._weights if self._adam is not None and self._adam.ready else None

    def keep_first(self, step: int, gradients: Sequence[Tensor], samples: int) -> None:
        """Keep the first micro-batch's gradient; called by a single worker that accumulates.

        `gradients` are flat buffers like `StepGradient.whole`, with what this micro-batch of `samples`
        samples adds to the mean.
        """
        self._first_samples = samples
        if step % self._alone_every == 0:
            self._memory.keep(gradients, self.weights)

    def update(self, step: int, gradient: StepGradient, scale: float) -> None:
        """Update the statistics if norms are taken in this step; `scale` is its batch / the tuned batch."""
        samples = gradient.samples
        if not samples or not (self.due(step) or len(gradient.part_samples) == 1):
            return
        shares = [(sqr, size) for sqr, size in zip(gradient.part_squares, gradient.part_samples) if size]
        first, self._first_samples = self._first_samples, 0
        if len(shares) > 1:
            # A share is size / samples times its worker's mean gradient, and its weight is size / samples.
            mean = sum(sqr * samples / size for sqr, size in shares) * gradient.unscale
            self.noise.update(mean, gradient.total_square * gradient.unscale, len(shares), scale)
            self._memory.forget()
            self._refresh_if_due()
        elif gradient.whole is not None:
            since = step % self._alone_every
            if since < 2:  # norms are taken in a step and the one after it, then not for a while
                self._update_alone(since, first / samples, gradient.whole(), gradient.unscale, scale)

    def _update_alone(
        self, since: int, first: float, whole: Sequence[Tensor], unscale: float, scale: float
    ) -> None:
        """Update from a single worker: by the share that `keep_first` kept, or by pairing steps in a row.

        `since` is 0 in the first of two such steps and 1 in the second.
        """
        if 0.0 < first < 1.0:
            norms = self._memory.split(whole, first, self.weights) if since == 0 else None
            biased = False
        elif since == 0 and self._alone_every > 1:
            self._memory.keep(whole, self.weights)
            return
        else:
            again = self._alone_every == 1  # else the next pair begins some steps from now
            norms = self._memory.pair(whole, self.weights, keep=again)
            biased = True
        if norms is not None:
            parts, total = norms.parts_sqr * unscale, norms.total_sqr * unscale
            self.noise.update(parts, total, 2.0, 2.0 * scale if biased else scale, biased=biased)
        if since == 1 or self._alone_every == 1:
            self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if self._adam is not None and self._measured % _REFRESH_PRECONDITIONER == 0:
            self._adam.refresh()
            self._memory.forget()  # norms under two different preconditioners cannot be compared
        self._measured += 1

    def membership_changed(self) -> None:
        """Note that the workers have changed: no gradient from before is compared with the next."""
        self._memory.forget()
        if self._adam is not None:
            self._adam.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {"noise": self.noise.state_dict(), "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self.noise.load_state_dict(state["noise"])
        self._measured = int(state["measured"])
        self._first_samples = 0
