"""Migration plans against brute force on address spaces small enough to try every set of movers."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.placement.buddy import Block, FreeBlocks, Space, aligned_blocks, fewest_evictions, levels_of, plan


def addresses(block):
    return range(block.start, block.end)


def mask(block):
    return ((1 << (1 << block.level)) - 1) << block.start


def sites(top, level):
    return [Block(start, level) for start in range(0, 1 << top, 1 << level)]


def make_space(top, unusable):
    unusable = set(unusable)
    usable = tuple(
        sum(not set(addresses(site)) & set(unusable) for site in sites(top, level))
        for level in range(top + 1)
    )
    return Space(top, np.array(sorted(unusable), dtype=np.int64), usable)


def make_free(top, unusable, blocks):
    taken = set(unusable).union(*(addresses(b) for b in blocks)) if blocks else set(unusable)
    return FreeBlocks(top, [a for a in range(1 << top) if a not in taken])


def fits(top, levels, occupied):
    """Whether blocks of these levels can be put beside what is occupied, by trying."""
    levels = sorted(levels, reverse=True)

    @cache
    def place(i, occupied):
        if i == len(levels):
            return True
        return any(
            place(i + 1, occupied | mask(site)) for site in sites(top, levels[i]) if not occupied & mask(site)
        )

    return place(0, occupied)


def fewest_moves(top, unusable, blocks, wanted):
    """The least number of blocks to lift, and of those sets the fewest addresses; None if no set works."""
    out = sum(1 << a for a in unusable)
    for n in range(len(blocks) + 1):
        works = [
            sum(1 << b.level for b in movers)
            for movers in combinations(blocks, n)
            if fits(
                top,
                [*wanted, *(b.level for b in movers)],
                out | sum(mask(b) for b in blocks if b not in movers),
            )
        ]
        if works:
            return n, min(works)
    return None


@st.composite
def layouts(draw, top=4, most_blocks=9):
    """Addresses out of service, blocks of jobs in a random order of arrival, and levels wanted."""
    unusable = draw(st.sets(st.integers(0, (1 << top) - 1), max_size=4)) if draw(st.booleans()) else set()
    blocks, occupied = [], sum(1 << a for a in unusable)
    for _ in range(draw(st.integers(0, most_blocks))):
        level = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))
        room = [site for site in sites(top, level) if not occupied & mask(site)]
        if room:
            blocks.append(draw(st.sampled_from(room)))
            occupied |= mask(blocks[-1])
    left = (1 << top) - occupied.bit_count()
    wanted = []
    while left and len(wanted) < 4 and (not wanted or draw(st.booleans())):
        wanted.append(draw(st.integers(0, left.bit_length() - 1)))
        left -= 1 << wanted[-1]
    return unusable, blocks, wanted


@settings(max_examples=400)
@given(layouts())
def test_plan_has_the_fewest_moves_and_of_those_the_fewest_gpus(case):
    unusable, blocks, wanted = case
    held = {i: (block,) for i, block in enumerate(blocks)}
    made = plan(
        make_space(4, unusable),
        make_free(4, unusable, blocks),
        held,
        {100 + i: 1 << level for i, level in enumerate(wanted)},
    )
    least = fewest_moves(4, unusable, blocks, wanted)
    if least is None:
        assert any(len(own) > 1 for own in made.placed.values())
    else:
        assert (len(made.moves), sum(1 << move.source.level for move in made.moves)) == least
        assert all(len(own) == 1 for own in made.placed.values())


def test_sites_inside_a_cleared_one_are_not_cleared_a_second_time():
    # The pairs (2, 3), (4, 5) and (6, 7) hold single blocks. One half of the space and three pairs are to be
    # free: clearing the right half clears two pairs at once, which cannot be counted again.
    blocks = [Block(start, 0) for start in (2, 3, 4, 6)]
    assert fewest_evictions(3, [], blocks, [0, 3, 1]) == [0, 1, 2, 3]


@settings(max_examples=400)
@given(layouts(), st.data())
def test_jobs_that_are_to_stay_move_only_if_there_is_no_other_way(case, data):
    unusable, blocks, wanted = case
    held = {i: (block,) for i, block in enumerate(blocks)}
    stay = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
    made = plan(
        make_space(4, unusable),
        make_free(4, unusable, blocks),
        held,
        {100 + i: 1 << level for i, level in enumerate(wanted)},
        stay=stay,
    )
    fixed = unusable.union(*(addresses(blocks[i]) for i in stay))
    others = fewest_moves(4, fixed, [b for i, b in enumerate(blocks) if i not in stay], wanted)
    if others is not None:
        assert (len(made.moves), sum(1 << move.source.level for move in made.moves)) == others
        assert not {move.job for move in made.moves} & stay
    elif (least := fewest_moves(4, unusable, blocks, wanted)) is not None:
        assert (len(made.moves), sum(1 << move.source.level for move in made.moves)) == least


@settings(max_examples=400)
@given(layouts(top=5, most_blocks=20), st.data())
def test_plan_reaches_aligned_blocks_by_moves_that_find_their_target_free(case, data):
    unusable, blocks, wanted = case
    held = {}
    for block in blocks:  # some jobs hold several blocks
        held.setdefault(data.draw(st.integers(0, 12)), []).append(block)
    free = make_free(5, unusable, blocks)
    spare = sum(1 << b.level for b in free.blocks())
    shares = {}
    for i in range(len(wanted)):
        gpus = data.draw(st.integers(0, spare))
        spare -= gpus
        if gpus:
            shares[100 + i] = gpus
    before = free.blocks()
    made = plan(make_space(5, unusable), free, held, shares)
    assert free.blocks() == before, "planning must not change what it is given"

    at = {block: job for job, own in held.items() for block in own}
    taken = set(unusable).union(*map(addresses, blocks)) if blocks else set(unusable)
    for move in made.moves:
        assert at.pop(move.source) == move.job
        taken -= set(addresses(move.source))
        assert not taken & set(addresses(move.target))
        taken |= set(addresses(move.target))
        at[move.target] = move.job
    for job, gpus in shares.items():
        assert sum(1 << b.level for b in made.placed[job]) == gpus
        for block in made.placed[job]:
            assert block.start % (1 << block.level) == 0
            assert not taken & set(addresses(block))
            taken |= set(addresses(block))
    left = {a for block in made.free.blocks() for a in addresses(block)}
    assert left == set(range(32)) - taken


@settings(max_examples=200)
@given(layouts(top=5, most_blocks=24))
def test_without_lost_gpus_a_power_of_two_share_is_always_one_block(case):
    _, blocks, wanted = case
    free = make_free(5, (), blocks)
    spare = sum(1 << b.level for b in free.blocks())
    wanted = [level for level in wanted if (spare := spare - (1 << level)) >= 0]
    made = plan(
        make_space(5, ()),
        free,
        {i: (block,) for i, block in enumerate(blocks)},
        {100 + i: 1 << level for i, level in enumerate(wanted)},
    )
    assert all(len(own) == 1 for own in made.placed.values())


def test_without_migration_a_share_is_halved_instead():
    blocks = [Block(0, 0), Block(2, 0)]
    free = make_free(2, (), blocks)
    held = {0: blocks[:1], 1: blocks[1:]}
    made = plan(make_space(2, ()), free, held, {2: 2}, migrate=False)
    assert made.moves == ()
    assert made.placed == {2: (Block(1, 0), Block(3, 0))}
    made = plan(make_space(2, ()), free, held, {2: 2})
    assert len(made.moves) == 1
    assert len(made.placed[2]) == 1


def test_a_lone_tenant_moves_rather_than_a_crowd():
    blocks = [Block(0, 0), Block(1, 0), Block(2, 0), Block(4, 1), *(Block(a, 0) for a in (8, 9, 10))]
    held = {i: (block,) for i, block in enumerate(blocks)}
    made = plan(make_space(4, ()), make_free(4, (), blocks), held, {9: 8})
    # Of the two halves, the one with jobs 4, 5 and 6 is lighter than the one with jobs 0 to 3.
    assert sorted(move.job for move in made.moves) == [4, 5, 6]


def test_three_small_moves_beat_a_chain_of_larger_ones():
    blocks = [Block(4, 2), Block(8, 0), Block(11, 0), Block(12, 1)]
    held = {i: (block,) for i, block in enumerate(blocks)}
    made = plan(make_space(4, ()), make_free(4, (), blocks), held, {9: 8})
    # Lifting job 0 looks cheapest, but then 3 must make way for it, and 1 or 2 for that: also three moves.
    assert sorted(move.job for move in made.moves) == [1, 2, 3]


def test_a_resized_job_keeps_its_place_where_it_can():
    free = FreeBlocks(4, range(8))  # job 1 held 4 to 7 and gave it up to grow or shrink
    held = {2: (Block(8, 3),)}
    before = {1: (Block(4, 2),)}
    assert plan(make_space(4, ()), free, held, {1: 8}, before).placed == {1: (Block(0, 3),)}
    assert plan(make_space(4, ()), free, held, {1: 2}, before).placed == {1: (Block(4, 1),)}


def test_parts_of_an_odd_share_stay_near_each_other():
    free = FreeBlocks(4, [1, 8, 9, 10, 11, 12, 13])
    made = plan(make_space(4, (0, 2, 3, 4, 5, 6, 7, 14, 15)), free, {}, {1: 3})
    assert made.placed == {1: (Block(8, 0), Block(12, 1))}


@given(st.sets(st.integers(0, 63)))
def test_aligned_blocks_make_up_exactly_the_addresses_and_cannot_be_merged(chosen):
    blocks = aligned_blocks(sorted(chosen))
    assert sorted(a for b in blocks for a in addresses(b)) == sorted(chosen)
    assert all(b.start % (1 << b.level) == 0 for b in blocks)
    assert not any(Block(b.start ^ (1 << b.level), b.level) in blocks for b in blocks)


@given(st.integers(0, 10_000))
def test_levels_add_up_to_the_share(gpus):
    levels = levels_of(gpus)
    assert sum(1 << level for level in levels) == gpus
    assert levels == sorted(set(levels), reverse=True)


def test_the_nearest_free_site_is_looked_for_as_far_as_asked_and_no_further():
    free = FreeBlocks(3, range(4, 8))
    assert free.find_near(0, 0, 2) is None, "the region of four around address 0 is taken"
    for within in (3, 9):
        assert free.find_near(0, 0, within) == Block(4, 0)
    assert free.find_near(0, 6, 3) == Block(6, 0)


def test_what_is_not_free_cannot_be_taken():
    for block in (Block(0, 0), Block(0, 3), Block(4, 3)):
        with pytest.raises(KeyError, match="is not free"):
            FreeBlocks(3, range(4, 8)).take(block)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 15)), max_size=40))
def test_free_lists_hold_exactly_what_is_free(steps):
    free, taken = FreeBlocks(4, range(16)), {}
    for take, level, at in steps:
        block = Block(at >> level << level, level)
        if take:
            assert free.is_free(block) == (not any(set(addresses(block)) & set(addresses(b)) for b in taken))
            if free.is_free(block):
                free.take(block)
                taken[block] = None
        elif taken:
            block = list(taken)[at % len(taken)]
            del taken[block]
            free.give(block)
    left = sorted(set(range(16)) - {a for b in taken for a in addresses(b)})
    assert sorted(free.blocks()) == sorted(aligned_blocks(left))
    for level in range(5):
        assert free.sites()[level] == sum(free.is_free(site) for site in sites(4, level))
