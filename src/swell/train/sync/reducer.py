"""All-reduce over a mesh, in the phases of a step: ready, pieces, vote.

Every element is added by one member only, or by all of them in one order (the order of a given tree), so all
members have the same bits. Peers on the same host read each other's segments; for other peers, vectors travel
with the messages (`memory`). If the vectors are small, every member sums all of them, in one exchange.
Otherwise rank r sums part r of every piece, and the sums begin while backward still runs (`reduction`). If
there is a process group of torch (`groups`), it adds on the devices, between the same ready and vote phases.

No member uses a sum before all members hold it (`_agree`): so the survivors of a death can agree on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from swell.train.data.plan import Tree
from swell.train.sync.adding import Adder, Norms, views
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Grouping, GroupSums
from swell.train.sync.memory import MemberMemory
from swell.train.sync.mesh import READY, VOTE, Header, Mesh
from swell.train.sync.pieces import Stretch
from swell.train.sync.reduction import PieceSums, Reduced, Reduction

__all__ = ["Norms", "Reduced", "Reducer"]

_DIRECT_BYTES = 4 << 20
"""Vectors up to this size in all are summed by every member, in one exchange."""
_DIRECT_PAIR_BYTES = 1 << 20
"""The same of two members on two hosts. In pieces both begin to send at the same time; in one exchange a slow
network takes longer for what the member sends that begins later (measured at 1 Gbit/s)."""
_DIRECT_FAR_BYTES = 256 << 10
"""The same where three or more members are on several hosts: there it sends more than parts would."""


class Reducer:
    """Sums flat vectors over the members of a generation."""

    def __init__(self, flat: FlatModel, grouping: Grouping | None = None) -> None:
        self.flat = flat
        self.memory = MemberMemory(flat)
        self.held: int = -1
        """The last operation whose whole sum is in the output."""
        self.result: Reduced | None = None
        self.adder = Adder(flat, {}, 0, 1)
        self.in_pieces: PieceSums | None = None
        """How large vectors are summed; None if every member sums all of them, in one exchange."""
        self._groups = GroupSums(grouping)
        self._mesh: Mesh | None = None
        self._adding = ThreadPoolExecutor(1, "swell-add")
        """A thread that adds a piece while the next one is on its way; it lives as long as this worker."""

    def connect(self, mesh: Mesh, near: set[int], apart: bool | None = None) -> None:
        """Use `mesh` from now on; `near` and `apart` are those of `MemberMemory.connect`."""
        self._mesh = mesh
        self._groups.connect(mesh)
        self.memory.connect(mesh, near, apart)
        self.adder = Adder(self.flat, self.memory.inputs_of, mesh.rank, mesh.size)
        self.in_pieces = None
        if not self._direct(mesh.size):
            self.in_pieces = PieceSums(mesh, self.memory, self.adder, self._adding)

    def _direct(self, size: int) -> bool:
        """Whether every one of `size` members sums all of the vectors, in one exchange."""
        far_limit = _DIRECT_PAIR_BYTES if size == 2 else _DIRECT_FAR_BYTES
        limit = far_limit if self.memory.apart else _DIRECT_BYTES
        return size == 1 or self.flat.sharded or self.flat.layout.region_bytes * size <= limit

    @property
    def way(self) -> str:
        """What makes the sums: the mesh, or the process group's backend."""
        return self._groups.way

    @property
    def early_now(self) -> bool:
        """Whether the next sum can begin while backward runs."""
        return self.in_pieces is not None and self.in_pieces.early and not self._groups.adds_next

    def begin(
        self,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        norms: Norms | None = None,
    ) -> Reduction:
        """Begin to sum in a thread, while backward computes; only if `early_now`."""
        assert self.in_pieces is not None
        header = self._groups.tell(header)
        reduction = Reduction(self.in_pieces, operation, header, tree, norms, self._agree)
        reduction.start()
        return reduction

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
        begin, header = time.perf_counter(), self._groups.tell(header)
        if self.in_pieces is not None and not self._groups.adds_next:
            reduction = Reduction(self.in_pieces, operation, header, tree, norms, self._agree)
            reduction.complete({})
            return reduction.result()
        mesh = self._mesh
        assert mesh is not None
        if self._groups.adds_next:
            headers = mesh.exchange(operation, READY, header)
            ready = time.perf_counter()
            squares = self._groups.add(self.flat, mesh, operation, bool(header.get("n", 1)), norms)
        else:
            whole = tuple(Stretch(i, 0, b.numel) for i, b in enumerate(self.flat.layout.buckets))
            sent, received = self.memory.inputs(whole)
            ways = (views(sent), views(received)) if self.memory.apart else (None, None)
            headers = mesh.exchange(operation, READY, header, *ways)
            ready = time.perf_counter()
            for (raw,) in received.values():
                raw.store()
            squares = self.adder.add(tree(headers), whole, norms)
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
        self._groups.decide(result.headers)
        return result
