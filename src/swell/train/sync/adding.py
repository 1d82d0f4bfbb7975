"""Sums of the members' vectors in the order of a tree, and what of them travels as raw bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swell.train.data.plan import Tree
from swell.train.sync.flat import FlatModel
from swell.train.sync.pieces import Piece

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
