"""All-reduce over a mesh, in the phases of a step: ready, pieces, vote.

Every element is added by one member only, or by all of them in one order (the order of a given tree), so all
members have the same bits. Peers on the same host read each other's segments; for other peers, vectors travel
with the messages. If the vectors are small, every member sums all of them, in one exchange. Otherwise rank r
sums part r of every piece, and the sums begin while backward still runs (see `reduction`). If there is a
process group of torch (see `groups`), it adds on the devices, between the same ready and vote phases.

No member uses a sum before all members hold it (`voted`): so the survivors of a death can agree on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from swell.train.data.plan import Tree
from swell.train.sync import pieces
from swell.train.sync.adding import Adder, Norms, Raw, views
from swell.train.sync.device import DeviceSegment
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Group, Grouping
from swell.train.sync.mesh import READY, REDUCED, VOTE, Header, Mesh
from swell.train.sync.pieces import Piece, Release, Stretch
from swell.train.sync.reduction import Reduced, Reduction
from swell.train.sync.segment import Segment
from swell.train.sync.transfer import let_go

__all__ = ["Norms", "Reduced", "Reducer"]

_DIRECT_BYTES = 4 << 20
"""Vectors up to this size in all are summed by every member, in one exchange."""
_DIRECT_PAIR_BYTES = 1 << 20
"""The same of two members on two hosts. In pieces both begin to send at the same time; in one exchange a slow
network takes longer for what the member sends that begins later (measured at 1 Gbit/s)."""
_DIRECT_FAR_BYTES = 256 << 10
"""The same where three or more members are on several hosts: there it sends more than parts would."""
_PIECES, _PIECES_APART = 3, 8
"""Pieces of a large model on one host and on several: an exchange costs processor time, a network waits."""


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
        self.inputs_of: dict[int, list[Tensor]] = {}
        """The members' vectors by rank: shared memory, or where those of members on other hosts arrive."""
        self.outputs_of: dict[int, list[Tensor]] = {}
        """The sums of the members whose memory can be read."""
        self.far: set[int] = set()
        """The members whose memory cannot be read from here."""
        self.apart = False
        """Whether any two members cannot read each other's memory; the same on all members."""
        self.pieces: list[Piece] = []
        self.early = False
        """Whether sums can begin while backward runs: those of several members, of a large model, on CPUs."""
        self.adder = Adder(flat, {}, 0, 1)
        self._mesh: Mesh | None = None
        self._direct = True
        self._release: Release | None = None
        self._maps: dict[str, Segment | DeviceSegment] = {}
        """By token: the memory of the present members."""
        self._prepared: dict[str, tuple[int, Segment | DeviceSegment]] = {}
        """By token: the latest candidate that a worker was met for, and its memory."""
        self._places: list[list[Tensor]] = []
        """Memory where the vectors of further members on other hosts can arrive."""
        self._unreadable = (0, 0)
        """A candidate, and how many of its members were met so far whose memory cannot be read."""
        self._meeting = threading.Lock()
        self._adding: ThreadPoolExecutor | None = None

    @property
    def adding(self) -> ThreadPoolExecutor:
        """A thread that adds a piece while the next one is on its way; it lives as long as this worker."""
        if self._adding is None:
            self._adding = ThreadPoolExecutor(1, "swell-add")
        return self._adding

    def meet(self, about: Header, candidate: int = 0) -> None:
        """Prepare for a member of `candidate`, in the background while the present members train.

        Its memory is mapped; if that cannot be done, there will be memory here for what it sends.
        """
        if about.get("position", 0) != self.flat.position:
            return  # it has another part of the model
        description = about.get("segment")
        token = description["token"] if description else ""
        segment = self._known(token) or self.flat.open(description)
        if segment is not None:
            self._prepared[token] = (candidate, segment)
            return
        with self._meeting:
            number, count = self._unreadable
            count = count + 1 if number == candidate else 1
            self._unreadable = (candidate, count)
            if count > len(self.far) + len(self._places):
                place = self._new_place()
                for vector in place:
                    vector.zero_()  # no exchange has to wait for its pages
                self._places.append(place)

    def _known(self, token: str) -> Segment | DeviceSegment | None:
        """The memory with this token, if it is mapped."""
        return self._maps.get(token) or self._prepared.get(token, (0, None))[1]

    def _new_place(self) -> list[Tensor]:
        return [torch.empty_like(vector) for vector in self.flat.inputs]

    def readable(self, mesh: Mesh) -> list[int]:
        """The ranks whose memory was mapped when they were met."""
        found = []
        for rank, peer in mesh.peers.items():
            token = (peer.about.get("segment") or {}).get("token", "")
            if self._known(token):
                found.append(rank)
        return found

    def connect(self, mesh: Mesh, near: set[int], apart: bool | None = None) -> None:
        """Use `mesh` from now on; with the ranks in `near`, each side reads the other's memory.

        `apart`: whether any two members cannot read each other's memory; all members must say the same.
        """
        self._mesh = mesh
        if self._group is not None:
            self._group.close()
        self._group = self._grouping.begin(mesh) if self._grouping is not None else None
        self._by_group = False
        self._map(mesh, near)
        if apart is None:
            apart = bool(self.far)
        self.apart = apart
        layout, on_cpu = self.flat.layout, self.flat.device.type == "cpu"
        far_limit = _DIRECT_PAIR_BYTES if mesh.size == 2 else _DIRECT_FAR_BYTES
        limit = far_limit if apart else _DIRECT_BYTES
        self._direct = mesh.size == 1 or self.flat.sharded or layout.region_bytes * mesh.size <= limit
        self.early = not self._direct and on_cpu
        self.adder = Adder(self.flat, self.inputs_of, mesh.rank, mesh.size)
        if not self._direct:
            count = 1 if not on_cpu else _PIECES_APART if apart else _PIECES
            self.pieces = pieces.cut(layout, count)
            self._release = Release(layout, self.pieces, list(self.flat.parameters))

    def _map(self, mesh: Mesh, near: set[int]) -> None:
        """Find the memory of each member: its own, if that was mapped when it was met, or a place here."""
        layout = self.flat.layout
        places = [self.inputs_of[rank] for rank in self.far] + self._places
        self.inputs_of = {mesh.rank: self.flat.inputs} if mesh.size > 1 else {}
        self.outputs_of, self.far, self._places = {}, set(), []
        maps: dict[str, Segment | DeviceSegment] = {}
        for rank, peer in mesh.peers.items():
            if (rank - mesh.rank) % self.flat.stride:
                continue  # it has another part of the model
            description = peer.about.get("segment")
            token = description["token"] if description else ""
            segment = self._known(token)
            if rank not in near or segment is None or description is None:
                self.far.add(rank)
                self.inputs_of[rank] = places.pop() if places else self._new_place()
            else:
                maps[token] = segment
                mesh.processes[rank] = int(description["pid"])
                self.inputs_of[rank] = layout.flats(segment, 0)
                self.outputs_of[rank] = layout.flats(segment, 1)
        prepared = dict(self._prepared)
        later = {token: one for token, one in prepared.items() if one[0] > mesh.number}
        before = {token: segment for token, (_, segment) in prepared.items()} | self._maps
        # What is freed here would be unmapped while all members wait.
        let_go([*(segment for token, segment in before.items() if token not in maps | later), *places])
        self._maps, self._prepared = maps, later

    @property
    def way(self) -> str:
        """What makes the sums: the mesh, or the process group's backend."""
        return self._grouping.backend if self._by_group and self._grouping is not None else "mesh"

    def is_far(self, rank: int) -> bool:
        """Whether that member's memory cannot be read from here."""
        return rank in self.far

    def begin(
        self,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        norms: Norms | None = None,
    ) -> Reduction:
        """Begin to sum in a thread, while backward computes; only if `early_now`."""
        reduction = self._reduction(operation, header, tree, norms)
        reduction.start()
        return reduction

    @property
    def early_now(self) -> bool:
        """Whether the next sum can begin while backward runs."""
        return self.early and not self._by_group

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
        self.flat.settle()
        if not self._direct and not self._by_group:
            reduction = self._reduction(operation, header, tree, norms)
            reduction.complete({})
            return reduction.result()
        mesh = self._mesh
        assert mesh is not None
        begin, header = time.perf_counter(), self._with_group(header)
        if self._by_group:
            headers = mesh.exchange(operation, READY, header)
            ready = time.perf_counter()
            result = Reduced(headers, ready - begin, 0.0)
            self._sum_by_group(operation, result, bool(header.get("n", 1)), norms)
            return self.agree(operation, result, ready)
        whole = tuple(Stretch(i, 0, b.numel) for i, b in enumerate(self.flat.layout.buckets))
        sent = {rank: [Raw(self.flat.inputs, whole, True)] for rank in self.far}
        received = {rank: [Raw(self.inputs_of[rank], whole)] for rank in self.far}
        ways = (views(sent), views(received)) if self.apart else (None, None)
        headers = mesh.exchange(operation, READY, header, *ways)
        ready = time.perf_counter()
        for (raw,) in received.values():
            raw.store()
        squares = self.adder.add(tree(headers), whole, norms)
        result = Reduced(headers, ready - begin, 0.0)
        if norms is not None:
            *result.part_squares, result.total_square = squares
        return self.agree(operation, result, ready)

    def agree(self, operation: int, result: Reduced, ready_s: float) -> Reduced:
        """Wait until all members have the sum, before any of them uses it."""
        assert self._mesh is not None
        self.flat.settle()
        self.held, self.result = operation, result
        self._mesh.exchange(operation, VOTE, {})
        result.sync_s = time.perf_counter() - ready_s
        # All members have the same headers, so they choose the same way for the next step.
        self._by_group = all(header.get("group") for header in result.headers)
        return result

    def _reduction(
        self,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        norms: Norms | None,
    ) -> Reduction:
        assert self._mesh is not None and self._release is not None
        header = self._with_group(header)
        return Reduction(self, self._mesh, self._release, operation, header, tree, norms)

    def _with_group(self, header: Header) -> Header:
        return {**header, "group": True} if self._group is not None and self._group.ready else header

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
