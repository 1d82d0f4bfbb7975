"""Which blocks must make way so that enough aligned slots are free: the fewest there can be.

Let demand(q) be the addresses wanted in blocks of level q or above, counted in slots of level q. A set of
movers works exactly if, once they are lifted off, at every level at least demand(q) slots are free, movers
included in the demand. Lifting a block of level q or above frees as many slots of level q as it asks for
again, so it changes nothing there; what counts is how many *mixed* slots are cleared, those that hold only
smaller blocks. Hence the problem: clear at least `missing[q]` mixed slots of each level q with the fewest
blocks lifted. A slot cleared counts for its own level and, through the mixed slots in it, for those below.

Clearing more slots of a level than are missing never helps: clearing only the needed mixed slots inside
costs no more. So a search may go from the top level down, clear exactly what is still missing there, and
pass the rest on. Slots that look alike are one class, which is why the search is short although the cluster
is large: its size depends on how many different pictures there are, not on how many nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swell.domain import IntArray
from swell.placement.blocks import Block

_FREE, _COVERED, _UNUSABLE, _MIXED = 0, 1, 2, 3
"""Pictures of a slot: all free; all inside one block; partly out of service; the first of the mixed ones."""

SEARCH_STEPS = 1000
"""Bound on the branches looked at. Beyond it the best found so far stands, which then may not be optimal."""

SEARCH_DEPTH = 300
"""Most slots missing for which a search is tried: when more changes at once, the first answer stands."""


@dataclass(slots=True)
class _Class:
    """Mixed slots of one level that look alike, up to swapping halves."""

    level: int
    cost: int
    """Blocks in it, and less importantly their addresses, in one number."""
    clears: IntArray
    """Mixed slots cleared with it, by level, itself included."""
    inside: Counter[int] = field(default_factory=Counter)
    """Mixed slots in it, by class, itself not included."""


@dataclass(slots=True)
class _Pictures:
    """The classes of mixed slots there are, and for each level the class of every slot."""

    classes: dict[int, _Class]
    count: dict[int, int]
    of_slot: list[IntArray]
    by_level: list[list[int]]
    """Classes of each level, cheapest first."""


def fewest_evictions(
    top: int, unusable: Sequence[int] | IntArray, blocks: Sequence[Block], missing: Sequence[int]
) -> list[int]:
    """Indices into `blocks` of those to lift so that `missing[q]` more slots of each level q become free.

    `unusable` are addresses out of service; every other address outside the blocks is free. There must be at
    least `missing[q]` mixed slots of each level.
    """
    highest = max((level for level, gap in enumerate(missing) if gap > 0), default=0)
    if highest == 0:
        return []
    pictures = _look(top, unusable, blocks, highest)
    chosen = _Search(pictures, np.array(missing[: highest + 1], dtype=np.int64)).best()
    return _blocks_in(pictures, chosen, blocks)


def _look(top: int, unusable: Sequence[int] | IntArray, blocks: Sequence[Block], highest: int) -> _Pictures:
    size = 1 << top
    starts = np.array([b.start for b in blocks], dtype=np.int64)
    levels = np.array([b.level for b in blocks], dtype=np.int64)
    slot = np.full(size, _FREE, dtype=np.int64)
    slot[np.asarray(unusable, dtype=np.int64)] = _UNUSABLE
    # Coverage by level: +1 where a block of at least that level begins, -1 behind its end.
    edges = np.zeros((highest + 1, size + 1), dtype=np.int64)
    for level in range(highest + 1):
        tall = levels >= level
        np.add.at(edges[level], starts[tall], 1)
        np.add.at(edges[level], starts[tall] + (1 << levels[tall]), -1)
    covered = np.cumsum(edges[:, :-1], axis=1) > 0
    slot[covered[0]] = _COVERED
    of_slot = [slot]
    weight = 2 * size
    classes: dict[int, _Class] = {}
    count: dict[int, int] = {}
    by_level: list[list[int]] = [[]]
    for level in range(1, highest + 1):
        halves = of_slot[-1].reshape(-1, 2)
        low, high = halves.min(axis=1), halves.max(axis=1)
        base = _MIXED + len(classes)
        pair = low * base + high
        plain = covered[level, :: 1 << level]
        free = high == _FREE
        broken = (halves == _UNUSABLE).any(axis=1)
        mixed = ~(plain | free | broken)
        kinds, inverse, counts = np.unique(pair[mixed], return_inverse=True, return_counts=True)
        slot = np.full(len(halves), _FREE, dtype=np.int64)
        slot[plain] = _COVERED
        slot[broken] = _UNUSABLE
        slot[mixed] = base + inverse
        of_slot.append(slot)
        for i, (kind, n) in enumerate(zip(kinds.tolist(), counts.tolist())):
            made = _Class(level, 0, np.zeros(highest + 1, dtype=np.int64))
            made.clears[level] = 1
            for half in divmod(kind, base):
                if half == _COVERED:
                    made.cost += weight + (1 << (level - 1))
                elif half >= _MIXED:
                    made.cost += classes[half].cost
                    made.clears += classes[half].clears
                    made.inside[half] += 1
                    made.inside.update(classes[half].inside)
            classes[base + i] = made
            count[base + i] = n
        by_level.append(sorted(range(base, base + len(kinds)), key=lambda c: classes[c].cost))
    return _Pictures(classes, count, of_slot, by_level)


class _Search:
    """Depth-first branch and bound over how many slots of each class to clear, from the top level down."""

    def __init__(self, pictures: _Pictures, missing: IntArray) -> None:
        self.classes = pictures.classes
        self.by_level = pictures.by_level
        self.left = dict(pictures.count)
        self.missing = missing
        self.steps = 0
        costs = [np.array([self.classes[c].cost for c in own], dtype=np.int64) for own in self.by_level]
        self.costs = costs
        self.clears = [
            np.array([self.classes[c].clears for c in own], dtype=np.int64).reshape(-1, len(missing))
            for own in self.by_level
        ]
        # For each level the least cost of clearing 0, 1, 2 ... of its slots, were there nothing else to do.
        self.least = [
            np.concatenate([[0], np.repeat(cost, [self.left[c] for c in own]).cumsum()]).astype(np.int64)
            for cost, own in zip(costs, self.by_level)
        ]
        self.chosen: Counter[int] = Counter()
        self.found: Counter[int] = Counter()
        self.found_cost = 0

    def best(self) -> Counter[int]:
        """How many slots of each class to clear."""
        self._greedy()
        if np.maximum(self.missing, 0).sum() <= SEARCH_DEPTH:
            self._descend(self.missing, len(self.missing) - 1, 0, 0)
        return self.found

    def _options(self, missing: IntArray, level: int, first: int) -> tuple[IntArray, IntArray]:
        """Classes of a level from `first` on, most promising first, and what clearing one costs in the end.

        The cost is a lower bound: its own, and the most that any single level would still need after it.
        """
        rest = np.maximum(missing - self.clears[level][first:], 0)
        after = np.zeros(len(rest), dtype=np.int64)
        for below in range(1, level + 1):
            np.maximum(after, self.least[below][rest[:, below]], out=after)
        bound = self.costs[level][first:] + after
        order = np.argsort(bound, kind="stable")
        return order + first, bound[order]

    def _descend(self, missing: IntArray, level: int, first: int, cost: int) -> None:
        """Try the ways of clearing what is missing from `level` down, the classes before `first` done."""
        while level > 0 and missing[level] <= 0:
            level, first = level - 1, 0
        if level == 0:
            if cost < self.found_cost:
                self.found, self.found_cost = Counter(self.chosen), cost
            return
        self.steps += 1
        order, bounds = self._options(missing, level, first)
        for at, bound in zip(order.tolist(), bounds.tolist()):
            if cost + bound >= self.found_cost or self.steps > SEARCH_STEPS:
                return
            name = self.by_level[level][at]
            if self.left[name] > 0:
                made = self.classes[name]
                self._clear(name, 1)
                self._descend(missing - made.clears, level, at, cost + made.cost)
                self._clear(name, -1)

    def _greedy(self) -> None:
        """A first answer: always the class that promises the least in the end."""
        missing, level = self.missing, len(self.missing) - 1
        while level > 0:
            if missing[level] <= 0:
                level -= 1
                continue
            order, _ = self._options(missing, level, 0)
            names = (self.by_level[level][at] for at in order.tolist())
            name = next(name for name in names if self.left[name] > 0)
            self._clear(name, 1)
            missing = missing - self.classes[name].clears
        self.found = Counter(self.chosen)
        self.found_cost = sum(self.classes[name].cost * n for name, n in self.found.items())
        for name, n in self.found.items():
            self._clear(name, -n)

    def _clear(self, name: int, n: int) -> None:
        self.chosen[name] += n
        self.left[name] -= n
        for inner, times in self.classes[name].inside.items():
            self.left[inner] -= n * times


def _blocks_in(pictures: _Pictures, chosen: Counter[int], blocks: Sequence[Block]) -> list[int]:
    """The blocks in actual slots of the chosen classes: the lowest ones, from the top level down."""
    cleared = np.zeros(len(pictures.of_slot[0]), dtype=np.bool_)
    for name in sorted((n for n, times in chosen.items() if times), reverse=True):  # upper levels come last
        level = pictures.classes[name].level
        slots = np.flatnonzero(pictures.of_slot[level] == name)
        slots = slots[~cleared[slots << level]][: chosen[name]]
        for slot in slots.tolist():
            cleared[slot << level : (slot + 1) << level] = True
    return [i for i, block in enumerate(blocks) if cleared[block.start]]
