"""Buddy placement: every share is an aligned block of GPUs (ElasticFlow, ASPLOS'23, section 4.3).

The GPUs of each type are laid out in an address space of their own. Nodes of one size lie side by side in
node order, each padded to a power of two. So a block inside a node is aligned within the node and, where node
sizes are powers of two, a larger block consists of whole neighbouring nodes. Padding and lost nodes are
addresses out of service: no address changes when a node is lost or comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swell.domain import Cluster, IntArray, Placement
from swell.placement.base import Placer, PoolShare

# Aligned power-of-two blocks and the free lists of a buddy allocator.
#
# Addresses run from 0 to a power of two. A block of level q covers 2^q addresses and starts at a multiple of
# 2^q; a *site* is a place where such a block may lie, free or not. Addresses that can never be given to a job
# (padding, GPUs of lost nodes) are in no free block.


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
        other = FreeBlocks.__new__(FreeBlocks)
        other.top = self.top
        other._starts = [starts.copy() for starts in self._starts]
        return other

    def blocks(self) -> list[Block]:
        return [Block(start, level) for level, starts in enumerate(self._starts) for start in sorted(starts)]

    def sites(self) -> list[int]:
        """For each level how many disjoint sites of it are free."""
        return sites_by_level([len(starts) for starts in self._starts])

    def is_free(self, block: Block) -> bool:
        """Whether the whole block is free."""
        start, level = block
        return any(start >> up << up in self._starts[up] for up in range(level, self.top + 1))

    def find(self, level: int) -> Block | None:
        """The lowest free site of `level` in the smallest free blocks that have one, or None."""
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


def round_up(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the GPUs of one type lie in their address space."""

    space: Space
    gpu_at: list[int]
    """The GPU at each address; -1 for padding."""
    address_of: dict[int, int]

    @classmethod
    def of(cls, cluster: Cluster, gpu_type: str) -> BlockLayout:
        """Lay out the GPUs of a type, lost nodes included."""
        by_size: dict[int, list[int]] = {}
        for index, node in enumerate(cluster.nodes):
            if node.gpu_type == gpu_type:
                by_size.setdefault(node.gpus, []).append(index)
        first: list[int] = cluster.first_gpu.tolist()
        ranges: list[list[int]] = []
        for gpus, nodes in by_size.items():
            pad = [-1] * (round_up(gpus) - gpus)
            addresses = list(chain.from_iterable([*range(first[i], first[i] + gpus), *pad] for i in nodes))
            ranges.append(addresses + [-1] * (round_up(len(addresses)) - len(addresses)))
        # Longest first, so that each begins at a multiple of its own length, which is a power of two.
        ranges.sort(key=len, reverse=True)
        gpu_at = list(chain.from_iterable(ranges))
        gpu_at += [-1] * (round_up(len(gpu_at)) - len(gpu_at))
        in_service = np.append(cluster.in_service, False)  # padding is -1, which indexes this last entry
        usable: npt.NDArray[np.bool_] = in_service[gpu_at]
        pairs = usable
        sites = [int(usable.sum())]
        while len(pairs) > 1:
            pairs = pairs[0::2] & pairs[1::2]
            sites.append(int(pairs.sum()))
        return cls(
            Space(len(sites) - 1, np.flatnonzero(~usable), tuple(sites)),
            gpu_at,
            {gpu: address for address, gpu in enumerate(gpu_at) if gpu >= 0},
        )

    def blocks(self, placement: Placement) -> tuple[Block, ...]:
        """The fewest aligned blocks that cover exactly those of these GPUs that are of this type."""
        address_of = self.address_of
        return aligned_blocks(sorted(address_of[gpu] for gpu in placement if gpu in address_of))

    def gpus(self, blocks: Sequence[Block]) -> list[int]:
        return [gpu for block in blocks for gpu in self.gpu_at[block.start : block.end]]


