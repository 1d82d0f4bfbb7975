"""Where power-of-two shares go, and who must move for them (ElasticFlow, ASPLOS'23, section 4.3).

`plan` is a pure function: given the free blocks, the blocks other jobs hold, and how many GPUs some jobs
want, it says where these go and which other blocks move where. With migration allowed there is no
fragmentation: where every node is in service and all have the same power of two of GPUs, a share that is a
power of two gets one aligned block whenever that many GPUs are free. Otherwise:

- a share that is no power of two is the sum of its blocks (6 = 4 + 2), near each other where that is free;
- a block for which lost nodes or odd node sizes leave no slot, even if everybody moved, is halved until its
  parts fit; so the count is always exact, and larger parts are preferred.

The plan has the fewest moves, counted in blocks (for shares that are powers of two a block is a job), and
among those plans the fewest GPUs moved. Newcomers and resized jobs are not counted: they change anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swell.domain import IntArray
from swell.placement.blocks import Block, FreeBlocks, count_levels, levels_of, slots_by_level
from swell.placement.evictions import fewest_evictions

_NEAR_LEVEL = 4
"""Parts of one share look for each other within 2^4 addresses: about a node."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block of a job that goes elsewhere."""

    job: int
    source: Block
    target: Block


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: first the moves, in this order (each finds its target free), then the newcomers."""

    moves: tuple[Move, ...]
    placed: Mapping[int, tuple[Block, ...]]
    """The blocks of every job that wanted some, ascending."""
    free: FreeBlocks
    """What is free afterwards."""


@dataclass(frozen=True, slots=True)
class Space:
    """An address space: 2^top addresses, of which some are out of service."""

    top: int
    unusable: IntArray
    usable_slots: tuple[int, ...]
    """For each level how many of its slots lie wholly in service."""


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
) -> Plan:
    """Places for the `wanted` shares with the fewest moves of `held` blocks. Needs that many free addresses.

    `before` are the blocks wanted jobs gave up for this (free by now): they are used again where possible.
    Without `migrate` nothing moves, and shares are halved where no slot is free.
    """
    items = [_Item(level, job) for job, gpus in wanted.items() for level in levels_of(gpus)]
    room = free.slots()
    lifted: list[tuple[int, Block]] = []
    if _exceeds(items, room):
        blocks = [(job, block) for job, own in held.items() for block in own] if migrate else []
        limit = room
        if migrate:
            taken = slots_by_level(count_levels((block.level for _, block in blocks), space.top))
            limit = [have - gone for have, gone in zip(space.usable_slots, taken)]
        items = _halve_until_fit(items, limit)
        demand = slots_by_level(count_levels((item.level for item in items), space.top))
        missing = [want - have for want, have in zip(demand, room)]
        gone = fewest_evictions(space.top, space.unusable, [block for _, block in blocks], missing)
        lifted = [blocks[i] for i in gone]
    return _assign(free.copy(), items, lifted, before or {})


def _exceeds(items: Sequence[_Item], room: Sequence[int]) -> bool:
    """Whether some level has fewer slots than the items need."""
    if not items:
        return False
    top = len(room) - 1
    if max(item.level for item in items) > top:
        return True
    demand = slots_by_level(count_levels((item.level for item in items), top))
    return any(want > have for want, have in zip(demand, room))


def _halve_until_fit(items: Sequence[_Item], limit: Sequence[int]) -> list[_Item]:
    """Halve items, the last ones first, until no level asks for more slots than it can ever have."""
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
) -> Plan:
    """Give every item a free slot, the largest first: then it does not matter to the rest which one."""
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
        # Those that can have their old place go first, so that nobody else of this level takes it.
        others: list[_Item] = []
        for item in here:
            old = [item.source] if item.source is not None else before.get(item.job, ())
            slot = next((s for s in (_over(b, level) for b in old) if free.is_free(s)), None)
            if slot is None:
                others.append(item)
                continue
            free.take(slot)
            if item.source is None:
                placed[item.job].append(slot)
        for item in others:
            beside = placed[item.job][-1] if item.source is None and placed[item.job] else None
            slot = free.find_near(level, beside.start, _NEAR_LEVEL) if beside is not None else None
            slot = slot or free.find(level)
            if slot is None:
                raise ValueError(
                    f"job {item.job}: no free slot of level {level}; fewer GPUs are free than wanted"
                )
            free.take(slot)
            if item.source is None:
                placed[item.job].append(slot)
            else:
                moves.append(Move(item.job, item.source, slot))
    moves.reverse()  # the smallest first: a larger one may go where they were, never the other way round
    return Plan(tuple(moves), {job: tuple(sorted(own)) for job, own in placed.items()}, free)


def _over(block: Block, level: int) -> Block:
    """The slot of that level around a block, or at its beginning."""
    return Block(block.start >> level << level, level)
