"""The hand-over of a job's state to newcomers.

Tensors travel in one of three ways. On one GPU the newcomer maps the source's memory and copies from it: only
for tensors that change in no other way than by a committed step, because the next step needs the newcomer's
vote, and it votes after it has copied. On one host the source copies into shared memory (`staging`), which
the newcomer maps. Between hosts the same memory goes through the sockets of the mesh, less what the newcomer
got in the background (`level`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from swell.train.agent.errors import PeerLost
from swell.train.state import statetree
from swell.train.sync import device, transfer
from swell.train.sync.level import Optimized
from swell.train.sync.mesh import STATE, Header, Mesh
from swell.train.sync.segment import Segment

_KEEP_STAGING_BYTES = 256 << 20
"""Shared memory for a hand-over is kept for the next newcomer up to this size; more is freed."""


class Carrier(Protocol):
    """What a hand-over needs of its job."""

    def capture(self) -> dict[str, Any]:
        """The whole state; its tensors are live ones, not copies."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load a whole state (copying its tensors)."""

    def found(self) -> int:
        """Begin without live state: from the newest checkpoint, or from what the script built. Returns the
        number of the job's next operation."""

    def steady(self) -> dict[str, Tensor]:
        """The tensors of the captured state, by name, that change only when a step is committed.

        A thread may ask while the main thread trains.
        """

    def optimized(self) -> Optimized | None:
        """What only the optimizer changes, if a newcomer can make the optimizer's steps by itself."""


