"""Placers that move nobody: most-free, network packing and first-fit.

- most-free is what the Pollux authors' simulator does for Optimus and Tiresias.
- packed follows the network packing of AFS (NSDI'21): keep a job inside a node if any node has room, and
  let at most one job per node talk across it where that is possible.
- first-fit is the plain rule for rigid jobs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from swell.domain import IntArray, Placement
from swell.placement._pack import pack
from swell.placement.base import Placer, Share


def fill(nodes: IntArray, free: IntArray, gpus: int) -> list[tuple[int, int]]:
    """Take what each node has free, in the order given, until there are `gpus`."""
    taken: list[tuple[int, int]] = []
    for node, room in zip(nodes.tolist(), free[nodes].tolist()):
        if gpus <= room:
            taken.append((node, gpus))
            break
        taken.append((node, room))
        gpus -= room
    return taken


class NodePlacer(Placer):
    """Places one share after the other by choosing nodes; nobody else moves."""

    largest_first: ClassVar[bool] = False
    """Whether the changes of one call are placed by size; otherwise in the caller's order."""

    def _place(self, shares: list[Share]) -> dict[int, Placement]:
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
            # A job with shares of several types: its parts lie on different nodes, so they simply add up.
            where = counts.setdefault(share.job, []) + where
            counts[share.job] = where
            occupancy.release(share.job)
            out[share.job] = occupancy.take_on(share.job, where, share.before)
        return out

    @abstractmethod
    def _choose(self, share: Share, free: IntArray) -> list[tuple[int, int]]:
        """Nodes for a share and how many GPUs on each, given the free GPUs per node (enough in all)."""


class MostFree(NodePlacer):
    """From the node with the most free GPUs, all it has, then the next; ties go to the lowest index."""

    name = "most-free"

    def _choose(self, share: Share, free: IntArray) -> list[tuple[int, int]]:
        node = int(free.argmax())
        if free[node] >= share.gpus:
            return [(node, share.gpus)]
        return fill(np.argsort(-free, kind="stable"), free, share.gpus)


class FirstFit(NodePlacer):
    """On the first node that can hold the job; if none can, the lowest numbered free GPUs, node by node."""

    name = "first-fit"

    def _choose(self, share: Share, free: IntArray) -> list[tuple[int, int]]:
        node = int((free >= share.gpus).argmax())
        if free[node] >= share.gpus:
            return [(node, share.gpus)]
        return fill(free.nonzero()[0], free, share.gpus)


class Packed(NodePlacer):
    """Inside the fullest node that has room; else on the fewest nodes, and on the fewest shared ones.

    A node is shared if a job that spans nodes is on it already: two such jobs compete for its network. Of the
    choices with the fewest nodes and then the fewest shared ones, the fullest node that can hold the rest
    takes it, so that emptier nodes stay whole. Ties go to nodes the job is on, then to the lowest index.
    The changes of one call are placed largest first.
    """

    name = "packed"
    largest_first = True

    def _choose(self, share: Share, free: IntArray) -> list[tuple[int, int]]:
        mine = np.array(sorted(self.cluster.nodes_of(share.before)), dtype=np.int64)
        nodes, counts = pack(free, self.occupancy.crossing, share.gpus, mine)
        return list(zip(nodes.tolist(), counts.tolist(), strict=True))
