"""One iteration over a script's DataLoader, with a known order.

A script may draw batches ahead of the one that it computes (Accelerate reads one ahead, Hugging Face's
`Trainer` all batches of an accumulated step). So a pass keeps the batches that were drawn and not yet used in
a backward pass, oldest first: its *flight*.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from swell.train.auto import loops
from swell.train.auto.loops import SourceLoop

_MOST_AHEAD = 16
"""Of batches that were drawn ahead so many are kept, for newcomers."""
_CHUNK = 16
"""How many batches are drawn from the script's sampler at a time."""
_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw from torch's generator, or one that they make, and from no other."""


class Order:
    """The sample indices of each batch, drawn from the loader's own sampler as they are needed.

    The sampler may be endless. It begins with the random numbers that the script has at that moment, and
    leaves them as it would in a plain run: so the order is that of a plain run. `begun` is what it began
    with; another worker that is given it has the same order.
    """

    def __init__(self, loader: DataLoader[Any], begun: dict[str, Any] | None = None) -> None:
        self._loader = loader
        self.begun = begun
        self._of_torch = type(loader.sampler) in _OF_TORCH and type(loader.batch_sampler) is BatchSampler
        self._batches: Iterator[Any] | None = None
        self._random: dict[str, Any] = {}
        self._known: deque[list[int]] = deque()
        self._first = 0
        self._over = False

    def get(self, index: int) -> list[int] | None:
        """Batch number `index`, or None after the last one; earlier batches are forgotten."""
        while not self._over and index >= self._first + len(self._known):
            self._draw()
            while self._known and self._first + len(self._known) <= index:
                self._forget()
        while self._known and self._first < index:
            self._forget()
        return self._known[0] if self._known and self._first == index else None

    def peek(self, index: int) -> list[int] | None:
        """Batch number `index`, not before the last one that `get` gave; nothing is forgotten."""
        while not self._over and index >= self._first + len(self._known):
            self._draw()
        at = index - self._first
        return self._known[at] if 0 <= at < len(self._known) else None

    def _forget(self) -> None:
        self._known.popleft()
        self._first += 1

    def _draw(self) -> None:
        """Draw some batches; only the first time of a pass that begins here changes the script's numbers."""
        if self._batches is None and self.begun is None:
            self.begun = _get_random(self._loader, of_torch=self._of_torch)
            self._begin(1)
            return
        if self._batches is not None and self._of_torch:  # draws from the script's numbers only at first
            self._take(_CHUNK)
            return
        now = _get_random(self._loader, of_torch=self._of_torch)
        kept = {name: state for name, state in now.items() if name in _OF_ALL}
        try:
            if self._batches is None:
                assert self.begun is not None
                _set_random(self._loader, self.begun)
                self._begin(1)
            else:
                _set_random(self._loader, {**self._random, **_own(self._loader)})
                self._take(_CHUNK)
        finally:
            _set_random(self._loader, kept)

    def _begin(self, count: int) -> None:
        assert self._loader.batch_sampler is not None
        self._batches = iter(self._loader.batch_sampler)
        self._take(count)

    def _take(self, count: int) -> None:
        assert self._batches is not None
        for _ in range(count):
            batch = next(self._batches, None)
            if batch is None:
                self._over = True
                break
            self._known.append(_as_list(batch))
        if self._of_torch:
            return
        states = _get_random(self._loader, of_torch=False)
        self._random = {name: state for name, state in states.items() if name in _OF_ALL}


_OF_ALL = ("torch", "python", "numpy")
"""Random numbers that the whole script draws from; loaders may have generators of their own besides."""


def _generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    owners = {"loader": loader, "sampler": loader.sampler, "batches": loader.batch_sampler}
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}


def _own(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: generator.get_state() for name, generator in _generators(loader).items()}


