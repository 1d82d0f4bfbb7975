"""Aligned power-of-two blocks and the free lists of a buddy allocator.

Addresses run from 0 to a power of two. A block of level q covers 2^q addresses and starts at a multiple of
2^q; a *site* is a place where such a block may lie, free or not. Addresses that can never be given to a job
(padding, GPUs of lost nodes) are in no free block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Block(NamedTuple):
    """2^level addresses from `start`, a multiple of 2^level."""

    start: int
    level: int

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.start + (1 << self.level)


def levels_of(gpus: int) -> list[int]:
    """The levels of the blocks that add up to `gpus`, largest first: 6 is 4 + 2, levels 2 and 1."""
    return [bit for bit in range(gpus.bit_length() - 1, -1, -1) if gpus >> bit & 1]


def aligned_blocks(addresses: Sequence[int]) -> tuple[Block, ...]:
    """The fewest aligned blocks that make up these ascending addresses."""
    blocks: list[Block] = []
    i = 0
    while i < len(addresses):
        start = addresses[i]
        last = i
        while last + 1 < len(addresses) and addresses[last + 1] == addresses[last] + 1:
            last += 1
        end = addresses[last] + 1
        while start < end:
            fits = (end - start).bit_length() - 1
            level = min(fits, (start & -start).bit_length() - 1) if start else fits
            blocks.append(Block(start, level))
            start += 1 << level
        i = last + 1
    return tuple(blocks)


class FreeBlocks:
    """The free addresses as maximal aligned blocks: no two free buddies are ever left unmerged."""

    __slots__ = ("_starts", "top")

    def __init__(self, top: int, addresses: Sequence[int] = ()) -> None:
        self.top = top
        """Level of the whole address space."""
        self._starts: list[set[int]] = [set() for _ in range(top + 1)]
        for block in aligned_blocks(addresses):
            self._starts[block.level].add(block.start)

    def copy(self) -> FreeBlocks:
        """An independent copy."""
        other = FreeBlocks.__new__(FreeBlocks)
        other.top = self.top
        other._starts = [starts.copy() for starts in self._starts]
        return other

    def blocks(self) -> list[Block]:
        """The maximal free blocks."""
        return [Block(start, level) for level, starts in enumerate(self._starts) for start in sorted(starts)]

    def sites(self) -> list[int]:
        """For each level how many disjoint sites of it are free."""
        return sites_by_level([len(starts) for starts in self._starts])

    def is_free(self, block: Block) -> bool:
        """Whether the whole block is free."""
        start, level = block
        return any(start >> up << up in self._starts[up] for up in range(level, self.top + 1))

    def find(self, level: int) -> Block | None:
        """The lowest free site of `level` in the smallest free blocks that have one; None without any."""
        for up in range(level, self.top + 1):
            if self._starts[up]:
                return Block(min(self._starts[up]), level)
        return None

    def find_near(self, level: int, address: int, within: int) -> Block | None:
        """The free site that shares the smallest aligned region with `address`, up to level `within`."""
        for up in range(level + 1, min(within, self.top) + 1):
            first = address >> up << up
            for start in range(first, first + (1 << up), 1 << level):
                if self.is_free(Block(start, level)):
                    return Block(start, level)
        return None

    def take(self, block: Block) -> None:
        """Remove a block that is free."""
        start, level = block
        for up in range(level, self.top + 1):
            base = start >> up << up
            if base in self._starts[up]:
                self._starts[up].remove(base)
                for down in range(up - 1, level - 1, -1):
                    # The half that the block is not in stays free.
                    self._starts[down].add((start >> down << down) ^ (1 << down))
                return
        raise KeyError(f"{block} is not free")

    def give(self, block: Block) -> None:
        """Add a block, merging it with its free buddies."""
        start, level = block
        while level < self.top and start ^ (1 << level) in self._starts[level]:
            self._starts[level].remove(start ^ (1 << level))
            start &= ~(1 << level)
            level += 1
        self._starts[level].add(start)


def sites_by_level(blocks: Sequence[int]) -> list[int]:
    """The sites of each level that lie in blocks of that level or above, given the blocks of each level."""
    return list(accumulate(reversed(blocks), lambda above, here: 2 * above + here))[::-1]


def count_levels(levels: Iterable[int], top: int) -> list[int]:
    """How often each level from 0 to `top` occurs in `levels`."""
    counts = [0] * (top + 1)
    for level in levels:
        counts[level] += 1
    return counts
