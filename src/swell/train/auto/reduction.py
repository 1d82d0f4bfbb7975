"""Whether a script's loss is the mean or the sum over its batch, found out by trying.

If it is a sum, the gradients of the workers' parts must be added, and if it is a mean they must be averaged.
From outside one cannot see which. So before the first batch is divided, the leader computes three batches
whole while the others try: some samples, the same samples twice, and the same samples once. The loss of the
second try is as large as that of the others if it is a mean, and twice as large if it is a sum. The third try
cancels what the training changed meanwhile.

One try is one step of the optimizer. If the script accumulates several batches in a step, all of them are of
the same try, because Hugging Face's `Trainer` divides each batch's sum by the tokens of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MEAN, SUM, NEITHER = "mean", "sum", "neither"
TRIES = 3
_ROUNDS = 3
"""So many times the three tries are made before the loss counts as neither."""


class Reduction:
    """What is known about a script's loss, and the tries that are under way."""

    def __init__(self) -> None:
        self.kind: str | None = None
        """MEAN, SUM or NEITHER, the same on all workers; None as long as it is not known."""
        self.found: str | None = None
        """What this worker has found out."""
        self._samples: list[Any] = []
        self._made = 0
        self._losses: list[float] = []
        self._rounds = 0

    def samples(self, window: list[Any], index: int, per_step: int) -> tuple[int, list[Any]]:
        """The number of the try for batch number `index` of a pass, and the samples for it.

        `per_step` batches make a step. In the middle of the first step there is no try yet: the number is -1.
        """
        begins = index % per_step == 0
        self._made += begins
        if not self._made:
            return -1, window
        number = (self._made - 1) % TRIES
        if number == 0 and begins:
            self._samples = window[: max(min(2, len(window)), len(window) // 2)]
        return number, self._samples * 2 if number == 1 else list(self._samples)

    def tried(self, number: int, loss: float | None) -> None:
        """Take the loss of a batch of a try."""
        if number == len(self._losses) - 1:
            return  # a further batch of the same step
        if number != len(self._losses) or loss is None:
            self._losses = []
            return
        self._losses.append(loss)
        if len(self._losses) == TRIES:
            self._rounds += 1
            kind = judge(self._losses)
            self._losses = []
            if kind != NEITHER or self._rounds >= _ROUNDS:
                self.found = kind

    def hear(self, headers: Sequence[dict[str, Any]]) -> None:
        """Take what a worker has found out; all workers hear it in the same step."""
        if self.kind is None:
            self.kind = next((h["loss_is"] for h in headers if h.get("loss_is")), None)


def judge(losses: Sequence[float]) -> str:
    """MEAN or SUM from the losses of some samples, of the same samples twice, and of them once again."""
    once, twice, again = (abs(loss) for loss in losses)
    if not all(map(math.isfinite, (once, twice, again))) or once * again == 0.0:
        return NEITHER
    ratio = twice / math.sqrt(once * again)
    if 0.6 < ratio < 1.35:
        return MEAN
    return SUM if 1.6 < ratio < 2.6 else NEITHER
