"""Whether a script's loss is the mean or the sum over its batch, found out by trying.

If it is a sum, the gradients of the workers' parts must be added, and if it is a mean they must be averaged.
From outside one cannot see which. So before the first batch is divided, the leader computes three batches
whole while the others try: some samples, the same samples twice, and the same samples once. The loss of the
second try is as large as that of the others if it is a mean, and twice as large if it is a sum. The third try
cancels what the training changed meanwhile. Three tries are a round. Whoever tries computes without dropout
(see `dropout`), but the loss of the same samples may still differ from try to try, and training changes it;
so there are rounds until only one answer is left that fits them all.

One try is one step of the optimizer. If the script accumulates several batches in a step, all of them are of
the same try, because Hugging Face's `Trainer` divides each batch's sum by the tokens of the whole step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

MEAN, SUM, NEITHER = "mean", "sum", "neither"
TRIES = 3
MOST_ROUNDS = 30
"""A loss that is still undecided after so many rounds counts as neither."""
_CLEAR, _CLEAR_ROUNDS = 0.1, 2
"""So many rounds are enough if the figures of all are this close to those of a mean, or of a sum. One of them
may be by chance."""
_LEAST_ROUNDS = 4
"""Else there are at least so many."""
_LEAST_SPREAD = 0.1
"""Rounds are never taken to be more exact than this: a few of them may be alike by chance."""
_MOST_SPREAD = 1.0
"""Rounds that differ more than this from each other say nothing."""
_IS_MEAN, _IS_SUM = (-0.74, 0.43), (0.68, 1.38)
"""In which range the factor of a round may be, for a mean and for a sum."""


class Round(NamedTuple):
    """What three tries showed, in powers of two."""

    factor: float
    """By how much the loss of the samples twice was larger than that of them once."""
    change: float
    """By how much the loss of the samples once changed, by training and by chance."""


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
        self._rounds: list[Round | None] = []

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
            self._rounds.append(compare(self._losses))
            self._losses = []
            self.found = judge(self._rounds)

    def hear(self, headers: Sequence[dict[str, Any]]) -> None:
        """Take what a worker has found out; all workers hear it in the same step."""
        if self.kind is None:
            self.kind = next((h["loss_is"] for h in headers if h.get("loss_is")), None)


def compare(losses: Sequence[float]) -> Round | None:
    """What the losses of some samples, of the same twice, and of them once again say; None if nothing."""
    once, twice, again = (abs(loss) for loss in losses)
    if not all(map(math.isfinite, (once, twice, again))) or once * twice * again == 0.0:
        return None
    return Round(math.log2(twice / math.sqrt(once * again)), math.log2(again / once))


def judge(rounds: Sequence[Round | None]) -> str | None:
    """MEAN, SUM or NEITHER, from all rounds so far; None if there must be more rounds."""
    found = [one.factor for one in rounds if one is not None]
    if len(rounds) == _CLEAR_ROUNDS == len(found):
        for kind, factor in ((MEAN, 0.0), (SUM, 1.0)):
            if all(abs(one.change) < _CLEAR and abs(one.factor - factor) < _CLEAR for one in rounds if one):
                return kind
    spread = max(statistics.stdev(found), _LEAST_SPREAD) if len(found) >= _LEAST_ROUNDS else math.inf
    if spread <= _MOST_SPREAD:
        middle = statistics.fmean(found)
        # Three standard errors, and more for few rounds, whose spread is not well known.
        error = (3.0 + 4.0 / (len(found) - 1)) * spread / math.sqrt(len(found))
        ranges = ((MEAN, _IS_MEAN), (SUM, _IS_SUM))
        fits = [(k, low < middle < high) for k, (low, high) in ranges if low - error < middle < high + error]
        if not fits:
            return NEITHER
        if len(fits) == 1 and fits[0][1]:
            return fits[0][0]
    return NEITHER if len(rounds) >= MOST_ROUNDS else None
