"""How a replica's samples are cut among its workers: pure arithmetic, like `data/plan`.

All workers of a replica make the same passes, because torch gathers parameters and sums gradients in each. So
every one of them gets as many batches as the others. In training a batch may be empty: the loader puts
another sample in its place, which counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from swell.train.data import plan
from swell.train.data.plan import Range, Tree


def batches(ranges: Sequence[Range], limit: int | None, workers: int, position: int) -> list[Range]:
    """A worker's micro-batches of its replica's samples, each of at most `limit` samples."""
    out = []
    for low, high in plan.micro(ranges, limit and limit * workers):
        if low < high:
            first, last = plan.parts(high - low, workers)[position]
            out.append((low + first, low + last))
    return out


def evaluation(size: int, batch: int, rank: int, world: int, workers: int) -> list[Range]:
    """A worker's batches of a pass without training: as many as the others of its replica have.

    They have at most `batch` samples, or one more where that is needed. ValueError if some worker of the
    replica would have no sample.
    """
    cut = plan.parts(size, world)
    low, high = cut[rank]
    if workers == 1:
        return [(begin, min(begin + batch, high)) for begin in range(low, high, batch)]
    first = rank - rank % workers
    counts = [b - a for a, b in cut[first : first + workers]]
    if min(counts) == 0:
        raise ValueError(f"got {size} samples for {world} workers, and each needs at least one")
    count = min(-(-max(counts) // batch), min(counts))
    return [(low + a, low + b) for a, b in plan.parts(high - low, count)]


def tree(samples: Sequence[int], workers: int, rank: int) -> Tree | None:
    """The order in which a worker adds: over its counterparts in all replicas that had samples.

    `samples` are those of every rank. If none has any, the first replica's input is the sum.
    """
    firsts = range(0, len(samples), workers)
    busy = [first for first in firsts if any(samples[first : first + workers])]
    return plan.balanced([first + rank % workers for first in busy or [0]])
