"""Where power-of-two shares go, and which jobs must move for them (ElasticFlow, ASPLOS'23, section 4.3).

`plan` is a pure function: given the free blocks, the blocks that other jobs hold, and how many GPUs some jobs
want, it says where these jobs go and which other blocks move where. With migration there is no fragmentation:
if every node is in service and all have the same number of GPUs, a power of two, then a share that is a power
of two gets one aligned block whenever that many GPUs are free. Otherwise:

- a share that is no power of two is a sum of blocks (6 = 4 + 2), near each other where such blocks are free;
- a block that would have no site even if all other jobs moved, because of lost nodes or odd node sizes, is
  halved until its parts fit; so the count is always exact, and the parts are as large as possible.

The plan has the fewest moves, counted in blocks (for shares that are powers of two a block is a job), and
among such plans it moves the fewest GPUs. New and resized jobs do not count as moved: they change anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swell.domain import IntArray
from swell.placement.blocks import Block, FreeBlocks, count_levels, levels_of, sites_by_level
from swell.placement.evictions import fewest_evictions

_NEAR_LEVEL = 4
"""Parts of one share are put near each other if there is a free site within 2^4 addresses, about a node."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block of a job that goes elsewhere."""

    job: int
    source: Block
    target: Block


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What to do: first the moves, in this order (each finds its target free), then the wanted shares."""

    moves: tuple[Move, ...]
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
    """Halve items, the last ones first, until no level asks for more sites than it can ever have."""
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
    moves: list[Move] = []
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
                moves.append(Move(item.job, item.source, site))
    moves.reverse()  # smallest first: a larger block may move to where smaller ones were, never the reverse
    return MigrationPlan(tuple(moves), {job: tuple(sorted(own)) for job, own in placed.items()}, free)


def _over(block: Block, level: int) -> Block:
    """The site of that level that contains a block or, if the block is larger, that starts with it."""
    return Block(block.start >> level << level, level)
