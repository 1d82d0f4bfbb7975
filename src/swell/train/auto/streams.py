"""Passes over loaders that can only be read in order: iterable data sets, and loaders with `batch_size=None`.

Such data have no indices, so nobody can ask for a part of a batch, or for a later one. But every worker can
read the same stream, because models are divided and not batches (see `dividing`). Each worker reads it with
the loader's own iterator, as a plain run does: its order, its loader processes and its random numbers are
those of a plain run.

A newcomer comes to the job's place by reading as many batches as the job did, without computing them: in the
running pass and in those before it, because a data set may go on in one pass from where it was in the last.
How many batches the job has read in a pass that is over is in a note beside the checkpoints. The random
numbers that are drawn while it reads are the stream's alone (`Stream.skip`).

A stream that gives other batches to another worker (an unseeded one, one from a network) is noticed: what is
in each batch is compared with the gradients (`contents`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from swell.train.auto import loops
from swell.train.auto.passes import Drawn, Pass


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader has no batches of indices, so that it can only be read in order."""
    return isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None


# ---------------------------------------------------------------------- reading


class ReadBatch:
    """A batch as it was read, in place of the samples of one."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
        self._size = max(1, int(tensors[0].shape[0])) if tensors else 1

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # nothing of it can be computed again

    def hand_out(self) -> Any:
        """The batch; it is the script's from here on."""
        batch, self._batch = self._batch, None
        return batch


class Stream:
    """The batches of one pass, read in order; what `Order` is for data with indices."""

    def __init__(self, batches: Iterator[Any], behind: Callable[[], bool]) -> None:
        self.begun: dict[str, Any] = {}
        """Nothing: the stream begins with the random numbers that all workers have there."""
        self._batches = batches
        self._behind = behind
        """Whether this worker's script may have to catch up."""
        self._known: deque[Any] = deque()
        self._first = 0
        self._over = False
        self._random: Any = None
        """The random numbers with which the stream goes on, as long as this worker is behind."""
        self._sample: Any = None
        """A batch to compute without effect, as long as this worker is behind."""

    @property
    def read(self) -> int:
        """How many batches have been read."""
        return self._first + len(self._known)

    def get(self, index: int) -> Any:
        """Batch number `index`, or None after the last one; earlier batches are forgotten."""
        found = self.peek(index)
        while self._known and self._first < index:
            self._forget()
        return found

    def peek(self, index: int) -> Any:
        """Batch number `index`, not before the last one that `get` gave; nothing is forgotten."""
        while not self._over and index >= self.read:
            self._read()
        at = index - self._first
        return self._known[at] if 0 <= at < len(self._known) else None

    def sample(self) -> Any:
        """A batch that was read already, to compute without effect."""
        return copy.deepcopy(self._sample)  # the script may change it

    def skip(self, index: int, *, ends: bool = False) -> None:
        """Read up to batch number `index` (and the end after it), with random numbers of the stream's own."""
        now = _random_numbers()
        if self._random is not None:
            _set_random_numbers(self._random)
        try:
            while not self._over and (self.read < index or ends):
                self._read()
                while self._known and self._first < index:
                    self._forget()
        finally:
            self._random = _random_numbers()
            _set_random_numbers(now)

    def arrived(self) -> None:
        """This worker is where the others are: the stream goes on with the script's random numbers."""
        self._random = self._sample = None

    def _read(self) -> None:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._over = True
            return
        self._known.append(ReadBatch(batch))
        behind = self._behind()
        self._random = _random_numbers() if behind else None
        if not behind:
            self._sample = None
        elif self._sample is None:
            self._sample = copy.deepcopy(batch)

    def _forget(self) -> None:
        self._known.popleft()
        self._first += 1


def _random_numbers() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def _set_random_numbers(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


class StreamPass(Pass):
    """One pass over a stream."""

    def __init__(
        self,
        loader: DataLoader[Any],
        ordinal: int,
        draw: Callable[[Pass], Any],
        stream: Stream,
        *,
        training: bool,
    ) -> None:
        super().__init__(loader, ordinal, draw, training=training)
        self.stream = stream
        self.order: Any = stream

    def reorder(self, begun: dict[str, Any] | None) -> None:
        """Nothing: a stream has its own order, which all workers see."""

    def go_to(self, position: dict[str, Any]) -> None:
        """Read up to where another worker is."""
        if not loops.set_counts(self, position["counts"]):
            self.astray = "it cannot count its batches on from where the others are"
        self.index = int(position["batch"])
        if self.stream.read > max(self.index, 1):
            self.astray = f"it has read {self.stream.read} batches of a stream, and the others {self.index}"
        self.stream.skip(self.index)
        if self.stream.read < self.index:
            self.astray = (
                f"its stream has {self.stream.read} batches, and that of the others at least {self.index}"
            )
        self.stream.arrived()

    def take(self) -> Drawn | None:
        """Read the next batch; None at the end."""
        batch = self.stream.get(self.index)
        if batch is None:
            return None
        return self._add(Drawn(self.ordinal, self.index, batch))

    def idle(self) -> Any:
        """A batch to compute without effect: the next one if newcomers read as often as the job, else any."""
        batch = ReadBatch(self.stream.sample())
        if self.counted:
            batch = self.stream.get(self.index) or batch
            self.index += 1
        self.flight.append(Drawn(self.ordinal, -1, []))
        self.drawn += 1
        return batch


# ---------------------------------------------------------------------- how far the job has read


class Readings:
    """How many batches the job has read in its passes over streams that it is through with."""

    def __init__(self) -> None:
        self.home: Path | None = None

    def leave(self, here: Pass, *, ended: bool) -> None:
        """Note how far the script has read in `here`; `ended`: it has seen the end of the stream.

        Every worker notes the same, so no death can be in the way.
        """
        if self.home is None or not isinstance(here, StreamPass) or here.main is not None:
            return
        with contextlib.suppress(OSError):  # newcomers cannot follow without it, and say so
            self.home.mkdir(parents=True, exist_ok=True)
            new = self.home / f".{here.ordinal}.{os.getpid()}"
            new.write_text(f"{here.index} {int(ended)}\n")
            new.replace(self.home / f"{here.ordinal}")

    def go_through(self, here: StreamPass) -> str:
        """Read as much of a pass as the job did; returns why that cannot be done, or ''."""
        try:
            assert self.home is not None
            count, ended = map(int, (self.home / f"{here.ordinal}").read_text().split())
        except (OSError, ValueError, AssertionError):
            return f"nobody knows how many batches the others have read in training pass {here.ordinal}"
        here.stream.skip(count, ends=bool(ended))
        if here.stream.read != count:
            return f"it has read {here.stream.read} batches in training pass {here.ordinal}, and not {count}"
        return ""
