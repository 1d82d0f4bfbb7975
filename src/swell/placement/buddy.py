"""Buddy placement: every share is an aligned block of GPUs (ElasticFlow, ASPLOS'23, section 4.3).

The GPUs of each type are laid out in an address space of their own. Nodes of one size lie side by side in
node order, each padded to a power of two. So a block inside a node is aligned within the node and, where node
sizes are powers of two, a larger block consists of whole neighbouring nodes. Padding and lost nodes are
addresses out of service: no address changes when a node is lost or comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from swell.domain import Cluster, IntArray, Placement
from swell.placement.base import Placer, Share
from swell.placement.blocks import Block, FreeBlocks, aligned_blocks
from swell.placement.migration import MigrationPlan, Space, plan


def round_up(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the GPUs of one type lie in their address space."""

    space: Space
    gpu_at: list[int]
    """The GPU at each address; -1 for padding."""
    address_of: dict[int, int]

    @classmethod
    def of(cls, cluster: Cluster, gpu_type: str) -> Layout:
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
        """The GPUs in these blocks."""
        return [gpu for block in blocks for gpu in self.gpu_at[block.start : block.end]]


class Buddy(Placer):
    """Aligned power-of-two blocks, making room by the fewest migrations.

    Shares that are no power of two are sums of blocks; see `swell.placement.migration` for what happens where
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
        self._layouts = [Layout.of(self.cluster, pool.gpu_type) for pool in self._pools]
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

    def _place(self, shares: list[Share]) -> dict[int, Placement]:
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
