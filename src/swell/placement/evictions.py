"""Which blocks to move so that enough aligned sites become free, with as few moved blocks as possible.

Let demand(q) be the addresses wanted in blocks of level q or above, counted in sites of level q, with the
moved blocks included. A set of moved blocks is enough exactly if, once they are lifted, at least demand(q)
sites are free at every level q. Lifting a block of level q or above frees as many sites of level q as it
needs again elsewhere, so it changes nothing at level q. What counts is how many *mixed* sites are cleared:
sites that hold only smaller blocks. Hence the problem: lift as few blocks as possible so that at least
`missing[q]` mixed sites of each level q are cleared. A cleared site counts for its own level and, through the
mixed sites inside it, for the levels below.

Clearing more sites of a level than are missing never helps: clearing only the needed mixed sites inside them
costs no more. So the search goes from the top level down, clears exactly what is still missing at each level,
and passes the rest on to the level below. Sites with the same pattern of blocks form one class. That keeps
the search short on a large cluster: its size depends on the number of classes, not on the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swell.domain import IntArray
from swell.placement.blocks import Block

_FREE, _COVERED, _UNUSABLE, _MIXED = 0, 1, 2, 3
"""Classes of a site: free; inside one block; partly out of service. From _MIXED on they are mixed sites."""

SEARCH_STEPS = 1000
"""The search looks at this many branches; then it returns the best so far, which may not be optimal."""

SEARCH_DEPTH = 300
"""If more sites than this are missing, the greedy answer is used without a search."""


@dataclass(slots=True)
class _Class:
    """Mixed sites of one level with the same pattern of blocks; swapped halves count as the same."""

    level: int
    cost: int
    """The blocks in such a site and, as a tie-breaker, their addresses, combined in one number."""
    clears: IntArray
    """For each level, the mixed sites that are cleared with such a site, the site itself included."""
    inside: Counter[int] = field(default_factory=Counter)
    """For each class, the mixed sites inside such a site, the site itself not included."""


@dataclass(slots=True)
class _SiteClasses:
    """All classes of mixed sites, and for each level the class of every site."""

    classes: dict[int, _Class]
    count: dict[int, int]
    of_site: list[IntArray]
    by_level: list[list[int]]
    """Classes of each level, cheapest first."""


def fewest_evictions(
    top: int, unusable: Sequence[int] | IntArray, blocks: Sequence[Block], missing: Sequence[int]
) -> list[int] | None:
    """Indices of the `blocks` to lift so that `missing[q]` more sites of each level q become free.

    `unusable` are addresses out of service; every other address outside the blocks is free. None if there are
    fewer than `missing[q]` mixed sites of a level.
    """
    highest = max((level for level, gap in enumerate(missing) if gap > 0), default=0)
    if highest == 0:
        return []
    known = _classify(top, unusable, blocks, highest)
    for level in range(1, highest + 1):
        if missing[level] > sum(known.count[kind] for kind in known.by_level[level]):
            return None
    chosen = _Search(known, np.array(missing[: highest + 1], dtype=np.int64)).best()
    return _blocks_in(known, chosen, blocks)


def _classify(
    top: int, unusable: Sequence[int] | IntArray, blocks: Sequence[Block], highest: int
) -> _SiteClasses:
    size = 1 << top
    starts = np.array([b.start for b in blocks], dtype=np.int64)
    levels = np.array([b.level for b in blocks], dtype=np.int64)
    site = np.full(size, _FREE, dtype=np.int64)
    site[np.asarray(unusable, dtype=np.int64)] = _UNUSABLE
    # Coverage by level: +1 where a block of at least that level begins, -1 at its end.
    edges = np.zeros((highest + 1, size + 1), dtype=np.int64)
    for level in range(highest + 1):
        tall = levels >= level
        np.add.at(edges[level], starts[tall], 1)
        np.add.at(edges[level], starts[tall] + (1 << levels[tall]), -1)
    covered = np.cumsum(edges[:, :-1], axis=1) > 0
    site[covered[0]] = _COVERED
    of_site = [site]
    weight = 2 * size
    classes: dict[int, _Class] = {}
    count: dict[int, int] = {}
    by_level: list[list[int]] = [[]]
    for level in range(1, highest + 1):
        halves = of_site[-1].reshape(-1, 2)
        low, high = halves.min(axis=1), halves.max(axis=1)
        base = _MIXED + len(classes)
        pair = low * base + high
        plain = covered[level, :: 1 << level]
        free = high == _FREE
        broken = (halves == _UNUSABLE).any(axis=1)
        mixed = ~(plain | free | broken)
        kinds, inverse, counts = np.unique(pair[mixed], return_inverse=True, return_counts=True)
        site = np.full(len(halves), _FREE, dtype=np.int64)
        site[plain] = _COVERED
        site[broken] = _UNUSABLE
        site[mixed] = base + inverse
        of_site.append(site)
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
    return _SiteClasses(classes, count, of_site, by_level)


class _Search:
    """Depth-first branch and bound over how many sites of each class to clear, from the top level down."""

    def __init__(self, known: _SiteClasses, missing: IntArray) -> None:
        self.classes = known.classes
        self.by_level = known.by_level
        self.left = dict(known.count)
        self.missing = missing
        self.steps = 0
        costs = [np.array([self.classes[c].cost for c in own], dtype=np.int64) for own in self.by_level]
        self.costs = costs
        self.clears = [
            np.array([self.classes[c].clears for c in own], dtype=np.int64).reshape(-1, len(missing))
            for own in self.by_level
        ]
        # For each level the least cost of clearing 0, 1, 2 ... of its sites, other levels not considered.
        self.least = [
            np.concatenate([[0], np.repeat(cost, [self.left[c] for c in own]).cumsum()]).astype(np.int64)
            for cost, own in zip(costs, self.by_level)
        ]
        self.chosen: Counter[int] = Counter()
        self.found: Counter[int] = Counter()
        self.found_cost = 0

    def best(self) -> Counter[int]:
        """How many sites of each class to clear."""
        self._greedy()
        if np.maximum(self.missing, 0).sum() <= SEARCH_DEPTH:
            self._descend(self.missing, len(self.missing) - 1, 0, 0)
        return self.found

    def _options(self, missing: IntArray, level: int, first: int) -> tuple[IntArray, IntArray]:
        """Classes of a level from `first` on, cheapest first, and a lower bound of the total cost with each.

        The bound is the cost of clearing one such site, plus the most that any single level still needs then.
        """
        rest = np.maximum(missing - self.clears[level][first:], 0)
        after = np.zeros(len(rest), dtype=np.int64)
        for below in range(1, level + 1):
            np.maximum(after, self.least[below][rest[:, below]], out=after)
        bound = self.costs[level][first:] + after
        order = np.argsort(bound, kind="stable")
        return order + first, bound[order]

    def _descend(self, missing: IntArray, level: int, first: int, cost: int) -> None:
        """Try all ways to clear what is missing at `level` and below; classes before `first` were tried."""
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
        """Find a first answer by always clearing a site of the class with the lowest bound."""
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


def _blocks_in(known: _SiteClasses, chosen: Counter[int], blocks: Sequence[Block]) -> list[int]:
    """The blocks in the lowest sites of the chosen classes, from the top level down."""
    cleared = np.zeros(len(known.of_site[0]), dtype=np.bool_)
    # Classes of higher levels have higher numbers.
    for name in sorted((n for n, times in chosen.items() if times), reverse=True):
        level = known.classes[name].level
        sites = np.flatnonzero(known.of_site[level] == name)
        sites = sites[~cleared[sites << level]][: chosen[name]]
        for site in sites.tolist():
            cleared[site << level : (site + 1) << level] = True
    return [i for i, block in enumerate(blocks) if cleared[block.start]]
