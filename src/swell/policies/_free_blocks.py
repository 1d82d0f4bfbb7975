"""Whether buddy placement has free blocks for the jobs that grow, so that nobody has to move for them."""

from __future__ import annotations

import numpy as np

from swell.domain import IntArray
from swell.policies.snapshot import Snapshot


def fits_in_free_blocks(snapshot: Snapshot, shares: IntArray) -> bool:
    """Whether it is certain that jobs can have these shares without moving one that does not grow.

    A job that is to shrink counts as if it kept all it holds, because spare GPUs may let it do so. False
    where that cannot be told here: with several types of GPU, or with blocks of several nodes whose size is
    no power of two.
    """
    held, cluster = snapshot.gpus, snapshot.cluster
    if (shares <= held).all():
        return True
    if len({node.gpu_type for node in cluster.nodes}) > 1:
        return False
    free = cluster.in_service.copy()
    for gpus, stays in zip(snapshot.placements, shares <= held):
        if stays:
            free[list(gpus)] = False
    sizes = [node.gpus for node in cluster.nodes]
    width = _round_up(max(sizes))
    by_node = np.zeros((_round_up(len(sizes)), width), dtype=np.bool_)
    for node, (first, size) in enumerate(zip(cluster.first_gpu, sizes)):
        by_node[node, :size] = free[first : first + size]
    slots, block, wanted = by_node.ravel(), 1, shares[shares > held]
    while (wanted >= block).any():
        if block > width and set(sizes) != {width}:
            return False
        if (wanted[wanted >= block] // block).sum() > slots.sum():
            return False
        pairs = len(slots) // 2
        slots, block = slots[: 2 * pairs : 2] & slots[1 : 2 * pairs : 2], 2 * block
    return True


def _round_up(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
