"""The pieces of an all-reduce: stretches of the buckets, in the order in which backward completes them.

Backward computes the last layers' gradients first, so pieces go from the end of the gradients to their
beginning. Every member has the same pieces and exchanges them in this one order; `Release` says which of them
this member's backward has completed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swell.train.data.plan import Tree
from swell.train.sync.memory import FlatModel, Layout

_SMALLEST_BYTES = 1 << 20
LINE = 16
"""Stretches begin at multiples of this many elements (which norms of a part of the elements rely on)."""


class Stretch(NamedTuple):
    """A part of one bucket: elements `low` to `high`."""

    bucket: int
    low: int
    high: int


Piece = tuple[Stretch, ...]


def cut(layout: Layout, most: int, smallest_bytes: int = _SMALLEST_BYTES) -> list[Piece]:
    """About `most` pieces of a model in the order of their exchange; buffers go with the last one."""
    out: list[Piece] = []
    for index in reversed(range(len(layout.buckets))):
        bucket = layout.buckets[index]
        size = max(smallest_bytes, layout.region_bytes // most) // bucket.dtype.itemsize
        size = -(-size // LINE) * LINE
        ends = [*range(0, bucket.gradients, size), bucket.gradients]
        out += [(Stretch(index, low, high),) for low, high in zip(ends[-2::-1], ends[:0:-1])]
    buffers = tuple(Stretch(i, b.gradients, b.numel) for i, b in enumerate(layout.buckets))
    rest = tuple(s for s in buffers if s.low < s.high)
    return [*out[:-1], out[-1] + rest] if out else [rest]


def part(piece: Piece, rank: int, size: int) -> Piece:
    """The part of a piece that rank `rank` of `size` sums for all."""
    out = []
    for bucket, low, high in piece:
        lines = (high - low) // LINE
        begin = low + lines * rank // size * LINE
        end = low + lines * (rank + 1) // size * LINE if rank + 1 < size else high
        if begin < end:
            out.append(Stretch(bucket, begin, end))
    return tuple(out)


class Release:
    """Which pieces are complete here. One thread says what is complete, another one waits."""

    def __init__(self, layout: Layout, pieces: list[Piece], parameters: list[str]) -> None:
        slots = {s.name: s for s in layout.slots if not s.buffer}
        self._pieces_of: list[list[int]] = []
        self._missing = [0] * len(pieces)
        self._missing[-1] = 1  # `all` is always awaited: what goes with the last piece is known only then
        for name in parameters:
            slot = slots[name]
            touched = [
                index
                for index, piece in enumerate(pieces)
                if any(
                    s.bucket == slot.bucket and s.low < slot.offset + slot.numel and slot.offset < s.high
                    for s in piece
                )
            ]
            self._pieces_of.append(touched)
            for index in touched:
                self._missing[index] += 1
        self._fresh = list(self._missing)
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._released = 0
        self.late = False
        """True if a gradient changed after it was said to be complete (checkpointed layers can do that)."""

    def begin(self) -> None:
        """Begin a step: nothing is complete."""
        self._missing = list(self._fresh)
        self._done, self._released, self.late = set(), 0, False

    def ready(self, parameter: int) -> None:
        """The gradient of this parameter is in its place."""
        if parameter in self._done:
            self.late = True
            return
        self._done.add(parameter)
        for piece in self._pieces_of[parameter]:
            self._missing[piece] -= 1
        self._move()

    def all(self) -> None:
        """All gradients and buffers are in their places."""
        self._missing = [0] * len(self._missing)
        self._move()

    def _move(self) -> None:
        count = self._released
        while count < len(self._missing) and not self._missing[count]:
            count += 1
        if count != self._released:
            with self._changed:
                self._released = count
                self._changed.notify_all()

    def wait(self, piece: int) -> None:
        """Wait until that piece, and all before it, are complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._released > piece)


# ---------------------------------------------------------------------- additions along a tree (pure)
# Sums of the members' vectors in the order of a tree, and what of them travels as raw bytes.


_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 26


