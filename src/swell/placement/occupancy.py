"""Which job holds which GPU: the ledger that every placer writes to, and the only record of held GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from swell.domain import Cluster, InputError, IntArray, Placement, SwellError

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
