"""Placers turn 'how many GPUs' into 'which GPUs' and move as few jobs as they can.

All placers share the bookkeeping in this module. Jobs that shrink or end give their GPUs back before any job
takes some, a change is carried out completely or refused completely, and a job gets GPUs of one type where
that is possible. A placer itself only decides where shares go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.domain import Cluster, InputError, IntArray, Placement, SwellError, nearest

# Which job holds which GPU: the ledger that every placer writes to, and the only record of held GPUs.


FREE = -1
DOWN = -2


class NoRoom(SwellError):
    """More GPUs were asked for than are free, or GPUs that another job holds; nothing was changed."""


class Occupancy:
    """A mutable ledger of GPUs and the jobs on them. Jobs are non-negative integers.

    Invariants, true between any two calls:
    - `owner[gpu]` is a job, FREE, or DOWN where the GPU is out of service;
    - `free[node]` counts the FREE entries of the node, and `free_gpus` all of them;
    - `crossing[node]` counts the jobs that hold GPUs here and on some other node as well;
    - `held(job)` is exactly the GPUs whose owner is `job`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._layout(cluster)
        self.owner: IntArray = np.where(cluster.in_service, FREE, DOWN).astype(np.int64)
        self.free: IntArray = cluster.node_gpus.copy()
        self.crossing: IntArray = np.zeros(len(cluster.nodes), dtype=np.int64)
        self.free_gpus: int = cluster.capacity
        self._held: dict[int, Placement] = {}
        self._per_node: dict[int, dict[int, int]] = {}

    @property
    def jobs(self) -> Mapping[int, Placement]:
        """The placement of every job that holds GPUs."""
        return self._held

    def held(self, job: int) -> Placement:
        """The GPUs that a job holds; () if it holds none."""
        return self._held.get(job, ())

    def held_per_node(self, job: int) -> Mapping[int, int]:
        """How many GPUs a job holds on each node it is on, in node order."""
        return self._per_node.get(job, {})

    def take(self, job: int, placement: Placement) -> None:
        """Give a job that holds nothing these GPUs, all of which must be free."""
        if job < 0:
            raise InputError(f"job must be at least 0, got {job}", field="job")
        if job in self._held:
            raise NoRoom(f"job {job} already holds GPUs; release it before it takes others")
        if not placement:
            return
        gpus = tuple(sorted(placement))
        if gpus[0] < 0 or gpus[-1] >= len(self.owner):
            raise InputError(
                f"job {job}: GPU numbers must be 0 to {len(self.owner) - 1}, got {gpus}", field="gpus"
            )
        if len(set(gpus)) < len(gpus):
            raise InputError(f"job {job}: a GPU is named twice in {gpus}", field="gpus")
        index = list(gpus)
        owners = self.owner[index]
        if owners.max() > FREE or owners.min() < FREE:
            gpu = next(g for g in gpus if self.owner[g] != FREE)
            by = "out of service" if self.owner[gpu] == DOWN else f"held by job {self.owner[gpu]}"
            raise NoRoom(f"job {job} cannot take GPU {gpu}: it is {by}")
        self._write(job, gpus)

    def take_on(self, job: int, counts: Iterable[tuple[int, int]], prefer: Placement = ()) -> Placement:
        """Give a job these numbers of GPUs on these nodes: GPUs in `prefer` first, then the lowest free ones.

        The caller makes sure that each node is named once and has that many free GPUs.
        """
        gpus: list[int] = []
        wanted = set(prefer)
        first = self._first
        for node, count in counts:
            low, high = first[node], first[node + 1]
            if count == high - low:
                gpus.extend(range(low, high))
                continue
            here = [low + i for i, by in enumerate(self.owner[low:high].tolist()) if by == FREE]
            if wanted and count < len(here):
                here.sort(key=lambda gpu: gpu not in wanted)
            gpus.extend(here[:count])
        gpus.sort()
        placement = tuple(gpus)
        self._write(job, placement)
        return placement

    def release(self, job: int) -> Placement:
        """Take all GPUs from a job; returns what it held."""
        gpus = self._held.pop(job, ())
        if not gpus:
            return gpus
        self.owner[gpus[0] if len(gpus) == 1 else list(gpus)] = FREE
        self.free_gpus += len(gpus)
        counts = self._per_node.pop(job)
        free, across = self.free, len(counts) > 1
        for node, count in counts.items():
            free[node] += count
            if across:
                self.crossing[node] -= 1
        return gpus

    def set_cluster(self, cluster: Cluster) -> list[int]:
        """Use the new state of the nodes (lost, back, or added at the end); returns the jobs that lost GPUs.

        Such a job keeps the GPUs it has left, so that an elastic job can go on with them.
        """
        old = self.cluster.nodes
        same = [(n.name, n.gpus, n.gpu_type) for n in cluster.nodes[: len(old)]]
        if same != [(n.name, n.gpus, n.gpu_type) for n in old]:
            raise InputError(
                "the nodes of a running cluster must keep their order, size and GPU type: "
                "mark a lost node as not up, and add new nodes at the end",
                field="cluster",
            )
        in_service = cluster.in_service
        lost = self.owner[~in_service[: len(self.owner)]]
        jobs = list(dict.fromkeys(int(job) for job in lost if job >= 0))  # in the order of their lost GPUs
        survivors: dict[int, Placement] = {}
        for job in jobs:
            survivors[job] = tuple(gpu for gpu in self.release(job) if in_service[gpu])
        owner = np.full(len(in_service), FREE, dtype=np.int64)
        owner[: len(self.owner)] = np.maximum(self.owner, FREE)
        self.owner = np.where(in_service, owner, DOWN)
        self.cluster = cluster
        self._layout(cluster)
        added = len(cluster.nodes) - len(old)
        self.crossing = np.concatenate([self.crossing, np.zeros(added, dtype=np.int64)])
        is_free = (self.owner == FREE).astype(np.int64)
        self.free = np.add.reduceat(is_free, cluster.first_gpu[:-1])
        self.free_gpus = int(self.free.sum())
        for job, gpus in survivors.items():
            if gpus:
                self._write(job, gpus)
        return jobs

    def _write(self, job: int, gpus: Placement) -> None:
        node_of = self._node_of
        free = self.free
        self._held[job] = gpus
        self.free_gpus -= len(gpus)
        if len(gpus) == 1:
            gpu = gpus[0]
            node = node_of[gpu]
            self.owner[gpu] = job
            free[node] -= 1
            self._per_node[job] = {node: 1}
            return
        self.owner[list(gpus)] = job
        counts: dict[int, int] = {}
        for gpu in gpus:
            node = node_of[gpu]
            counts[node] = counts.get(node, 0) + 1
        self._per_node[job] = counts
        across = len(counts) > 1
        for node, count in counts.items():
            free[node] -= count
            if across:
                self.crossing[node] += 1

    def _layout(self, cluster: Cluster) -> None:
        self._first: list[int] = cluster.first_gpu.tolist()
        self._node_of: list[int] = cluster.node_of_gpu.tolist()


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes of one GPU type."""

    gpu_type: str
    nodes: IntArray
    """1 for the nodes of this type, 0 for the others."""


@dataclass(frozen=True, slots=True)
class PoolShare:
    """The number of GPUs that one job gets from one pool."""

    job: int
    pool: int
    gpus: int
    before: Placement
    """The GPUs that the job held until now. They are free, and used again where the placer's rule allows."""


