"""Parts, coverage and the canonical tree: every sample once, the same additions for any number of workers."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from swell.train.data.plan import (
    FOLD,
    Tree,
    balanced,
    blocks,
    divide,
    micro,
    missing,
    parts,
    program,
    worker_tree,
)


@given(st.integers(0, 300), st.integers(1, 17))
def test_parts_cover_everything_once_and_evenly(size: int, ranks: int) -> None:
    cut = parts(size, ranks)
    assert [i for low, high in cut for i in range(low, high)] == list(range(size))
    lengths = [high - low for low, high in cut]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 100), st.integers(1, 6), st.sets(st.integers(0, 5)), st.integers(1, 6))
@example(60, 6, {1, 3}, 2)
def test_after_a_death_the_rest_is_handed_out_exactly_once(
    size: int, ranks: int, dead: set[int], survivors: int
) -> None:
    held = [cut for rank, cut in enumerate(parts(size, ranks)) if rank not in dead]
    again = divide(missing(size, held), survivors)
    samples = [i for low, high in held for i in range(low, high)]
    samples += [i for mine in again for low, high in mine for i in range(low, high)]
    assert sorted(samples) == list(range(size))
    lengths = [sum(high - low for low, high in mine) for mine in again]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 60), st.integers(1, 30), st.integers(1, 25))
def test_micro_batches_respect_the_limit(low: int, length: int, limit: int) -> None:
    pieces = micro([(low, low + length)], limit)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(low, low + length))
    assert all(0 < b - a <= limit for a, b in pieces)


@given(st.integers(1, 33), st.integers(1, 40))
def test_blocks_are_contiguous_and_leave_no_rank_out(logical: int, workers: int) -> None:
    cut = blocks(logical, workers)
    assert len(cut) == workers
    assert [r for low, high in cut for r in range(low, high)] == list(range(logical))
    if workers <= logical:
        assert all(low < high for low, high in cut)


def _run(steps: list[int], leaves: dict[int, np.float32]) -> np.float32:
    stack: list[np.float32] = []
    for step in steps:
        if step == FOLD:
            right = stack.pop()
            stack.append(np.float32(stack.pop() + right))
        else:
            stack.append(leaves[step])
    assert len(stack) == 1
    return stack[0]


def _sum(tree: Tree, leaves: dict[int, np.float32]) -> np.float32:
    if isinstance(tree, int):
        return leaves[tree]
    return np.float32(_sum(tree[0], leaves) + _sum(tree[1], leaves))


@given(st.integers(1, 16), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_sum_has_the_same_bits_on_any_number_of_workers(logical: int, samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = {r: np.float32(v) for r, v in enumerate(rng.normal(size=logical) * 10.0 ** rng.integers(-6, 6))}
    share = parts(samples, logical)
    seen = set()
    for workers in range(1, logical + 3):
        partial: dict[int, np.float32] = {}
        for worker, (low, high) in enumerate(blocks(logical, workers)):
            steps = program(low, high, samples, logical)
            if steps:
                partial[worker] = _run(steps, {r: values[r] for r in range(low, high)})
        tree = worker_tree(logical, workers, samples)
        assert tree is not None
        seen.add(_sum(tree, partial).tobytes())
        assert {r for r in range(logical) if share[r][0] < share[r][1]} == {
            r for low, high in blocks(logical, workers) for r in program(low, high, samples, logical)
        } - {FOLD}
    assert len(seen) == 1


def test_the_order_of_additions_does_matter_so_the_test_above_can_fail() -> None:
    a, b, c = np.float32(1e8), np.float32(-1e8), np.float32(1.0)
    assert np.float32(np.float32(a + b) + c) != np.float32(a + np.float32(b + c))
    assert balanced([0, 1, 2]) == ((0, 1), 2)
    assert balanced([]) is None