@dataclass(frozen=True, slots=True)
class Norms:
    """How squared norms are taken: of each `stride`-th element (and times `stride`), each times its weight.

    A part of the elements of a large model tells as much as all of them, at a part of the time and memory.
    """

    stride: int = 1
    weights: list[Tensor] | None = None
    """By bucket: the factors of the elements that count."""

    def square(self, flat: Tensor, bucket: int, begin: int, end: int) -> Tensor:
        """The squared norm of a range of a bucket, which begins at a multiple of the stride."""
        part = flat[begin : end : self.stride]
        if self.weights is not None:
            first = begin // self.stride
            part = part * self.weights[bucket][first : first + len(part)]
        if part.dtype not in (torch.float32, torch.float64):
            part = part.float()
        return torch.dot(part, part) * self.stride


class Adder:
    """Adds the inputs of all members of a generation."""

    def __init__(self, flat: FlatModel, inputs: dict[int, list[Tensor]], rank: int, size: int) -> None:
        """`inputs`: the vectors of each other rank, by bucket."""
        self._flat = flat
        self._others = inputs
        self._rank = rank
        self._size = size

    def _inputs(self, rank: int) -> list[Tensor]:
        return self._flat.inputs if rank == self._rank else self._others[rank]

    def add(self, tree: Tree | None, piece: Piece, norms: Norms | None) -> list[float]:
        """Sum a piece along `tree` into the output.

        With `norms`, returns the squared norms of each rank's gradients in it, and last that of their sum.
        """
        squares: list[list[Tensor]] = [[] for _ in range(self._size + 1)]
        leaves = _leaves(tree)
        chunk = _CHUNK if self._flat.device.type == "cpu" else _DEVICE_CHUNK
        for index, low, high in piece:
            out, gradients = self._flat.outputs[index], self._flat.layout.buckets[index].gradients
            if tree is None:
                out[low:high].zero_()
                continue
            if isinstance(tree, int) and tree == self._rank and norms is None:
                out[low:high].copy_(self._inputs(tree)[index][low:high])
                continue
            scratch: list[Tensor] = []
            for begin in range(low, high, chunk):
                end = min(begin + chunk, high)
                self._add(tree, index, begin, end, out[begin:end], scratch, 0)
                if norms is not None and begin < gradients:
                    stop = min(end, gradients)
                    for rank in leaves:
                        squares[rank].append(norms.square(self._inputs(rank)[index], index, begin, stop))
                    squares[-1].append(norms.square(out, index, begin, stop))
        return [float(torch.stack(parts).double().sum()) if parts else 0.0 for parts in squares]

    def _add(
        self, tree: Tree, bucket: int, begin: int, end: int, into: Tensor, scratch: list[Tensor], depth: int
    ) -> None:
        """Write the sum of `tree` over [begin, end) into `into`; right subtrees that are sums use scratch."""
        if isinstance(tree, int):
            into.copy_(self._inputs(tree)[bucket][begin:end])
            return
        left, right = tree
        if isinstance(left, int):
            a = self._inputs(left)[bucket][begin:end]
        else:
            self._add(left, bucket, begin, end, into, scratch, depth)
            a = into
        if isinstance(right, int):
            b = self._inputs(right)[bucket][begin:end]
        else:
            if len(scratch) <= depth:
                scratch.append(torch.empty_like(into))
            b = scratch[depth][: end - begin]
            self._add(right, bucket, begin, end, b, scratch, depth + 1)
        torch.add(a, b, out=into)


def _leaves(tree: Tree | None) -> list[int]:
    if tree is None:
        return []
    if isinstance(tree, int):
        return [tree]
    return _leaves(tree[0]) + _leaves(tree[1])


class Raw:
    """Stretches of vectors as raw memory of the host, to be sent (`filled`) or to be received and stored."""

    def __init__(self, vectors: list[Tensor], piece: Piece, filled: bool = False) -> None:
        self._parts = [vectors[bucket][low:high] for bucket, low, high in piece if high > low]
        on_host = all(part.device.type == "cpu" for part in self._parts)
        self._host = self._parts
        if not on_host:
            self._host = [p.cpu() if filled else torch.empty_like(p, device="cpu") for p in self._parts]
        self.views = [memoryview(part.view(torch.uint8).numpy().data) for part in self._host]

    def store(self) -> None:
        """Put what was received where it belongs."""
        for part, host in zip(self._parts, self._host):
            if part is not host:
                part.copy_(host)


def views(raws: Mapping[int, Iterable[Raw]]) -> dict[int, list[memoryview]]:
    """By rank: the memory of some stretches, one after the other."""
    return {rank: [view for raw in several for view in raw.views] for rank, several in raws.items()}
