"""The pieces of an all-reduce: stretches of the buckets, in the order in which backward completes them.

Backward computes the last layers' gradients first, so pieces go from the end of the gradients to their
beginning. Every member has the same pieces and exchanges them in this one order; `Release` says which of them
this member's backward has completed.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from swell.train.sync.flat import Layout

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