class HandOver:
    """One worker's side of all its hand-overs, as source or as newcomer."""

    def __init__(self, carrier: Carrier, on: torch.device) -> None:
        self._carrier = carrier
        self._device = on
        self._staging: Segment | None = None
        self._mapped: dict[str, device.Mapping] = {}
        """Allocations of sources, by handle."""
        self._gave = False
        self._known: dict[str, tuple[Tensor, list[Any]]] = {}
        """Tensors that were described for a newcomer. They are kept, so that their memory stays theirs."""

    # ------------------------------------------------------------------ before the pause

    def offer(self) -> list[list[Any]] | None:
        """The device memory that holds this worker's state, for a newcomer to map while others train."""
        if self._device.type != "cuda":
            return None
        try:
            direct = self._direct()
        except RuntimeError:  # the main thread was just building the optimizer's state
            return None
        found = {d[0]: d[1] for d in direct.values()}
        return [[handle, size] for handle, size in found.items()]

    def map(self, offered: list[list[Any]] | None) -> None:
        """Map what a source offered."""
        for handle, size in offered or []:
            self._open(str(handle), int(size))

    def prepare(self, mesh: Mesh, state: dict[str, Tensor]) -> None:
        """Allocate the memory for handing this state to newcomers of `mesh`, before a member waits for it."""
        near = all(self.same_device(mesh, rank) for rank in mesh.peers)
        self._allocate(self.staged(state) if near else list(state.values()))

    def _allocate(self, tensors: list[Tensor]) -> None:
        """Allocate the shared memory for a state with these tensors."""
        need = transfer.staged_bytes(transfer.describe(tensors))
        if self._staging is None or self._staging.data_bytes < need:
            segment = Segment.create(need)
            segment.touch()
            self._staging = segment

    def staged(self, named: dict[str, Tensor]) -> list[Tensor]:
        """Those of the state's tensors that need shared memory if newcomers are on this worker's GPU."""
        direct = self._direct()
        return [tensor.detach() for name, tensor in named.items() if name not in direct]

    @property
    def staging(self) -> Header | None:
        """The shared memory as peers open it."""
        return self._staging.describe() if self._staging is not None else None

    def forget(self) -> None:
        """After an operation: free what a hand-over needed, once newcomers have their state."""
        if not self._gave:
            return
        self._gave, self._known = False, {}
        if self._staging is not None and self._staging.data_bytes > _KEEP_STAGING_BYTES:
            transfer.let_go([self._staging])
            self._staging = None

    # ------------------------------------------------------------------ in the pause

    def give(self, mesh: Mesh, to: list[int], far: list[int], level: list[int], operation: int) -> None:
        """Hand this worker's state to the ranks in `to`.

        Memory is not shared with those in `far`. Those in `level` have what the optimizer changes already.
        """
        self._gave = True
        document, named = statetree.split(self._carrier.capture())
        direct = {} if any(not self.same_device(mesh, r) for r in to) else self._direct()
        steady = self._carrier.steady() if level else {}
        needed = {name: tensor.detach() for name, tensor in named.items() if name not in direct}
        tensors = {name: tensor for name, tensor in needed.items() if name not in steady}
        light = len(tensors)
        if set(to) - set(level):
            tensors |= needed
        description = transfer.describe(tensors.values())
        self._allocate(list(tensors.values()))
        assert self._staging is not None
        transfer.copy_all(transfer.staged(description, self._staging), list(tensors.values()))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        message: Header = {
            "document": document,
            "names": list(tensors),
            "tensors": description,
            "direct": direct,
            "segment": self._staging.describe(),
            "operation": operation,
            "through_sockets": far,
            "level": level,
            "light": light,
        }
        answers = mesh.exchange(0, STATE, message)
        if any(answer.get("through_sockets") for answer in answers):
            sizes = {r: transfer.staged_bytes(description[: light if r in level else None]) for r in far}
            mesh.exchange(1, STATE, {}, {r: [self._staging.bytes(0, size)] for r, size in sizes.items()}, {})

    def take(self, mesh: Mesh, source: int, wanted: bool, near: bool, staging: Header | None) -> int | None:
        """Receive the state of `source`, if `wanted` here; returns the number of the present operation."""
        # Map the memory while the source is still copying into it.
        expected = Segment.open(staging) if wanted and near else None
        answers = mesh.exchange(0, STATE, {})
        message = answers[source]
        level = mesh.rank in message["level"]
        count = int(message["light"]) if level else None
        names, description = message["names"][:count], message["tensors"][:count]
        segment: Segment | None = None
        if any(answer.get("through_sockets") for answer in answers):
            sinks: dict[int, list[memoryview]] = {}
            if mesh.rank in message["through_sockets"]:
                size = transfer.staged_bytes(description)
                segment = Segment.create(size)
                sinks = {source: [segment.bytes(0, size)]}
            mesh.exchange(1, STATE, {}, {}, sinks)
        if not wanted:
            return None
        if segment is None and staging is not None and message["segment"]["token"] == staging["token"]:
            segment = expected
        segment = segment or Segment.open(message["segment"])
        if segment is None:
            raise PeerLost(f"the state of {mesh.members[source]} vanished while it was handed over")
        views = dict(self._carrier.steady()) if level else {}
        views |= dict(zip(names, transfer.staged(description, segment)))
        for name, found in message["direct"].items():
            views[name] = self._view(found, mesh.members[source])
        self._carrier.restore(statetree.join(message["document"], views))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        views.clear()
        transfer.let_go([*self._mapped.values(), expected, segment])
        self._mapped = {}
        return int(message["operation"])

    def same_device(self, mesh: Mesh, rank: int) -> bool:
        """Whether that member is on this worker's GPU."""
        theirs = (mesh.peers[rank].about.get("segment") or {}) if rank in mesh.peers else {}
        return self._device.type == "cuda" and theirs.get("gpu") == device.identity(self._device)

    # ------------------------------------------------------------------ device memory

    def _direct(self) -> dict[str, list[Any]]:
        """Tensors that a newcomer may copy from this worker's GPU: handle, size and place of each."""
        out: dict[str, list[Any]] = {}
        known: dict[int, dict[str, Any] | None] = {}
        for name, tensor in self._carrier.steady().items():
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                continue
            kept = self._known.get(name)
            if kept is not None and kept[0].data_ptr() == tensor.data_ptr():
                out[name] = kept[1]
                continue
            found = device.allocation(tensor)
            if found is None:
                continue
            base, size = found
            if base not in known:
                known[base] = device.describe(tensor)
            description = known[base]
            if description is not None:
                shape, dtype = transfer.describe([tensor])[0]
                out[name] = [description["handle"], size, tensor.data_ptr() - base, shape, dtype]
                self._known[name] = (tensor, out[name])
        return out

    def _open(self, handle: str, size: int) -> device.Mapping | None:
        if handle not in self._mapped:
            mapping = device.Mapping.open(handle, size, self._device)
            if mapping is None:
                return None
            self._mapped[handle] = mapping
        return self._mapped[handle]

    def _view(self, found: list[Any], whose: str) -> Tensor:
        handle, size, offset, shape, dtype = found
        mapping = self._open(str(handle), int(size))
        if mapping is None:
            raise PeerLost(f"the device memory of {whose} cannot be mapped")
        numel = 1
        for length in shape:
            numel *= int(length)
        return mapping.tensor(getattr(torch, dtype), int(offset), numel).view(shape)