class Buddy(Placer):
    """Aligned power-of-two blocks, making room by the fewest migrations.

    Shares that are no power of two are sums of blocks; see `swell.placement.buddy` for what happens where
    node sizes or lost nodes leave no aligned block. With `migrate=False` no job moves, and a share for which
    no block is free is split into halves instead.
    """

    name = "buddy"

    def __init__(self, cluster: Cluster, *, migrate: bool = True) -> None:
        super().__init__(cluster)
        self.migrate = migrate
        self.migrations = 0
        """Jobs moved so far to make room for others."""
        self._lay_out()

    def place_per_node(self, changes: Mapping[int, Sequence[int] | IntArray]) -> dict[int, Placement]:
        """Give each job that many GPUs on each node (one count per node); returns what changed."""
        out = super().place_per_node(changes)
        if out:
            self._lay_out()
        return out

    def adopt(self, job: int, placement: Placement) -> None:
        """Record GPUs that a job holds already, for example after a restart; NoRoom if one is not free."""
        super().adopt(job, placement)
        self._lay_out()

    def set_cluster(self, cluster: Cluster, *, keep_survivors: bool = False) -> dict[int, Placement]:
        """Use the new state of the nodes; returns the placement now of every job that lost GPUs."""
        out = super().set_cluster(cluster, keep_survivors=keep_survivors)
        self._lay_out()
        return out

    def _lay_out(self) -> None:
        """Build the blocks of every pool again from the ledger."""
        self._layouts = [BlockLayout.of(self.cluster, pool.gpu_type) for pool in self._pools]
        self._free: list[FreeBlocks] = []
        self._blocks: list[dict[int, tuple[Block, ...]]] = []
        owner = self.occupancy.owner
        for layout in self._layouts:
            free = [a for a, gpu in enumerate(layout.gpu_at) if gpu >= 0 and owner[gpu] == -1]
            self._free.append(FreeBlocks(layout.space.top, free))
            held = ((job, layout.blocks(gpus)) for job, gpus in self.occupancy.jobs.items())
            self._blocks.append({job: blocks for job, blocks in held if blocks})

    def _release(self, jobs: list[int]) -> None:
        super()._release(jobs)
        for free, blocks in zip(self._free, self._blocks):
            for job in jobs:
                for block in blocks.pop(job, ()):
                    free.give(block)

    def _place(self, shares: list[PoolShare]) -> dict[int, Placement]:
        changed: dict[int, None] = {}
        for pool, (layout, held) in enumerate(zip(self._layouts, self._blocks)):
            mine = [share for share in shares if share.pool == pool]
            if not mine:
                continue
            made = plan(
                layout.space,
                self._free[pool],
                held,
                {share.job: share.gpus for share in mine},
                {share.job: layout.blocks(share.before) for share in mine if share.before},
                migrate=self.migrate,
                stay=self.stay,
            )
            changed |= dict.fromkeys(self._carry_out(pool, made))
        for job in changed:
            self.occupancy.release(job)
        out: dict[int, Placement] = {}
        for job in changed:
            parts = (layout.gpus(own.get(job, ())) for layout, own in zip(self._layouts, self._blocks))
            out[job] = tuple(sorted(chain.from_iterable(parts)))
            self.occupancy.take(job, out[job])
        return out

    def _carry_out(self, pool: int, made: MigrationPlan) -> list[int]:
        """Carry out a plan in the blocks of a pool; returns the jobs whose blocks changed."""
        self._free[pool] = made.free
        held = self._blocks[pool]
        moved: dict[int, dict[Block, Block]] = {}
        for move in made.moves:
            moved.setdefault(move.job, {})[move.source] = move.target
        for job, targets in moved.items():
            held[job] = tuple(sorted(targets.get(block, block) for block in held[job]))
        held.update(made.placed)
        self.migrations += len(moved)
        return [*made.placed, *moved]


