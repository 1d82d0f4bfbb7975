"""The workers of one replica: torch's process group among them, and the device mesh that scripts shard on.

The group is made when the script requests the mesh, before the worker is part of the job, and lives as long
as the replica. Its workers, which may be on several hosts, find each other by notes that the coordinator
keeps (`sync/reducer`). Inside a replica torch's own collectives gather parameters and sum gradients; swell
uses the group only for what all workers of a replica must decide alike.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swell.train.agent.errors import UsageError
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.protocol import JobFile
from swell.train.agent.replicas import number_of, replica_of
from swell.train.sync.reducer import NoteStore, gloo_group

distributed: Any = dist
"""Torch exports its stores without saying so."""
GLOO = "swell_gloo"
"""Torch's name of gloo where gloo listens on the address of the worker's host only."""


class Replica:
    """This worker's place in its replica."""

    def __init__(self, size: int, position: int) -> None:
        self.size = size
        """Workers of the replica; 1 in a job without replicas."""
        self.position = position

    @classmethod
    def of(cls, config: JobFile, worker: str) -> Replica:
        """The place of a worker in a job with these settings."""
        size = config.workers_per_replica
        return cls(size, number_of(worker) % size if size > 1 else 0)

    def first(self, *values: int) -> list[int]:
        """These numbers as the replica's first worker has them."""
        shared = torch.tensor(values)
        if self.size > 1:
            dist.broadcast(shared, 0, group=_talk())
        return [int(value) for value in shared]

    def largest(self, value: int) -> int:
        """The largest of the replica's values."""
        shared = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=_talk())
        return int(shared)

    def wait(self) -> None:
        """Wait until all workers of the replica are here."""
        self.largest(0)


class _Made:
    """The group and mesh of this process."""

    mesh: DeviceMesh | None = None
    store: Any = None
    talk: dist.ProcessGroup | None = None


def replica_mesh(device: str | None = None) -> DeviceMesh:
    """The mesh on which this worker shares its model with the other workers of its replica.

    Give it to `fully_shard`. Outside of `swell run --replica N` it has this one worker. `device` is "cpu" or
    "cuda"; without it, "cuda" if there is a GPU.
    """
    if _Made.mesh is not None:
        return _Made.mesh
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device: got {device!r}, must be 'cpu' or 'cuda'")
    if dist.is_initialized():
        raise UsageError(
            "swell.replica_mesh: this script called torch.distributed.init_process_group; leave that to swell"
        )
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    place, host, store = Replica(1, 0), "127.0.0.1", distributed.HashStore()
    if directory and worker:
        config = JobDirectory(Path(directory)).config()
        place, host = Replica.of(config, worker), own_host(config)
        if place.size > 1:
            store = NoteStore(Path(directory), replica_of(worker, place.size))
    _Made.store = store
    backend = GLOO
    dist.Backend.register_backend(GLOO, functools.partial(gloo_group, host=host), devices=["cpu", "cuda"])
    if device == "cuda" and _own_devices(store, place):
        backend = "nccl"
    dist.init_process_group(backend, store=store, rank=place.position, world_size=place.size)
    _Made.mesh = init_device_mesh(device, (place.size,), mesh_dim_names=("shard",))
    return _Made.mesh


def has_mesh() -> bool:
    """Whether the script has requested the mesh."""
    return _Made.mesh is not None


def _own_devices(store: Any, place: Replica) -> bool:
    """Whether each worker of the replica has a GPU of its own, which NCCL needs."""
    store.set(f"gpu{place.position}", str(torch.cuda.get_device_properties(0).uuid))
    found = [store.get(f"gpu{position}") for position in range(place.size)]
    return len(set(found)) == len(found) and dist.is_nccl_available()


def _talk() -> dist.ProcessGroup | None:
    """A group for numbers on the host: torch's default one, or one of its own beside NCCL's."""
    if dist.get_backend() == GLOO:
        return None
    if _Made.talk is None:
        _Made.talk = dist.new_group(backend=GLOO)
    return _Made.talk
