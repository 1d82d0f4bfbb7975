"""All-reduce over a mesh, in the three phases of a step: ready, reduced, vote.

Rank r owns slice r of every bucket: it sums that slice over all inputs in the order of a given tree, and the
others copy it. So every element is added by one member only, in one order, and all members have the same
bits. Peers on the same host read each other's segments; for other peers, slices travel with the messages. If
the vectors are small, every member sums all of them, which saves a phase. If there is a process group of
torch (see `groups`), it adds on the devices, between the same ready and vote phases.

No member uses a sum before all members hold it (`voted`): so the survivors of a death can agree on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swell.train.data.plan import Tree
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Group, Grouping
from swell.train.sync.mesh import READY, REDUCED, VOTE, Header, Mesh
from swell.train.sync.segment import Segment

_DIRECT_BYTES = 4 << 20
_CHUNK = 1 << 17
_LET_GO_AFTER_S = 1.0


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


class Reducer:
    """Sums flat vectors over the members of a generation."""

    def __init__(self, flat: FlatModel, grouping: Grouping | None = None) -> None:
        self.flat = flat
        self._grouping = grouping
        self._group: Group | None = None
        self.held: int = -1
        """The last operation whose whole sum is in the output segment."""
        self.result: Reduced | None = None
        self._mesh: Mesh | None = None
        self._remote_in: dict[int, list[Tensor]] = {}
        self._remote_out: dict[int, list[Tensor]] = {}
        self._far: set[int] = set()
        self._maps: dict[str, Segment] = {}
        self._prepared: dict[str, Segment | None] = {}

    def prepare(self, mesh: Mesh) -> None:
        """Map the segments of new members in the background, while the present members train."""
        for peer in mesh.peers.values():
            description = peer.about.get("segment")
            if description and description["token"] not in self._maps:
                self._prepared[description["token"]] = Segment.open(description)

    def connect(self, mesh: Mesh) -> None:
        """Use `mesh` from now on; map the segments of members on this host."""
        layout = self.flat.layout
        self._mesh = mesh
        if self._group is not None:
            self._group.close()
        self._group = self._grouping.begin(mesh) if self._grouping is not None else None
        self.flat.direct = False
        self._remote_in = {mesh.rank: self.flat.inputs}
        self._remote_out, self._far = {}, set()
        maps: dict[str, Segment] = {}
        for rank, peer in mesh.peers.items():
            description = peer.about.get("segment")
            token = description["token"] if description else ""
            segment = self._maps.get(token) or self._prepared.get(token)
            if segment is None and token not in self._prepared:
                segment = Segment.open(description)
            if segment is None or description is None:
                self._far.add(rank)
                self._remote_in[rank] = [torch.empty_like(t) for t in self.flat.inputs]
            else:
                maps[token] = segment
                mesh.processes[rank] = int(description["pid"])
                self._remote_in[rank] = layout.flats(segment, 0)
                self._remote_out[rank] = layout.flats(segment, 1)
        _let_go([segment for token, segment in self._maps.items() if token not in maps])
        self._maps, self._prepared = maps, {}

    @property
    def way(self) -> str:
        """What makes the sums: the mesh, or the process group's backend."""
        return self._grouping.backend if self.flat.direct and self._grouping is not None else "mesh"

    def is_far(self, rank: int) -> bool:
        """Whether that member's memory cannot be read from here."""
        return rank in self._far

    def all_reduce(
        self,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        squares: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Reduced:
        """Sum all members' inputs into every output. `tree` gives the inputs and the order of additions.

        With `squares`, the squared norms of the inputs and of the sum are computed too; gradients are
        multiplied by `weights` (one flat tensor for each bucket) before, if given.
        """
        mesh = self._mesh
        assert mesh is not None
        begin = time.perf_counter()
        if self._group is not None and self._group.ready:
            header = {**header, "group": True}
        if self.flat.direct:
            headers = mesh.exchange(operation, READY, header)
            ready = time.perf_counter()
            result = Reduced(headers, ready - begin, 0.0)
            self._sum_on_devices(operation, result, bool(header.get("n", 1)), squares, weights)
            return self._agree(operation, result, ready)
        whole = [(0, b.numel) for b in self.flat.layout.buckets]
        direct = mesh.size == 1 or self.flat.layout.region_bytes * mesh.size <= _DIRECT_BYTES
        mine = whole if direct else self._slices(mesh.rank)
        headers = mesh.exchange(
            operation,
            READY,
            header,
            {r: _raw(self.flat.inputs, whole if direct else self._slices(r)) for r in self._far},
            {r: _raw(self._remote_in[r], mine) for r in self._far},
        )
        ready = time.perf_counter()
        order = tree(headers)
        squares_here = self._sum(order, mine, squares, weights)
        if not direct:
            answers = mesh.exchange(
                operation,
                REDUCED,
                {"squares": squares_here} if squares else {},
                {r: _raw(self.flat.outputs, mine) for r in self._far},
                {r: _raw(self.flat.outputs, self._slices(r)) for r in self._far},
            )
            for rank, remote in self._remote_out.items():
                for (low, high), out, source in zip(self._slices(rank), self.flat.outputs, remote):
                    out[low:high].copy_(source[low:high])
            if squares:
                squares_here = [sum(column) for column in zip(*(a["squares"] for a in answers))]
        result = Reduced(headers, ready - begin, 0.0)
        if squares:
            *result.part_squares, result.total_square = squares_here
        self.flat.summed_on_device = False
        return self._agree(operation, result, ready)

    def _agree(self, operation: int, result: Reduced, ready_s: float) -> Reduced:
        """Wait until all members have the sum, before any of them uses it."""
        assert self._mesh is not None
        self.held, self.result = operation, result
        self._mesh.exchange(operation, VOTE, {})
        result.sync_s = time.perf_counter() - ready_s
        # All members have the same headers, so they choose the same way for the next step.
        self.flat.direct = all(header.get("group") for header in result.headers)
        return result

    def _sum_on_devices(
        self, operation: int, result: Reduced, any_samples: bool, squares: bool, weights: list[Tensor] | None
    ) -> None:
        """Let the process group make the sum; the inputs stay as they are."""
        assert self._mesh is not None and self._group is not None
        flat = self.flat
        for out, own in zip(flat.device_outputs, flat.device_inputs):
            if any_samples:
                out.copy_(own)
            else:
                out.zero_()
        # Set before anything can fail, because from here on the output segment does not hold the sum.
        flat.summed_on_device = True
        mine = self._square_on_device(weights) if squares and any_samples else 0.0
        self._group.add(flat.device_outputs)
        if squares:
            answers = self._mesh.exchange(operation, REDUCED, {"square": mine})
            result.part_squares = [float(answer["square"]) for answer in answers]
            result.total_square = self._square_on_device(weights)

    def _square_on_device(self, weights: list[Tensor] | None) -> float:
        """Squared norm of the gradients (times `weights`) in the device's output."""
        total = 0.0
        for index, (bucket, out) in enumerate(zip(self.flat.layout.buckets, self.flat.device_outputs)):
            weight = None if weights is None else weights[index][: bucket.gradients].to(out.device)
            total += _square(out[: bucket.gradients], weight)
        return total

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

    def _sum(
        self,
        tree: Tree | None,
        ranges: list[tuple[int, int]],
        squares: bool,
        weights: list[Tensor] | None,
    ) -> list[float]:
        """Sum `ranges` of each bucket along `tree` into the output; return squared norms if wanted."""
        assert self._mesh is not None
        sums = [0.0] * (self._mesh.size + 1)
        leaves = _leaves(tree)
        for index, (bucket, (low, high)) in enumerate(zip(self.flat.layout.buckets, ranges)):
            out = self.flat.outputs[index]
            if tree is None:
                out[low:high].zero_()
                continue
            if isinstance(tree, int) and tree == self._mesh.rank and not squares:
                out[low:high].copy_(self.flat.inputs[index][low:high])
                continue
            scratch: list[Tensor] = []
            for begin in range(low, high, _CHUNK):
                end = min(begin + _CHUNK, high)
                into = out[begin:end]
                self._add(tree, index, begin, end, into, scratch, 0)
                if squares and begin < bucket.gradients:
                    stop = min(end, bucket.gradients)
                    weight = None if weights is None else weights[index][begin:stop]
                    for rank in leaves:
                        sums[rank] += _square(self._remote_in[rank][index][begin:stop], weight)
                    sums[-1] += _square(out[begin:stop], weight)
        return sums

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
                scratch.append(torch.empty(_CHUNK, dtype=into.dtype))
            b = scratch[depth][: end - begin]
            self._add(right, bucket, begin, end, b, scratch, depth + 1)
        torch.add(a, b, out=into)


def _let_go(segments: list[Segment]) -> None:
    """Unmap the memory of members that are gone, but later, so that the next step does not wait for it."""
    if segments:
        timer = threading.Timer(_LET_GO_AFTER_S, segments.clear)
        timer.daemon = True
        timer.start()


def _leaves(tree: Tree | None) -> list[int]:
    if tree is None:
        return []
    if isinstance(tree, int):
        return [tree]
    return _leaves(tree[0]) + _leaves(tree[1])


def _square(tensor: Tensor, weight: Tensor | None) -> float:
    if weight is not None:
        tensor = tensor * weight
    if tensor.dtype in (torch.float32, torch.float64):
        return float(torch.dot(tensor, tensor))
    wide = tensor.float()
    return float(torch.dot(wide, wide))


def _raw(tensors: list[Tensor], ranges: list[tuple[int, int]]) -> list[memoryview]:
    return [memoryview(t[a:b].view(torch.uint8).numpy().data) for t, (a, b) in zip(tensors, ranges) if b > a]