class Placer(ABC):
    """Puts jobs on GPUs. `occupancy` is its ledger: read it freely, change it only through the placer."""

    name: ClassVar[str]

    def __init__(self, cluster: Cluster) -> None:
        self.occupancy = Occupancy(cluster)
        self.stay: frozenset[int] = frozenset()
        """Jobs that a placer which moves jobs moves only if there is no other way."""
        self._set_pools()

    @property
    def cluster(self) -> Cluster:
        return self.occupancy.cluster

    def place(
        self, changes: Mapping[int, int], gpu_types: Mapping[int, str] | None = None
    ) -> dict[int, Placement]:
        """Give each job in `changes` that many GPUs (0: release it); returns every placement that changed.

        Jobs that already hold that many GPUs stay where they are. So do jobs that are not in `changes`,
        unless the placer migrates them; migrated jobs are in the answer too. `gpu_types` restricts jobs to
        nodes of one type, and these jobs are placed first. Any other job gets GPUs of one type if some type
        has enough (first choice the type it is on, then the one with the most free GPUs), else of several
        types. All releases come before all takes. Raises NoRoom, with nothing changed, if too few GPUs are
        free.
        """
        occupancy = self.occupancy
        before: dict[int, Placement] = {}
        grow = 0
        for job, gpus in changes.items():
            if gpus < 0 or job < 0:
                raise InputError(
                    f"job {job}: job number and GPUs must be at least 0, got {gpus} GPUs", field="gpus"
                )
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
                    f"job {job}: job number and GPU counts must be at least 0, with one count for each of the"
                    f" {len(room)} nodes",
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
            name = self.cluster.nodes[node].name
            raise NoRoom(f"node '{name}' has {-room[node]} GPUs too few for these changes")
        before = {job: occupancy.release(job) for job in wanted}
        out: dict[int, Placement] = {}
        for job, want in wanted.items():
            out[job] = occupancy.take_on(job, want.items(), before[job]) if want else ()
        return out

    def adopt(self, job: int, placement: Placement) -> None:
        """Record GPUs that a job holds already, for example after a restart; NoRoom if one is not free."""
        self.occupancy.take(job, placement)

    def set_cluster(self, cluster: Cluster, *, keep_survivors: bool = False) -> dict[int, Placement]:
        """Use the new state of the nodes; returns the placement now of every job that lost GPUs.

        Nodes may have been lost, come back or been added. By default a job that lost some of its GPUs
        releases the others too, because it stops; with `keep_survivors` it keeps them and goes on.
        """
        jobs = self.occupancy.set_cluster(cluster)
        if not keep_survivors:
            for job in jobs:
                self.occupancy.release(job)
        self._set_pools()
        return {job: self.occupancy.held(job) for job in jobs}

    def _release(self, jobs: list[int]) -> None:
        """Take all GPUs from these jobs, each of which holds some."""
        for job in jobs:
            self.occupancy.release(job)

    @abstractmethod
    def _place(self, shares: list[PoolShare]) -> dict[int, Placement]:
        """Place the shares. Enough GPUs are free, and the jobs' earlier GPUs have been released."""

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
    ) -> list[PoolShare]:
        """Split the changes into shares, each from one pool; raises NoRoom before anything is changed."""
        if len(self._pools) == 1 and not gpu_types:
            return [
                PoolShare(job, 0, int(changes[job]), held) for job, held in before.items() if changes[job] > 0
            ]
        index = {pool.gpu_type: i for i, pool in enumerate(self._pools)}
        room = [int(self.occupancy.free @ pool.nodes) for pool in self._pools]
        home: dict[int, int] = {}
        for job in before:
            for node, count in self.occupancy.held_per_node(job).items():
                home.setdefault(job, self._pool_of_node[node])
                room[self._pool_of_node[node]] += count
        shares: list[PoolShare] = []
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
                shares.append(PoolShare(job, index[kind], gpus, held))
        for job in open_jobs:
            left = int(changes[job])
            most = sorted(range(len(room)), key=lambda i: (i != home.get(job), -room[i], i))
            whole = [i for i in most if room[i] >= left]
            for pool in whole[:1] or sorted(most, key=lambda i: -room[i]):
                gpus = min(left, room[pool])
                if gpus:
                    shares.append(PoolShare(job, pool, gpus, before[job]))
                    room[pool] -= gpus
                    left -= gpus
        return shares
