"""Batches drawn by hand: this worker's part of a step, as indices or as samples of a data set.

    for step in job.loop(5000):
        offsets = job.sample(len(text) - length, 64)

With replacement, every step draws anew: the offsets follow from the seed and the position alone. Without,
every index comes exactly once in each pass, whatever joins, leaves or dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from swell.train.agent.errors import UsageError
from swell.train.data.loader import ElasticLoader, Trainer
from swell.train.data.samples import key

_STEPS = 1024
"""With replacement, the offsets of this number of steps are drawn at a time."""


class _Numbers:
    """The numbers below `count`, as a data set."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class SampleLoader(ElasticLoader):
    """A loader for scripts that draw one batch at a time. It begins the next pass by itself."""

    def __init__(
        self, trainer: Trainer, name: str, source: Any, batch_size: int, *, replace: bool, seed: int
    ) -> None:
        numbers = isinstance(source, int)
        if numbers and source < 1:
            raise UsageError(f"job.sample: there is nothing to draw from below {source}; give at least 1")
        self._below = int(source) if numbers else len(source)
        self._replace = replace
        length = batch_size * _STEPS if replace else self._below
        super().__init__(
            trainer,
            name,
            _Numbers(length) if numbers or replace else source,
            batch_size=batch_size,
            shuffle=True,
            drop_last=False,
            micro_batch=None,
            num_workers=0,
            collate_fn=torch.tensor if numbers else None,
            train=True,
            seed=seed,
        )
        if not numbers:
            self.dataset = source
        self._length = length
        self._offsets: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None
        self._batches: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch of this worker."""
        while True:
            if self._batches is None:
                self._batches = self.trainer.batches(self)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None

    def again(self) -> None:
        """Begin from the present position: this worker has just become part of the job."""
        self._batches = None

    def window(self) -> int:
        """Samples in the next step; 0 at the end of the pass."""
        left = self._length - self.cursor
        return 0 if left <= 0 or self.trainer.enough() else min(self.batch_size, left)

    def _slice(self, low: int, high: int) -> list[int]:
        if not self._replace:
            return super()._slice(low, high)
        if self._offsets is None or self._offsets[0] != self.passes:
            draw = np.random.default_rng(key(self.seed, self.passes, "offsets"))
            self._offsets = (self.passes, draw.integers(0, self._below, self._length))
        picked: list[int] = self._offsets[1][low:high].tolist()
        return picked
