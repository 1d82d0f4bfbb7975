"""What a placer is: it turns 'how many GPUs' into 'which GPUs', moving as few jobs as it can.

All placers share the bookkeeping here: shares that shrink or end give their GPUs back before anybody takes
some, a change is carried out whole or refused whole, and GPU types are kept apart where that is possible.
What is left to a placer is to say where shares go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.domain import Cluster, InputError, IntArray, Placement, nearest
from swell.placement.occupancy import NoRoom, Occupancy


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes of one GPU type."""

    gpu_type: str
    nodes: IntArray
    """1 for the nodes of this type, 0 for the others."""


@dataclass(frozen=True, slots=True)
class Share:
    """GPUs that one job shall have from one pool."""

    job: int
    pool: int
    gpus: int
    before: Placement
    """What the job held until now: free again, and welcome where it does no harm."""


class Placer(ABC):
    """Puts jobs on GPUs. `occupancy` is its ledger: read it freely, change it only through the placer."""

    name: ClassVar[str]

    def __init__(self, cluster: Cluster) -> None:
        self.occupancy = Occupancy(cluster)
        self._set_pools()

    @property
    def cluster(self) -> Cluster:
        """The cluster as the placer knows it."""
        return self.occupancy.cluster

    def place(
        self, changes: Mapping[int, int], gpu_types: Mapping[int, str] | None = None
    ) -> dict[int, Placement]:
        """Give each job in `changes` that many GPUs (0: release it); returns every placement that changed.

        Jobs that already hold what they ask for stay put, and so does every job not named, unless the placer
        migrates; jobs it moved are in the answer too. `gpu_types` restricts jobs to nodes of one type; a job
        without such a wish gets one type where a type has room for it (the one it is on, then the one with
        the most free GPUs) and several only where none has. Restricted jobs are placed first. All releases
        come before all takes. Raises NoRoom, with nothing changed, if there are not that many GPUs.
        """
        occupancy = self.occupancy
        before: dict[int, Placement] = {}
        grow = 0
        for job, gpus in changes.items():
            if gpus < 0 or job < 0:
                raise InputError(f"job {job}: GPUs and job must be at least 0, got {gpus} GPUs", field="gpus")
            held = occupancy.held(job)
            if gpus != len(held) or (gpu_types and not self._is_on(held, gpu_types.get(job))):
                before[job] = held
                grow += gpus - len(held)
        if grow > occupancy.free_gpus:
            raise NoRoom(
                f"{grow} more GPUs are asked for than are given back, but only {occupancy.free_gpus} are free"
            )
        shares = self._shares(changes, before, gpu_types or {})
        self._release([job for job, held in before.items() if held])
        placed = self._place(shares)
        for job in before:
            placed.setdefault(job, ())
        return placed

    def place_per_node(self, changes: Mapping[int, Sequence[int] | IntArray]) -> dict[int, Placement]:
        """Give each job that many GPUs on each node (one count per node); returns what changed."""
        occupancy = self.occupancy
        wanted: dict[int, dict[int, int]] = {}
        room = occupancy.free.copy()
        for job, row in changes.items():
            counts = np.asarray(row, dtype=np.int64)
            if job < 0 or counts.shape != room.shape or counts.min() < 0:
                raise InputError(
                    f"job {job}: need a job of at least 0 and such a count for each of {len(room)} nodes",
                    field="per_node",
                )
            nodes = counts.nonzero()[0]
            want = dict(zip(nodes.tolist(), counts[nodes].tolist()))
            held = occupancy.held_per_node(job)
            if want != held:
                wanted[job] = want
                room -= counts
                for node, count in held.items():
                    room[node] += count
        if wanted and room.min() < 0:
            node = int(room.argmin())
            raise NoRoom(f"node '{self.cluster.nodes[node].name}' lacks {-room[node]} GPUs for what is asked")
        before = {job: occupancy.release(job) for job in wanted}
        out: dict[int, Placement] = {}
        for job, want in wanted.items():
            out[job] = occupancy.take_on(job, want.items(), before[job]) if want else ()
        return out

    def adopt(self, job: int, placement: Placement) -> None:
        """Enter what a job holds already, as after a restart; NoRoom if that is not free."""
        self.occupancy.take(job, placement)

    def set_cluster(self, cluster: Cluster, *, keep_survivors: bool = False) -> dict[int, Placement]:
        """Follow nodes that were lost, came back or were added; returns what jobs that lost GPUs hold now.

        That is nothing, since a job that lost a part stops; with `keep_survivors` it is the GPUs they have
        left, for jobs that go on with them.
        """
        hurt = self.occupancy.set_cluster(cluster)
        if not keep_survivors:
            for job in hurt:
                self.occupancy.release(job)
        self._set_pools()
        return {job: self.occupancy.held(job) for job in hurt}

    def _release(self, jobs: list[int]) -> None:
        """Take all GPUs from these jobs, which hold some."""
        for job in jobs:
            self.occupancy.release(job)

    @abstractmethod
    def _place(self, shares: list[Share]) -> dict[int, Placement]:
        """Carry out the shares, enough being free; what their jobs held before is free by now."""

    def _set_pools(self) -> None:
        nodes = self.cluster.nodes
        self._pools = tuple(
            Pool(kind, np.array([n.gpu_type == kind for n in nodes], dtype=np.int64))
            for kind in self.cluster.gpu_types
        )
        index = {pool.gpu_type: i for i, pool in enumerate(self._pools)}
        self._pool_of_node = [index[n.gpu_type] for n in nodes]

    def _is_on(self, held: Placement, gpu_type: str | None) -> bool:
        if gpu_type is None:
            return True
        return all(self.cluster.nodes[node].gpu_type == gpu_type for node in self.cluster.nodes_of(held))

    def _shares(
        self, changes: Mapping[int, int], before: Mapping[int, Placement], gpu_types: Mapping[int, str]
    ) -> list[Share]:
        """Which pool each changed job is served from; raises NoRoom before anything is changed."""
        if len(self._pools) == 1 and not gpu_types:
            return [
                Share(job, 0, int(changes[job]), held) for job, held in before.items() if changes[job] > 0
            ]
        index = {pool.gpu_type: i for i, pool in enumerate(self._pools)}
        room = [int(self.occupancy.free @ pool.nodes) for pool in self._pools]
        home: dict[int, int] = {}
        for job in before:
            for node, count in self.occupancy.held_per_node(job).items():
                home.setdefault(job, self._pool_of_node[node])
                room[self._pool_of_node[node]] += count
        shares: list[Share] = []
        open_jobs: list[int] = []
        for job, held in before.items():
            gpus = int(changes[job])
            kind = gpu_types.get(job)
            if kind is None:
                open_jobs.append(job)
                continue
            if kind not in index:
                raise InputError(
                    f"job {job}: no node has GPU type '{kind}'.{nearest(kind, list(index))} "
                    f"Types: {', '.join(index)}",
                    field="gpu_type",
                )
            if gpus > room[index[kind]]:
                raise NoRoom(f"job {job} wants {gpus} GPUs of type '{kind}'; {room[index[kind]]} are free")
            if gpus:
                room[index[kind]] -= gpus
                shares.append(Share(job, index[kind], gpus, held))
        for job in open_jobs:
            left = int(changes[job])
            most = sorted(range(len(room)), key=lambda i: (i != home.get(job), -room[i], i))
            whole = [i for i in most if room[i] >= left]
            for pool in whole[:1] or sorted(most, key=lambda i: -room[i]):
                gpus = min(left, room[pool])
                if gpus:
                    shares.append(Share(job, pool, gpus, before[job]))
                    room[pool] -= gpus
                    left -= gpus
        return shares
