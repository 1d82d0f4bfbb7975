"""All-reduce over a mesh, in the three phases of a step: ready, reduced, vote.

Rank r owns slice r of every bucket: it sums that slice over all inputs in the order of a given tree, and the
others copy it. So every element is added by one member only, in one order, and all members have the same
bits. Peers on the same host read each other's segments; for other peers, slices travel with the messages. If
the vectors are small, every member sums all of them, which saves a phase. If there is a process group of
torch (see `groups`), it adds on the devices, between the same ready and vote phases.

No member uses a sum before all members hold it (`voted`): so the survivors of a death can agree on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swell.train.data.plan import Tree
from swell.train.sync.device import DeviceSegment
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Group, Grouping
from swell.train.sync.mesh import READY, REDUCED, VOTE, Header, Mesh
from swell.train.sync.segment import Segment
from swell.train.sync.transfer import let_go

_DIRECT_BYTES = 4 << 20
"""Vectors up to this size in all are summed by every member, which saves a phase."""
_DIRECT_FAR_BYTES = 256 << 10
"""The same where three or more members are on several hosts: there it sends more than slices would."""
_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 26


@dataclass(slots=True)
class Reduced:
    """What one all-reduce gave besides the sum in the output segment."""

    headers: list[Header]
    wait_s: float
    """Seconds until all members were ready: time lost to slower members, not to the network."""
    sync_s: float
    """Seconds from then on: the cost of synchronising."""
    part_squares: list[float] = field(default_factory=list)
    """Squared norm of each rank's input gradients (where asked for)."""
    total_square: float = 0.0


@dataclass(frozen=True, slots=True)
class Norms:
    """How squared norms are taken: of each `stride`-th element (and times `stride`), each times its weight.

    A part of the elements of a large model tells as much as all of them, at a part of the time and memory.
    """

    stride: int = 1
    weights: list[Tensor] | None = None
    """By bucket: the factors of the elements that count."""

    def square(self, flat: Tensor, bucket: int, begin: int, end: int) -> Tensor:
        """The squared norm of a range of a bucket, which begins at a multiple of the stride."""
        part = flat[begin : end : self.stride]
        if self.weights is not None:
            first = begin // self.stride
            part = part * self.weights[bucket][first : first + len(part)]
        if part.dtype not in (torch.float32, torch.float64):
            part = part.float()
        return torch.dot(part, part) * self.stride