# Where power-of-two shares go, and which jobs must move for them (ElasticFlow, ASPLOS'23, section 4.3).
#
# `plan` is a pure function: given the free blocks, the blocks that other jobs hold, and how many GPUs some
# jobs want, it says where these jobs go and which other blocks move where. With migration there is no
# fragmentation: if every node is in service and all have the same number of GPUs, a power of two, then a
# share that is a power of two gets one aligned block whenever that many GPUs are free. Otherwise:
#
# - a share that is no power of two is a sum of blocks (6 = 4 + 2), near each other where they are free;
# - a block that would have no site even if all other jobs moved, because of lost nodes or odd node sizes, is
#   halved until its parts fit; so the count is always exact, and the parts are as large as possible.
#
# The plan has the fewest moves, counted in blocks (for shares that are powers of two a block is a job), and
# among such plans it moves the fewest GPUs. New and resized jobs do not count as moved: they change anyway.


# Which blocks to move so that enough aligned sites become free, with as few moved blocks as possible.
#
# Let demand(q) be the addresses wanted in blocks of level q or above, counted in sites of level q, with the
# moved blocks included. A set of moved blocks is enough exactly if, once they are lifted, at least
# demand(q) sites are free at every level q. Lifting a block of level q or above frees as many sites of
# level q as it needs again elsewhere, so it changes nothing at level q. What counts is how many *mixed*
# sites are cleared: sites that hold only smaller blocks. Hence the problem: lift as few blocks as possible
# so that at least `missing[q]` mixed sites of each level q are cleared. A cleared site counts for its own
# level and, through the mixed sites inside it, for the levels below.
#
# Clearing more sites of a level than are missing never helps: clearing only the needed mixed sites inside
# them costs no more. So the search goes from the top level down, clears exactly what is still missing at
# each level, and passes the rest on to the level below. Sites with the same pattern of blocks form one
# class. That keeps the search short on a large cluster: its size depends on the number of classes, not on
# the number of nodes.


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
    chosen = _LiftSearch(known, np.array(missing[: highest + 1], dtype=np.int64)).best()
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


class _LiftSearch:
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