def _get_random(loader: DataLoader[Any], *, of_torch: bool) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), **_own(loader)}
    if not of_torch:  # numpy's state alone takes longer to read than the batches take to draw
        states |= {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    return states


def _set_random(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    for name, generator in _generators(loader).items():
        if name in states:
            generator.set_state(states[name])
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(states["numpy"]))  # noqa: NPY002


def _as_list(batch: Any) -> list[Any]:
    """The sample indices of a batch; numbers of numpy and torch become Python's, anything else stays."""
    kinds = set(map(type, batch))
    if kinds != {int} and all(issubclass(kind, int | np.integer | torch.Tensor) for kind in kinds):
        return [int(i) for i in batch]
    return list(batch)


@dataclass(slots=True)
class Drawn:
    """One batch that the script has drawn."""

    ordinal: int
    index: int
    window: list[Any]
    """The samples of the batch; empty if they are computed without effect."""
    undivided: bool = False
    """True if all workers computed all of it, to see whether a model can be divided."""
    batch: Any = None
    """What the script has been given, as long as it may not have computed it."""


class Pass:
    """The batches of one pass."""

    def __init__(
        self, loader: DataLoader[Any], ordinal: int, draw: Callable[[Pass], Any], *, training: bool
    ) -> None:
        self.loader = loader
        self.ordinal = ordinal
        """The number of this training pass, or the number it would have if it were one."""
        self.epoch = ordinal
        """The epoch in which newcomers join: that of the first pass, for passes that one loop draws from."""
        self.training = training
        self.order = Order(loader)
        self.index = 0
        """The number of the batch that is drawn next."""
        self.flight: deque[Drawn] = deque()
        self.drawn = 0
        self.astray = ""
        """Why this worker could not come to the place where the others are, or ''."""
        self.over = False
        self.touched = False
        """True if the script has asked for a batch since the optimizer's last step."""
        self.main: Pass | None = None
        """The pass that this one goes along with, if the script draws from two loaders for each step."""
        self.drawn_in: frozenset[SourceLoop] = frozenset()
        """The loops of the script that draw from it and count that."""
        self.counted = False
        """True if newcomers must draw as often as the job did (see `loops`)."""
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._draw(self)

    def __len__(self) -> int:
        return len(self.loader)

    def reorder(self, begun: dict[str, Any] | None) -> None:
        """Change to the order that begins with these random numbers (the leader's)."""
        self.order = Order(self.loader, begun)

    def position(self) -> dict[str, Any]:
        """The position in this pass, for newcomers and checkpoints."""
        if self.order.begun is None:
            self.order.peek(self.index)  # so that it has begun
        return {
            "begun": self.order.begun,
            "counts": loops.counts(self),
            "pass": self.ordinal,
            "batch": self.index,
            "flight": [drawn.index for drawn in self.flight],
            "passes": [drawn.ordinal for drawn in self.flight],
            "windows": [list(drawn.window) for drawn in self.flight],
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Go to the position of another worker's pass."""
        self.reorder(position["begun"])
        if not loops.set_counts(self, position["counts"]):
            self.astray = "it cannot count its batches on from where the others are"
        self.index = int(position["batch"])
        theirs = list(zip(position["passes"], position["flight"], position["windows"]))
        if len(theirs) != len(self.flight):
            self.astray = f"it has drawn {len(self.flight)} batches ahead, and the others {len(theirs)}"
        for drawn, (ordinal, index, window) in zip(self.flight, theirs):
            drawn.ordinal, drawn.index, drawn.window = int(ordinal), int(index), list(window)

    def gave(self, batch: Any) -> None:
        """The script has been given this batch, the last one in flight."""
        if self.flight:
            self.flight[-1].batch = batch
            if len(self.flight) > _MOST_AHEAD:
                self.flight[-1 - _MOST_AHEAD].batch = None

    def take(self) -> Drawn | None:
        """Draw the next batch; None at the end."""
        window = self.order.get(self.index)
        return None if window is None else self._add(Drawn(self.ordinal, self.index, window))

    def idle(self) -> list[Any]:
        """Some samples to compute without effect: a whole batch, or if there are many of these, a small one.

        Where no batch is ever small, scripts may count on that.
        """
        some = self.order.peek(self.index) or self.order.peek(0) or []
        self.flight.append(Drawn(self.ordinal, -1, []))
        self.drawn += 1
        return some[:2] if self.counted and not self.loader.drop_last else some

    def upcoming(self, count: int) -> list[list[Any]]:
        """The samples of the next batches, as far as there are any."""
        coming = [self.order.peek(self.index + i) or [] for i in range(count)]
        return [batch for batch in coming if batch]

    def to_evaluation(self) -> None:
        """Make this an evaluation pass."""
        self.training = False
        self.flight.clear()

    def _add(self, drawn: Drawn) -> Drawn:
        self.flight.append(drawn)
        self.index += 1
        self.drawn += 1
        return drawn


# ---------------------------------------------------------------------- streams
# Passes over loaders that can only be read in order: iterable data sets, and loaders with
# `batch_size=None`.
#
# Such data have no indices, so nobody can ask for a part of a batch, or for a later one. But every worker
# can read the same stream, because models are divided and not batches (see `dividing`). Each worker reads
# it with the loader's own iterator, as a plain run does: its order, its loader processes and its random
# numbers are those of a plain run.
#
# A newcomer comes to the job's place by reading as many batches as the job did, without computing them: in
# the running pass and in those before it, because a data set may go on in one pass from where it was in the
# last. How many batches the job has read in a pass that is over is in a note beside the checkpoints. The
# random numbers that are drawn while it reads are the stream's alone (`Stream.skip`).
#
# A stream that gives other batches to another worker (an unseeded one, one from a network) is noticed: what
# is in each batch is compared with the gradients (`contents`).


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
