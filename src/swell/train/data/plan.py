"""Who computes what: pure arithmetic on index ranges and on the canonical tree of logical ranks.

A step is a window of the epoch's permutation. `parts` cuts it for the ranks; after a death `missing` has
which samples no worker has a gradient for, and `divide` hands them out again.

For *consistent* mode (EasyScale, section 3; see also its virtual ranks) gradients are summed along one fixed
binary tree over the logical ranks. `blocks` gives every worker one whole node of that tree, so that whatever
the number of workers, additions happen between the same operands in the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""Half-open: first sample, one past the last."""

Tree = int | tuple["Tree", "Tree"]
"""A leaf (a rank) or the sum of two trees."""

FOLD = -1
"""In a program: add the two partial sums on top of the stack."""


def parts(size: int, ranks: int) -> list[Range]:
    """`size` samples cut into `ranks` contiguous parts that differ by at most one sample."""
    return [(size * r // ranks, size * (r + 1) // ranks) for r in range(ranks)]


def missing(size: int, covered: Iterable[Range]) -> list[Range]:
    """The ranges of a window of `size` samples that `covered` leaves out."""
    gaps: list[Range] = []
    position = 0
    for low, high in sorted(covered):
        if low > position:
            gaps.append((position, low))
        position = max(position, high)
    if position < size:
        gaps.append((position, size))
    return gaps


def divide(ranges: Sequence[Range], ranks: int) -> list[list[Range]]:
    """Hand the samples in `ranges` to `ranks` workers, as evenly as `parts` does."""
    total = sum(high - low for low, high in ranges)
    out: list[list[Range]] = []
    for low, high in parts(total, ranks):
        mine: list[Range] = []
        offset = 0
        for first, last in ranges:
            begin, end = max(low - offset, 0), min(high - offset, last - first)
            if begin < end:
                mine.append((first + begin, first + end))
            offset += last - first
        out.append(mine)
    return out


def micro(ranges: Sequence[Range], limit: int | None) -> list[Range]:
    """Cut ranges into near-equal pieces of at most `limit` samples."""
    out: list[Range] = []
    for low, high in ranges:
        count = -(-(high - low) // limit) if limit else 1
        out += [(low + a, low + b) for a, b in parts(high - low, count)]
    return out


def _middle(low: int, high: int) -> int:
    """Where the canonical tree splits [low, high): after the largest power of two below its length."""
    half = 1
    while half * 2 < high - low:
        half *= 2
    return low + half


def blocks(logical: int, workers: int) -> list[Range]:
    """One node of the canonical tree over `logical` ranks for each worker; the rest get an empty block."""
    nodes: list[Range] = [(0, logical)]
    while len(nodes) < min(workers, logical):
        largest = max(nodes, key=lambda node: (node[1] - node[0], -node[0]))
        middle = _middle(*largest)
        at = nodes.index(largest)
        nodes[at : at + 1] = [(largest[0], middle), (middle, largest[1])]
    return nodes + [(logical, logical)] * (workers - len(nodes))


def worker_tree(logical: int, workers: int, samples: int) -> Tree | None:
    """How the workers' partial sums combine, given `blocks`; without ranks that have no sample."""
    owner = {block: rank for rank, block in enumerate(blocks(logical, workers)) if block[0] < block[1]}
    share = parts(samples, logical)

    def build(low: int, high: int) -> Tree | None:
        if (low, high) in owner:
            busy = any(share[r][0] < share[r][1] for r in range(low, high))
            return owner[low, high] if busy else None
        middle = _middle(low, high)
        left, right = build(low, middle), build(middle, high)
        if left is None or right is None:
            return right if left is None else left
        return left, right

    return build(0, logical)


def program(low: int, high: int, samples: int, logical: int) -> list[int]:
    """A worker's block of the canonical tree as instructions for a stack: ranks to push, and FOLDs.

    Ranks without a sample are left out, wherever they would run, so what remains is the same for any cut.
    """
    share = parts(samples, logical)

    def build(low: int, high: int) -> list[int]:
        if high - low == 1:
            return [low] if share[low][0] < share[low][1] else []
        middle = _middle(low, high)
        left, right = build(low, middle), build(middle, high)
        return [*left, *right, FOLD] if left and right else left or right

    return build(low, high) if low < high else []


def balanced(ranks: Sequence[int]) -> Tree | None:
    """The canonical tree over any list of ranks."""
    if not ranks:
        return None
    if len(ranks) == 1:
        return ranks[0]
    middle = _middle(0, len(ranks))
    left, right = balanced(ranks[:middle]), balanced(ranks[middle:])
    assert left is not None and right is not None
    return left, right
