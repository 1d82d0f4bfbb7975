"""Sums on the workers' own devices, by torch.distributed: NCCL between GPUs.

The mesh of sockets and shared memory works everywhere and at once, so every generation begins with it. If
each member has its own GPU, a process group of torch is built in the background at the same time. It takes
over the sums once the step headers of all members say that it is ready; no switch and no recovery waits for
it. The mesh still decides who is a member, whether a step counts and who died: a group only adds.

The members of a group find each other by notes that the coordinator keeps (`notes`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swell.train.agent.errors import PeerLost, UsageError
from swell.train.agent.jobdir import own_host
from swell.train.sync.adding import Norms
from swell.train.sync.flat import FlatModel
from swell.train.sync.mesh import REDUCED, Header, Mesh
from swell.train.sync.notes import NoteStore

log = logging.getLogger(__name__)

BACKENDS = ("auto", "mesh", "nccl", "gloo")
"""Values of the setting `collectives`; auto means NCCL if every member has its own GPU, else the mesh."""
_BUILD_S = 120.0
_LOOK_EVERY_S = 0.01
_POLL_S = 0.0001
_MOST_FAILURES = 3
"""After this many groups broke although no member died, the job does without groups."""


@dataclass(slots=True)
class Grouping:
    """How the groups of a job are made."""

    backend: str
    directory: Path
    host: str
    device: torch.device
    failures: int = 0

    @classmethod
    def of(cls, config: Header, directory: Path, device: torch.device, mode: str) -> Grouping | None:
        """The grouping of a job with these settings; None if the job always sums through the mesh."""
        backend = os.environ.get("SWELL_COLLECTIVES") or str(config.get("collectives", "auto"))
        if backend not in BACKENDS:
            raise UsageError(f"collectives: got {backend!r}, must be one of {', '.join(BACKENDS)}")
        if backend == "mesh" or mode == "consistent":  # consistent mode needs one order of additions
            return None
        if backend != "gloo" and not (device.type == "cuda" and torch.distributed.is_nccl_available()):
            return None
        backend = "gloo" if backend == "gloo" else "nccl"
        return cls(backend, directory, own_host(config), device)

    def about(self) -> str:
        """What must differ between members: the GPU for NCCL, the process for gloo."""
        if self.backend == "gloo":
            return f"{socket.gethostname()}:{os.getpid()}"
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def begin(self, mesh: Mesh) -> Group | None:
        """Build the group of a generation in the background; None if the generation has no group."""
        devices = [peer.about.get("device") for peer in mesh.peers.values()] + [self.about()]
        alone = mesh.size == 1 or None in devices or len(set(devices)) < len(devices)
        return None if alone or self.failures >= _MOST_FAILURES else Group(self, mesh)


class Group:
    """The process group of one generation."""

    def __init__(self, grouping: Grouping, mesh: Mesh) -> None:
        self._grouping = grouping
        self._mesh = mesh
        self._store = NoteStore(grouping.directory, f"g{mesh.number}")
        self._group: Any = None
        self._closed = False
        threading.Thread(target=self._build, name="swell-group", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether the group is built and can add."""
        return self._group is not None

    def add(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over all members, in place; PeerLost if a member is gone."""
        try:
            works = [self._group.allreduce([tensor]) for tensor in tensors]
            looked_s = time.monotonic()
            while not all(work.is_completed() for work in works):
                if time.monotonic() - looked_s > _LOOK_EVERY_S:
                    self._mesh.look()
                    looked_s = time.monotonic()
                time.sleep(_POLL_S)
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._broke(error)

    def close(self) -> None:
        """Abandon the group, without waiting for members that still wait in it."""
        self._closed = True
        self._store.close()
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="swell-group-end", daemon=True).start()

    def _broke(self, error: RuntimeError) -> None:
        """Find the reason of a failed sum: most likely a member died, and its connection ends in a moment."""
        give_up_s = time.monotonic() + 1.0
        while time.monotonic() < give_up_s:
            self._mesh.look()
            time.sleep(_LOOK_EVERY_S)
        self._grouping.failures += 1
        log.warning("the process group of generation %d broke: %s", self._mesh.number, error)
        raise PeerLost(f"the process group of generation {self._mesh.number} broke") from None

    def _build(self) -> None:
        try:
            group = _make(self._grouping, self._mesh, self._store)
            # The connections are made by the first sum.
            group.allreduce([torch.zeros(1, device=self._grouping.device)]).wait()
        except (RuntimeError, OSError) as error:
            if not self._closed:
                self._grouping.failures += 1
                log.warning("generation %d sums through the mesh: %s", self._mesh.number, error)
            return
        finally:
            self._store.close()
        self._group = group
        if self._closed:
            self.close()


class GroupSums:
    """Sums by the process group of the present generation, from the step on in which all members have it."""

    def __init__(self, grouping: Grouping | None) -> None:
        self._grouping = grouping
        self._group: Group | None = None
        self.adds_next = False
        """Whether the process group makes the next sum: then all members said that it is ready."""

    @property
    def way(self) -> str:
        """What makes the next sum: the mesh, or the process group's backend."""
        return self._grouping.backend if self.adds_next and self._grouping is not None else "mesh"

    def connect(self, mesh: Mesh) -> None:
        """Leave the group of the last generation, and have that of `mesh` built."""
        if self._group is not None:
            self._group.close()
        self._group = self._grouping.begin(mesh) if self._grouping is not None else None
        self.adds_next = False

    def tell(self, header: Header) -> Header:
        """The header of a step with what this member says of its group."""
        return {**header, "group": True} if self._group is not None and self._group.ready else header

    def decide(self, headers: list[Header]) -> None:
        """Choose what makes the next sum. All members have the same headers, so they choose the same."""
        self.adds_next = all(header.get("group") for header in headers)

    def add(
        self, flat: FlatModel, mesh: Mesh, operation: int, any_samples: bool, norms: Norms | None
    ) -> list[float]:
        """Sum all members' inputs into every output; the inputs stay as they are.

        With `norms`, returns the squared norms of each rank's gradients, and last that of their sum.
        """
        assert self._group is not None
        for out, own in zip(flat.outputs, flat.inputs):
            if any_samples:
                out.copy_(own)
            else:
                out.zero_()
        mine = _output_square(flat, norms) if norms is not None and any_samples else 0.0
        self._group.add(flat.outputs)
        if norms is None:
            return []
        answers = mesh.exchange(operation, REDUCED, {"square": mine})
        return [*(float(answer["square"]) for answer in answers), _output_square(flat, norms)]


def _output_square(flat: FlatModel, norms: Norms) -> float:
    """Squared norm of the gradients in the output."""
    buckets = enumerate(zip(flat.layout.buckets, flat.outputs))
    return float(sum(norms.square(out, index, 0, bucket.gradients) for index, (bucket, out) in buckets))


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    """A process group of gloo's that listens on the address of this worker's host, and on no other."""
    dist: Any = torch.distributed
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make(grouping: Grouping, mesh: Mesh, store: NoteStore) -> Any:
    dist: Any = torch.distributed
    timeout = timedelta(seconds=_BUILD_S)
    store.set_timeout(timeout)
    if grouping.backend == "gloo":
        return gloo_group(store, mesh.rank, mesh.size, timeout, grouping.host)
    # A lost member is noticed by the mesh; torch's own watchdog would end this process with it.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    return dist.ProcessGroupNCCL(store, mesh.rank, mesh.size, dist.ProcessGroupNCCL.Options())