_NEAR_LEVEL = 4
"""Parts of one share are put near each other if there is a free site within 2^4 addresses, about a node."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A block of a job that goes elsewhere."""

    job: int
    source: Block
    target: Block


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Moves, in an order in which each target is free when its turn comes, and then the wanted shares."""

    moves: tuple[BlockMove, ...]
    placed: Mapping[int, tuple[Block, ...]]
    """The blocks, ascending, of every job that wanted GPUs."""
    free: FreeBlocks
    """The blocks that are free afterwards."""


@dataclass(frozen=True, slots=True)
class Space:
    """An address space: 2^top addresses, of which some are out of service."""

    top: int
    unusable: IntArray
    usable_sites: tuple[int, ...]
    """For each level how many of its sites lie wholly in service."""


@dataclass(frozen=True, slots=True)
class _Item:
    level: int
    job: int
    source: Block | None = None
    """Where a block that must move comes from; None for a part of a wanted share."""


def plan(
    space: Space,
    free: FreeBlocks,
    held: Mapping[int, Sequence[Block]],
    wanted: Mapping[int, int],
    before: Mapping[int, Sequence[Block]] | None = None,
    *,
    migrate: bool = True,
    stay: Collection[int] = (),
) -> MigrationPlan:
    """Where the `wanted` shares go with the fewest moves of `held` blocks; enough addresses must be free.

    `before` are the blocks that these jobs held until now. They are free, and used again where possible.
    Without `migrate` nothing moves, and shares are halved where no site is free. Jobs in `stay` move only if
    moving all others would not be enough.
    """
    items = [_Item(level, job) for job, gpus in wanted.items() for level in levels_of(gpus)]
    room = free.sites()
    lifted: list[tuple[int, Block]] = []
    if _exceeds(items, room):
        blocks = [(job, block) for job, own in held.items() for block in own] if migrate else []
        limit = room
        if migrate:
            taken = sites_by_level(count_levels((block.level for _, block in blocks), space.top))
            limit = [have - gone for have, gone in zip(space.usable_sites, taken)]
        items = _halve_until_fit(items, limit)
        demand = sites_by_level(count_levels((item.level for item in items), space.top))
        missing = [want - have for want, have in zip(demand, room)]
        lifted = _lift(space, blocks, missing, stay)
    return _assign(free.copy(), items, lifted, before or {})


def _lift(
    space: Space, blocks: Sequence[tuple[int, Block]], missing: Sequence[int], stay: Collection[int]
) -> list[tuple[int, Block]]:
    """The blocks to lift so that these many more sites of each level become free; of others if possible."""
    fixed = [block for job, block in blocks if job in stay]
    if fixed:
        movable = [(job, block) for job, block in blocks if job not in stay]
        taken = np.concatenate([space.unusable, *(np.arange(b.start, b.end) for b in fixed)]).astype(np.int64)
        gone = fewest_evictions(space.top, taken, [block for _, block in movable], missing)
        if gone is not None:
            return [movable[i] for i in gone]
    gone = fewest_evictions(space.top, space.unusable, [block for _, block in blocks], missing)
    if gone is None:
        raise ValueError("fewer GPUs are free than wanted")
    return [blocks[i] for i in gone]


def _exceeds(items: Sequence[_Item], room: Sequence[int]) -> bool:
    """Whether some level has fewer sites than the items need."""
    if not items:
        return False
    top = len(room) - 1
    if max(item.level for item in items) > top:
        return True
    demand = sites_by_level(count_levels((item.level for item in items), top))
    return any(want > have for want, have in zip(demand, room))


def _halve_until_fit(items: Sequence[_Item], limit: Sequence[int]) -> list[_Item]:
    """Halve items, the last ones first, until no level needs more sites than it can ever have."""
    top = max(len(limit) - 1, max(item.level for item in items))
    waiting: list[list[int]] = [[] for _ in range(top + 1)]
    for item in items:
        waiting[item.level].append(item.job)
    for level in range(top, 0, -1):
        most = limit[level] if level < len(limit) else 0
        need = sum(len(jobs) << (up - level) for up, jobs in enumerate(waiting) if up >= level)
        while need > most:
            up = next(up for up in range(level, top + 1) if waiting[up])
            waiting[up - 1].extend([waiting[up].pop()] * 2)
            need -= 1 if up == level else 0
    return [_Item(level, job) for level in range(top, -1, -1) for job in waiting[level]]


def _assign(
    free: FreeBlocks,
    items: Sequence[_Item],
    lifted: Sequence[tuple[int, Block]],
    before: Mapping[int, Sequence[Block]],
) -> MigrationPlan:
    """Give every item a free site, largest items first: then any choice leaves enough for the rest."""
    for _, block in lifted:
        free.give(block)
    everyone = [*items, *(_Item(block.level, job, block) for job, block in lifted)]
    everyone.sort(key=lambda item: -item.level)
    placed: dict[int, list[Block]] = {item.job: [] for item in items}
    moves: list[BlockMove] = []
    at = 0
    while at < len(everyone):
        level = everyone[at].level
        here = [item for item in everyone[at:] if item.level == level]
        at += len(here)
        # Items whose old site is free go first, so that no other item of this level takes that site.
        others: list[_Item] = []
        for item in here:
            old = [item.source] if item.source is not None else before.get(item.job, ())
            site = next((s for s in (_over(b, level) for b in old) if free.is_free(s)), None)
            if site is None:
                others.append(item)
                continue
            free.take(site)
            if item.source is None:
                placed[item.job].append(site)
        for item in others:
            beside = placed[item.job][-1] if item.source is None and placed[item.job] else None
            site = free.find_near(level, beside.start, _NEAR_LEVEL) if beside is not None else None
            site = site or free.find(level)
            if site is None:
                raise ValueError(
                    f"job {item.job}: no free site of level {level}; fewer GPUs are free than wanted"
                )
            free.take(site)
            if item.source is None:
                placed[item.job].append(site)
            else:
                moves.append(BlockMove(item.job, item.source, site))
    moves.reverse()  # smallest first: a larger block may move to where smaller ones were, never the reverse
    return MigrationPlan(tuple(moves), {job: tuple(sorted(own)) for job, own in placed.items()}, free)


def _over(block: Block, level: int) -> Block:
    """The site of that level that contains a block or, if the block is larger, that starts with it."""
    return Block(block.start >> level << level, level)
