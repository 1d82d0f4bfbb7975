"""Placers that never move other jobs: most-free, network packing and first-fit.

- most-free is what the Pollux authors' simulator does for Optimus and Tiresias.
- packed follows the network packing of AFS (NSDI'21): keep a job inside one node if any node has room and,
  where possible, have at most one job on each node that communicates with other nodes.
- first-fit is the plain rule for rigid jobs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from swell.domain import IntArray, Placement
from swell.perf._compiled import compiled
from swell.placement.base import Placer, PoolShare

# The choice of nodes for network packing. It is compiled because every resize of an elastic job needs it.


@compiled
def fullest(free: IntArray, allowed: IntArray, gpus: int, mine: IntArray) -> int:
    """The allowed node with the fewest free GPUs, at least `gpus`; ties go to `mine`, then to the first."""
    best = -1
    for node in range(len(free)):
        if allowed[node] and free[node] >= gpus and (best < 0 or free[node] < free[best]):
            best = node
    if best >= 0:
        for node in mine:
            if allowed[node] and free[node] == free[best]:
                return node
    return best


@compiled
def pack(free: IntArray, crossing: IntArray, gpus: int, mine: IntArray) -> tuple[IntArray, IntArray]:
    """Nodes for a share and how many GPUs on each; see `PackedPlacer` for the rule."""
    allowed = np.ones(len(free), dtype=np.int64)
    node = fullest(free, allowed, gpus, mine)
    if node >= 0:
        return np.array([node]), np.array([gpus])
    order = np.argsort(-free, kind="mergesort")
    apart = np.array([n for n in order if crossing[n] == 0], dtype=np.int64)
    beside = np.array([n for n in order if crossing[n] > 0], dtype=np.int64)
    fewest, room = 0, 0
    while room < gpus:
        room += free[order[fewest]]
        fewest += 1
    # How many of the `fewest` nodes have to be shared ones, because the others are not enough.
    on_shared = max(0, fewest - len(apart))
    while free[apart[: fewest - on_shared]].sum() + free[beside[:on_shared]].sum() < gpus:
        on_shared += 1
    chosen = np.concatenate((apart[: fewest - on_shared], beside[:on_shared]))
    chosen = chosen[np.argsort(-free[chosen], kind="mergesort")]
    counts = free[chosen].copy()
    rest = gpus - counts[:-1].sum()
    # The rest goes on the fullest node of its kind that can hold it, so that emptier nodes stay whole.
    last = chosen[-1]
    for n in range(len(free)):
        allowed[n] = (crossing[n] > 0) == (crossing[last] > 0)
    for n in chosen[:-1]:
        allowed[n] = 0
    chosen[-1] = fullest(free, allowed, rest, mine)
    counts[-1] = rest
    return chosen, counts


def fill(nodes: IntArray, free: IntArray, gpus: int) -> list[tuple[int, int]]:
    """Take all free GPUs of each node, in the given order of nodes, until there are `gpus`."""
    taken: list[tuple[int, int]] = []
    for node, room in zip(nodes.tolist(), free[nodes].tolist()):
        if gpus <= room:
            taken.append((node, gpus))
            break
        taken.append((node, room))
        gpus -= room
    return taken


class NodePlacer(Placer):
    """Places one share after the other by choosing nodes; other jobs never move."""

    largest_first: ClassVar[bool] = False
    """True to place the changes of one call largest first; else they are placed in the caller's order."""

    def _place(self, shares: list[PoolShare]) -> dict[int, Placement]:
        occupancy, pools = self.occupancy, self._pools
        if self.largest_first and len(shares) > 1:
            shares = sorted(shares, key=lambda share: -share.gpus)
        counts: dict[int, list[tuple[int, int]]] = {}
        out: dict[int, Placement] = {}
        several = len({share.job for share in shares}) < len(shares)
        for share in shares:
            free = occupancy.free if len(pools) == 1 else occupancy.free * pools[share.pool].nodes
            where = self._choose(share, free)
            if not several:
                out[share.job] = occupancy.take_on(share.job, where, share.before)
                continue
            # A job may have shares of several GPU types. They lie on different nodes, so the lists add up.
            where = counts.setdefault(share.job, []) + where
            counts[share.job] = where
            occupancy.release(share.job)
            out[share.job] = occupancy.take_on(share.job, where, share.before)
        return out

    @abstractmethod
    def _choose(self, share: PoolShare, free: IntArray) -> list[tuple[int, int]]:
        """Nodes for a share and how many GPUs on each, given the free GPUs per node (enough in total)."""


class MostFree(NodePlacer):
    """All free GPUs of the node that has the most, then of the next node; ties go to the lowest index."""

    name = "most-free"

    def _choose(self, share: PoolShare, free: IntArray) -> list[tuple[int, int]]:
        node = int(free.argmax())
        if free[node] >= share.gpus:
            return [(node, share.gpus)]
        return fill(np.argsort(-free, kind="stable"), free, share.gpus)


class FirstFit(NodePlacer):
    """The first node that can hold the whole share; if none can, the lowest free GPUs, node by node."""

    name = "first-fit"

    def _choose(self, share: PoolShare, free: IntArray) -> list[tuple[int, int]]:
        node = int((free >= share.gpus).argmax())
        if free[node] >= share.gpus:
            return [(node, share.gpus)]
        return fill(np.flatnonzero(free), free, share.gpus)


class PackedPlacer(NodePlacer):
    """Inside the fullest node that has room; else on the fewest nodes, as few of them shared as possible.

    A node is shared if a job that spans nodes is on it already: two such jobs compete for its network. The
    last node of a share is the fullest one that can hold what is left of it, so that emptier nodes stay
    whole. Ties go to nodes that the job is on, then to the lowest index. The changes of one call are placed
    largest first.
    """

    name = "packed"
    largest_first = True

    def _choose(self, share: PoolShare, free: IntArray) -> list[tuple[int, int]]:
        mine = np.array(sorted(self.cluster.nodes_of(share.before)), dtype=np.int64)
        nodes, counts = pack(free, self.occupancy.crossing, share.gpus, mine)
        return list(zip(nodes.tolist(), counts.tolist(), strict=True))