class Reducer:
    """Sums flat vectors over the members of a generation."""

    def __init__(self, flat: FlatModel, grouping: Grouping | None = None) -> None:
        self.flat = flat
        self._grouping = grouping
        self._group: Group | None = None
        self._by_group = False
        """Whether the process group makes the next sum: then all members said that it is ready."""
        self.held: int = -1
        """The last operation whose whole sum is in the output."""
        self.result: Reduced | None = None
        self._mesh: Mesh | None = None
        self._remote_in: dict[int, list[Tensor]] = {}
        self._remote_out: dict[int, list[Tensor]] = {}
        self._far: set[int] = set()
        self._maps: dict[str, Segment | DeviceSegment] = {}
        self._prepared: dict[str, Segment | DeviceSegment | None] = {}

    def meet(self, about: Header) -> None:
        """Map the memory of a new peer, in the background while the present members train."""
        description = about.get("segment")
        if description and description["token"] not in (*self._maps, *self._prepared):
            self._prepared[description["token"]] = self.flat.open(description)

    def readable(self, mesh: Mesh) -> list[int]:
        """The ranks whose memory was mapped when they were met."""
        found = []
        for rank, peer in mesh.peers.items():
            token = (peer.about.get("segment") or {}).get("token", "")
            if self._maps.get(token) or self._prepared.get(token):
                found.append(rank)
        return found

    def connect(self, mesh: Mesh, near: set[int]) -> None:
        """Use `mesh` from now on; with the ranks in `near`, each side reads the other's memory."""
        layout = self.flat.layout
        self._mesh = mesh
        if self._group is not None:
            self._group.close()
        self._group = self._grouping.begin(mesh) if self._grouping is not None else None
        self._by_group = False
        self._remote_in = {mesh.rank: self.flat.inputs} if mesh.size > 1 else {}
        self._remote_out, self._far = {}, set()
        maps: dict[str, Segment | DeviceSegment] = {}
        for rank, peer in mesh.peers.items():
            description = peer.about.get("segment")
            token = description["token"] if description else ""
            segment = self._maps.get(token) or self._prepared.get(token)
            if rank not in near or segment is None or description is None:
                self._far.add(rank)
                self._remote_in[rank] = [torch.empty_like(t) for t in self.flat.inputs]
            else:
                maps[token] = segment
                mesh.processes[rank] = int(description["pid"])
                self._remote_in[rank] = layout.flats(segment, 0)
                self._remote_out[rank] = layout.flats(segment, 1)
        let_go([segment for token, segment in self._maps.items() if token not in maps])
        self._maps, self._prepared = maps, {}

    @property
    def way(self) -> str:
        """What makes the sums: the mesh, or the process group's backend."""
        return self._grouping.backend if self._by_group and self._grouping is not None else "mesh"

    def is_far(self, rank: int) -> bool:
        """Whether that member's memory cannot be read from here."""
        return rank in self._far

    def all_reduce(
        self,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        norms: Norms | None = None,
    ) -> Reduced:
        """Sum all members' inputs into every output. `tree` gives the inputs and the order of additions.

        With `norms`, the squared norms of the inputs and of the sum are computed too.
        """
        mesh = self._mesh
        assert mesh is not None
        begin = time.perf_counter()
        self.flat.settle()
        if self._group is not None and self._group.ready:
            header = {**header, "group": True}
        if self._by_group:
            headers = mesh.exchange(operation, READY, header)
            ready = time.perf_counter()
            result = Reduced(headers, ready - begin, 0.0)
            self._sum_by_group(operation, result, bool(header.get("n", 1)), norms)
            return self._agree(operation, result, ready)
        whole = [(0, b.numel) for b in self.flat.layout.buckets]
        limit = _DIRECT_BYTES if mesh.size == 2 or not self._far else _DIRECT_FAR_BYTES
        direct = mesh.size == 1 or self.flat.layout.region_bytes * mesh.size <= limit
        mine = whole if direct else self._slices(mesh.rank)
        sent = {r: _Raw(self.flat.inputs, whole if direct else self._slices(r), True) for r in self._far}
        received = {r: _Raw(self._remote_in[r], mine) for r in self._far}
        headers = mesh.exchange(operation, READY, header, _views(sent), _views(received))
        ready = time.perf_counter()
        for raw in received.values():
            raw.store()
        order = tree(headers)
        squares = self._sum(order, mine, norms)
        if not direct:
            self.flat.settle()
            sent = {r: _Raw(self.flat.outputs, mine, True) for r in self._far}
            received = {r: _Raw(self.flat.outputs, self._slices(r)) for r in self._far}
            said = {"squares": squares} if norms is not None else {}
            answers = mesh.exchange(operation, REDUCED, said, _views(sent), _views(received))
            for raw in received.values():
                raw.store()
            for rank, remote in self._remote_out.items():
                for (low, high), out, source in zip(self._slices(rank), self.flat.outputs, remote):
                    out[low:high].copy_(source[low:high])
            if norms is not None:
                squares = [sum(column) for column in zip(*(a["squares"] for a in answers))]
        result = Reduced(headers, ready - begin, 0.0)
        if norms is not None:
            *result.part_squares, result.total_square = squares
        return self._agree(operation, result, ready)

    def _agree(self, operation: int, result: Reduced, ready_s: float) -> Reduced:
        """Wait until all members have the sum, before any of them uses it."""
        assert self._mesh is not None
        self.flat.settle()
        self.held, self.result = operation, result
        self._mesh.exchange(operation, VOTE, {})
        result.sync_s = time.perf_counter() - ready_s
        # All members have the same headers, so they choose the same way for the next step.
        self._by_group = all(header.get("group") for header in result.headers)
        return result

    def _sum_by_group(self, operation: int, result: Reduced, any_samples: bool, norms: Norms | None) -> None:
        """Let the process group make the sum; the inputs stay as they are."""
        assert self._mesh is not None and self._group is not None
        flat = self.flat
        for out, own in zip(flat.outputs, flat.inputs):
            if any_samples:
                out.copy_(own)
            else:
                out.zero_()
        mine = self._output_square(norms) if norms is not None and any_samples else 0.0
        self._group.add(flat.outputs)
        if norms is not None:
            answers = self._mesh.exchange(operation, REDUCED, {"square": mine})
            result.part_squares = [float(answer["square"]) for answer in answers]
            result.total_square = self._output_square(norms)

    def _output_square(self, norms: Norms) -> float:
        """Squared norm of the gradients in the output."""
        buckets = enumerate(zip(self.flat.layout.buckets, self.flat.outputs))
        return float(sum(norms.square(out, index, 0, bucket.gradients) for index, (bucket, out) in buckets))

    def _slices(self, rank: int) -> list[tuple[int, int]]:
        assert self._mesh is not None
        size = self._mesh.size
        out = []
        for bucket in self.flat.layout.buckets:
            lines = bucket.numel // 16
            low = lines * rank // size * 16
            high = lines * (rank + 1) // size * 16 if rank + 1 < size else bucket.numel
            out.append((low, high))
        return out

    def _sum(self, tree: Tree | None, ranges: list[tuple[int, int]], norms: Norms | None) -> list[float]:
        """Sum `ranges` of each bucket along `tree` into the output; return squared norms if wanted."""
        assert self._mesh is not None
        sums: list[list[Tensor]] = [[] for _ in range(self._mesh.size + 1)]
        leaves = _leaves(tree)
        chunk = _CHUNK if self.flat.device.type == "cpu" else _DEVICE_CHUNK
        for index, (bucket, (low, high)) in enumerate(zip(self.flat.layout.buckets, ranges)):
            out = self.flat.outputs[index]
            if tree is None:
                out[low:high].zero_()
                continue
            if isinstance(tree, int) and tree == self._mesh.rank and norms is None:
                out[low:high].copy_(self.flat.inputs[index][low:high])
                continue
            scratch: list[Tensor] = []
            for begin in range(low, high, chunk):
                end = min(begin + chunk, high)
                into = out[begin:end]
                self._add(tree, index, begin, end, into, scratch, 0)
                if norms is not None and begin < bucket.gradients:
                    stop = min(end, bucket.gradients)
                    for rank in leaves:
                        sums[rank].append(norms.square(self._remote_in[rank][index], index, begin, stop))
                    sums[-1].append(norms.square(out, index, begin, stop))
        return [float(torch.stack(parts).double().sum()) if parts else 0.0 for parts in sums]

    def _add(
        self, tree: Tree, bucket: int, begin: int, end: int, into: Tensor, scratch: list[Tensor], depth: int
    ) -> None:
        """Write the sum of `tree` over [begin, end) into `into`; right subtrees that are sums use scratch."""
        if isinstance(tree, int):
            into.copy_(self._remote_in[tree][bucket][begin:end])
            return
        left, right = tree
        if isinstance(left, int):
            a = self._remote_in[left][bucket][begin:end]
        else:
            self._add(left, bucket, begin, end, into, scratch, depth)
            a = into
        if isinstance(right, int):
            b = self._remote_in[right][bucket][begin:end]
        else:
            if len(scratch) <= depth:
                scratch.append(torch.empty_like(into))
            b = scratch[depth][: end - begin]
            self._add(right, bucket, begin, end, b, scratch, depth + 1)
        torch.add(a, b, out=into)


def _leaves(tree: Tree | None) -> list[int]:
    if tree is None:
        return []
    if isinstance(tree, int):
        return [tree]
    return _leaves(tree[0]) + _leaves(tree[1])


def _views(raws: dict[int, _Raw]) -> dict[int, list[memoryview]]:
    return {rank: raw.views for rank, raw in raws.items()}


class _Raw:
    """Ranges of tensors as raw memory of the host, to be sent (`filled`) or to be received and stored."""

    def __init__(self, tensors: list[Tensor], ranges: list[tuple[int, int]], filled: bool = False) -> None:
        self._parts = [t[a:b] for t, (a, b) in zip(tensors, ranges) if b > a]
        on_host = all(part.device.type == "cpu" for part in self._parts)
        self._host = self._parts
        if not on_host:
            self._host = [p.cpu() if filled else torch.empty_like(p, device="cpu") for p in self._parts]
        self.views = [memoryview(part.view(torch.uint8).numpy().data) for part in self._host]

    def store(self) -> None:
        """Put what was received where it belongs."""
        for part, host in zip(self._parts, self._host):
            if part is not host:
                part.copy_(host)
