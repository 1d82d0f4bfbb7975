"""Nodes, the GPUs on them, and placements of jobs on those GPUs.

GPUs are numbered across the cluster in node order, and a number never changes its meaning: a lost node keeps
its numbers and is merely not *up*. A placement is the sorted tuple of the GPU numbers that a job holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from swell.domain.errors import InputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Placement = tuple[int, ...]
"""The GPU numbers a job holds, in ascending order; () while it holds none."""

ANY_GPU = "gpu"
"""The GPU type of clusters and profiles that do not name one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with GPUs of one type."""

    name: str
    gpus: int
    gpu_type: str = ANY_GPU
    up: bool = True
    per_gpu: int = 1
    """How many of its slots share one real GPU (`--per-gpu`); a slot is a GPU everywhere else."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError(f"node '{self.name}': gpus must be at least 1, got {self.gpus}", field="gpus")
        if self.per_gpu < 1:
            raise InputError(
                f"node '{self.name}': per_gpu must be at least 1, got {self.per_gpu}", field="per_gpu"
            )

    @property
    def real_gpus(self) -> int:
        """How many real GPUs its slots are on."""
        return -(-self.gpus // self.per_gpu)

    @property
    def figures(self) -> dict[str, int | str]:
        """The node as events contain it."""
        return {"gpus": self.gpus, "gpu_type": self.gpu_type, "per_gpu": self.per_gpu}


@dataclass(frozen=True)
class Cluster:
    """All nodes, those that are lost at the moment included."""

    nodes: tuple[Node, ...]
    held: frozenset[int] = frozenset()
    """Numbers of the GPUs that somebody outside swell has taken; they cannot be given to jobs."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError("a cluster needs at least one node", field="cluster")
        total = sum(node.gpus for node in self.nodes)
        if self.held and not 0 <= min(self.held) <= max(self.held) < total:
            raise InputError(
                f"held: GPU numbers must be 0 to {total - 1}, got {sorted(self.held)}", field="held"
            )

    @classmethod
    def parse(cls, text: str, gpu_type: str = ANY_GPU) -> Cluster:
        """A cluster from '16x4' (16 nodes of 4 GPUs), '16x4:t4', or a list such as '16x4:t4,4x8:a100'."""
        nodes: list[Node] = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d+)x(\d+)(?::([\w.-]+))?\s*", part)
            if found is None or int(found[1]) < 1 or int(found[2]) < 1:
                raise InputError(
                    f"cluster '{text}': need NODESxGPUS, both at least 1, such as 16x4 or 8x4:t4,4x8:a100",
                    field="cluster",
                )
            for _ in range(int(found[1])):
                nodes.append(Node(f"n{len(nodes)}", int(found[2]), found[3] or gpu_type))
        return cls(tuple(nodes))

    def __str__(self) -> str:
        groups = groupby(self.nodes, key=lambda node: (node.gpus, node.gpu_type))
        return ",".join(
            f"{sum(1 for _ in nodes)}x{gpus}" + ("" if gpu_type == ANY_GPU else f":{gpu_type}")
            for (gpus, gpu_type), nodes in groups
        )

    @cached_property
    def first_gpu(self) -> IntArray:
        """For each node the number of its first GPU; the last entry is the total."""
        return np.concatenate([[0], np.cumsum([n.gpus for n in self.nodes])]).astype(np.int64)

    @cached_property
    def node_of_gpu(self) -> IntArray:
        """For each GPU number the index of its node."""
        return np.repeat(np.arange(len(self.nodes)), [n.gpus for n in self.nodes]).astype(np.int64)

    @cached_property
    def per_gpu(self) -> int:
        """The most slots that share one real GPU."""
        return max(node.per_gpu for node in self.nodes)

    @cached_property
    def real_gpu_of_slot(self) -> list[int]:
        """For each slot the number of its real GPU; these are numbered across the cluster in node order."""
        found: list[int] = []
        first = 0
        for node in self.nodes:
            found += [first + gpu_of_slot(slot, node.real_gpus) for slot in range(node.gpus)]
            first += node.real_gpus
        return found

    @cached_property
    def in_service(self) -> BoolArray:
        """For each GPU number, whether it can be given to a job: its node is up, and the GPU is not held."""
        usable = np.array([n.up for n in self.nodes])[self.node_of_gpu]
        usable[list(self.held)] = False
        return usable

    @cached_property
    def node_gpus(self) -> IntArray:
        """GPUs in service on each node: zero where the node is down."""
        if not self.held:
            return np.array([n.gpus if n.up else 0 for n in self.nodes], dtype=np.int64)
        return np.bincount(self.node_of_gpu[self.in_service], minlength=len(self.nodes)).astype(np.int64)

    @cached_property
    def capacity(self) -> int:
        """How many GPUs are in service."""
        return int(self.node_gpus.sum())

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of the largest node: the most that a job can have inside one node."""
        return max(n.gpus for n in self.nodes)

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types there are, in order of first appearance."""
        return tuple(dict.fromkeys(n.gpu_type for n in self.nodes))

    def shared_by(self, per_gpu: int) -> Cluster:
        """The same cluster with each GPU as several slots, for several small jobs on one GPU."""
        if per_gpu < 1:
            raise InputError(f"per_gpu must be at least 1, got {per_gpu}", field="per_gpu")
        if self.per_gpu > 1 or self.held:
            raise InputError(
                f"per_gpu: got {per_gpu}, must not be given for a cluster whose GPUs are slots already",
                field="per_gpu",
            )
        return Cluster(tuple(replace(n, gpus=n.gpus * per_gpu, per_gpu=per_gpu) for n in self.nodes))

    def with_node(self, index: int, *, up: bool) -> Cluster:
        """The same cluster after a node was lost or came back."""
        nodes = list(self.nodes)
        nodes[index] = replace(nodes[index], up=up)
        return Cluster(tuple(nodes), self.held)

    def without(self, gpus: Iterable[int]) -> Cluster:
        """The same cluster with these GPUs held as well, so that they cannot be given to jobs."""
        return Cluster(self.nodes, self.held.union(gpus))

    def shape(self, placement: Placement) -> tuple[int, ...]:
        """GPUs per node of a placement, over the nodes it touches, in node order."""
        if len(placement) == 1:
            return (1,)
        counts: dict[int, int] = {}
        node_of = self._node_of_gpu_list
        for gpu in placement:
            node = node_of[gpu]
            counts[node] = counts.get(node, 0) + 1
        return tuple(counts.values())

    def nodes_of(self, placement: Placement) -> set[int]:
        return {self._node_of_gpu_list[gpu] for gpu in placement}

    def types_of(self, placement: Placement) -> tuple[str, ...]:
        """The GPU types that a placement touches, in order of their names."""
        return tuple(sorted({self.nodes[node].gpu_type for node in self.nodes_of(placement)}))

    def type_figure(self, placement: Placement) -> dict[str, str]:
        """The GPU types of a placement as events contain them: nothing if the cluster has only one."""
        return {} if len(self.gpu_types) == 1 else {"gpu_type": "+".join(self.types_of(placement))}

    @cached_property
    def _node_of_gpu_list(self) -> list[int]:
        return [int(node) for node in self.node_of_gpu]


def clean_type(name: str) -> str:
    """A GPU type as `Cluster.parse` reads it: odd characters become dashes, and at most 40 are kept."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-")[:40] or ANY_GPU


def gpu_of_slot(slot: int, gpus: int) -> int:
    """The GPU of a slot on a machine with this number of GPUs; several slots may be on one GPU.

    Neighbouring slots are on different GPUs, so that a job's workers share one only if they have to.
    """
    return slot % gpus


def packed_shape(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """The shape of `gpus` GPUs on as few nodes as possible: full nodes first."""
    full, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


def overlapping(placements: Iterable[Placement]) -> int | None:
    """A GPU number that two placements both hold, or None. Every allocator must keep this None."""
    seen: set[int] = set()
    for placement in placements:
        for gpu in placement:
            if gpu in seen:
                return gpu
            seen.add(gpu)
    return None
