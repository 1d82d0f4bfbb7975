"""The sum of a step: where the members' vectors are, how they are added, and who adds them.

On one host members read each other's shared memory; between hosts pieces travel through the mesh; between
GPUs a process group of torch's adds. A sum is complete when all have voted for it (docs/how/runtime.md).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from swell.train.agent.errors import PeerLost, TrainError, UsageError
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.protocol import JobFile, NotesFound, NotesHello, ReadNotes, WriteNotes, read
from swell.train.agent.wire import Connection, Message, WireError
from swell.train.data.plan import Tree
from swell.train.sync.memory import DeviceSegment, FlatModel, Segment, let_go
from swell.train.sync.mesh import PIECE, READY, REDUCED, VOTE, Header, Mesh
from swell.train.sync.pieces import Adder, Norms, Piece, Raw, Release, Stretch, cut, part, views

Travel = tuple[dict[int, list[Raw]], dict[int, list[Raw]]]
"""By rank of a member on another host: what is sent to it, and what is received from it."""


class MemberMemory:
    """The memory of the members of a generation, and of workers that may be in the next one."""

    def __init__(self, flat: FlatModel) -> None:
        self.flat = flat
        self.inputs_of: dict[int, list[Tensor]] = {}
        """The members' vectors by rank: shared memory, or where those of members on other hosts arrive."""
        self.outputs_of: dict[int, list[Tensor]] = {}
        """The sums of the members whose memory can be read."""
        self.far: set[int] = set()
        """The members whose memory cannot be read from here."""
        self.apart = False
        """Whether any two members cannot read each other's memory; the same on all members."""
        self._maps: dict[str, Segment | DeviceSegment] = {}
        """By token: the memory of the present members."""
        self._prepared: dict[str, tuple[int, Segment | DeviceSegment]] = {}
        """By token: the latest candidate that a worker was met for, and its memory."""
        self._places: list[list[Tensor]] = []
        """Memory where the vectors of further members on other hosts can arrive."""
        self._unreadable = (0, 0)
        """A candidate, and how many of its members were met so far whose memory cannot be read."""
        self._meeting = threading.Lock()

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
        """Find the memory of each member: its own, if that was mapped when it was met, or a place here.

        With the ranks in `near`, each side reads the other's memory. `apart`: whether any two members cannot;
        all members must say the same.
        """
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
        self.apart = bool(self.far) if apart is None else apart
        prepared = dict(self._prepared)
        later = {token: one for token, one in prepared.items() if one[0] > mesh.number}
        before = {token: segment for token, (_, segment) in prepared.items()} | self._maps
        # What is freed here would be unmapped while all members wait.
        let_go([*(segment for token, segment in before.items() if token not in maps | later), *places])
        self._maps, self._prepared = maps, later

    def inputs(self, piece: Piece) -> Travel:
        """The inputs of `piece`, to and from each member on another host."""
        sent = {rank: [Raw(self.flat.inputs, piece, True)] for rank in self.far}
        return sent, {rank: [Raw(self.inputs_of[rank], piece)] for rank in self.far}


# ---------------------------------------------------------------------- an operation, in pieces
# One all-reduce of a large model, piece by piece, while backward may still be computing.
#
# A thread of its own exchanges and sums the pieces in their one order (`pieces`); the main thread releases
# each piece when its gradients are in place. All members go through the same exchanges, whether or not
# their backward is still running: a header each, then for every piece this member's input (*scatter*) and
# its part of the sum of the piece before (*gather*), then the vote. Two members that share no memory send
# each other their whole inputs and both add: that is as many bytes, nothing has to be gathered, and the
# network does not wait for additions.
#
# `PieceSums` has what is the same for all sums of a generation; a `Reduction` is one of them.


_PIECES, _PIECES_APART = 3, 8
"""Pieces of a large model on one host and on several: an exchange costs processor time, a network waits."""


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
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """What happened when, by `time.perf_counter`: `send` and `add` of each piece."""
    began_s: float = 0.0
    """When backward began whose gradients were summed on the way, by the same clock; 0 if none were."""
    complete_s: float = 0.0
    """When this member's own input was complete, by the same clock."""


class PieceSums:
    """A large model in pieces, as the members of one generation exchange and add them."""

    def __init__(
        self, mesh: Mesh, memory: MemberMemory, adder: Adder, adding: futures.ThreadPoolExecutor
    ) -> None:
        self.mesh = mesh
        self.memory = memory
        self.flat = memory.flat
        self.adder = adder
        self.adding = adding
        """A thread that adds a piece while the next one is on its way."""
        self.early = self.flat.device.type == "cpu"
        """Whether sums can begin while backward runs: on CPUs, until one of them was too early."""
        count = 1 if not self.early else _PIECES_APART if memory.apart else _PIECES
        self.pieces = cut(self.flat.layout, count)
        self.release = Release(self.flat.layout, self.pieces, list(self.flat.parameters))

    @property
    def both_add(self) -> bool:
        """Whether there are two members that share no memory: both add everything."""
        return self.mesh.size == 2 and bool(self.memory.far)

    def mine(self, piece: Piece) -> Piece:
        """The part of `piece` that this member sums for all."""
        return part(piece, self.mesh.rank, self.mesh.size)

    def parts(self, piece: Piece, before: Piece) -> Travel | None:
        """The parts of `piece` and of the sum of `before`, to and from each member on another host.

        None if all members read each other's memory.
        """
        if not self.memory.apart:
            return None
        flat, size = self.flat, self.mesh.size
        mine, summed = self.mine(piece), self.mine(before)
        sent: dict[int, list[Raw]] = {}
        received: dict[int, list[Raw]] = {}
        for rank in self.memory.far:
            theirs, other = part(piece, rank, size), part(before, rank, size)
            sent[rank] = [Raw(flat.inputs, theirs, True), Raw(flat.outputs, summed, True)]
            received[rank] = [Raw(self.memory.inputs_of[rank], mine), Raw(flat.outputs, other)]
        return sent, received

    def copy_near(self, piece: Piece) -> None:
        """Copy what the members whose memory can be read have summed of `piece`."""
        for rank, theirs in self.memory.outputs_of.items():
            for bucket, low, high in part(piece, rank, self.mesh.size):
                self.flat.outputs[bucket][low:high].copy_(theirs[bucket][low:high])


class Reduction:
    """A sum under way: `ready` and `complete` release its pieces, `result` waits for it."""

    def __init__(
        self,
        sums: PieceSums,
        operation: int,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        norms: Norms | None,
        agree: Callable[[int, Reduced, float], Reduced],
    ) -> None:
        """`agree` waits until all members have the sum, given the operation, the result and when it began."""
        self.header = header
        self._sums = sums
        self._agree = agree
        self._operation = operation
        self._tree = tree
        self._norms = norms
        self._closing: Header = {}
        self._complete_s = 0.0
        self._thread: threading.Thread | None = None
        self._reduced: Reduced | None = None
        self._error: BaseException | None = None
        sums.release.begin()

    def start(self) -> None:
        """Exchange in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="swell-sum", daemon=True)
        self._thread.start()

    def ready(self, parameter: int) -> None:
        """This parameter's gradient is in its place in the input."""
        self._sums.release.ready(parameter)

    def complete(self, closing: Header) -> None:
        """The whole input is in place; `closing` is what this member's header could not yet say."""
        self._closing, self._complete_s = closing, time.perf_counter()
        self._sums.release.all()

    def result(self) -> Reduced:
        """Wait until all members hold the sum."""
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads here: only the collector would free the two
        assert self._reduced is not None
        return self._reduced

    def _run(self) -> None:
        try:
            headers = self._sums.mesh.exchange(self._operation, READY, self.header)
            result = Reduced(headers, 0.0, 0.0)
            closings = self._exchange(result, self._tree(headers))
            if any(closing.get("late") for closing in closings):
                # Some gradient changed after its piece had been sent; by now all are complete.
                self._sums.early = False
                self._sums.release.late = False
                closings = self._exchange(result, self._tree(headers))
            for header, closing in zip(headers, closings):
                header.update({"unused": closing["unused"]} if "unused" in closing else {})
            result.complete_s = self._complete_s
            waited = [float(closing["waited"]) for closing in closings]
            result.wait_s = waited[self._sums.mesh.rank] - min(waited)
            self._reduced = self._agree(self._operation, result, self._complete_s + result.wait_s)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _exchange(self, result: Reduced, order: Tree | None) -> list[Header]:
        """Exchange and sum all pieces; returns what the members said at the end."""
        sums, pieces = self._sums, self._sums.pieces
        if sums.both_add:
            return self._exchange_whole(result, order)
        squares = [0.0] * (sums.mesh.size + 1)
        before: Piece = ()  # the piece that was summed last, whose parts are gathered next
        closings: list[Header] = []
        for index in range(len(pieces) + 1):
            piece: Piece = ()
            if index < len(pieces):
                piece = pieces[index]
                sums.release.wait(index)
            sums.flat.settle()
            said = {**self._said(), "squares": squares} if index == len(pieces) else {}
            begin = time.perf_counter()
            closings = self._send(sums.parts(piece, before), said)
            sent = time.perf_counter()
            sums.copy_near(before)
            if piece:
                found = sums.adder.add(order, sums.mine(piece), self._norms)
                squares = [a + b for a, b in zip(squares, found)]
                result.spans += [("send", begin, sent), ("add", sent, time.perf_counter())]
            before = piece
        self._note_squares(result, [sum(column) for column in zip(*(a["squares"] for a in closings))])
        return closings

    def _exchange_whole(self, result: Reduced, order: Tree | None) -> list[Header]:
        """The same of two members that share no memory. A piece is added while the next one is on its way."""
        sums, pieces = self._sums, self._sums.pieces
        squares = [0.0] * (sums.mesh.size + 1)
        closings: list[Header] = []

        def add(piece: Piece) -> None:
            begin = time.perf_counter()
            squares[:] = [a + b for a, b in zip(squares, sums.adder.add(order, piece, self._norms))]
            result.spans.append(("add", begin, time.perf_counter()))

        added: list[futures.Future[None]] = []
        try:
            for index, piece in enumerate(pieces):
                sums.release.wait(index)
                sums.flat.settle()
                begin = time.perf_counter()
                said = self._said() if index == len(pieces) - 1 else {}
                closings = self._send(sums.memory.inputs(piece), said)
                result.spans.append(("send", begin, time.perf_counter()))
                added.append(sums.adding.submit(add, piece))
        finally:
            futures.wait(added)  # whatever happens, nothing is added any more after this
        for one in added:
            one.result()
        result.spans.sort(key=lambda span: span[1])
        self._note_squares(result, squares)
        return closings

    def _said(self) -> Header:
        """What this member says with the last exchange."""
        said = {**self._closing, "waited": round(time.perf_counter() - self._complete_s, 6)}
        return said | ({"late": True} if self._sums.release.late else {})

    def _note_squares(self, result: Reduced, squares: list[float]) -> None:
        if self._norms is not None:
            *result.part_squares, result.total_square = squares

    def _send(self, travel: Travel | None, said: Header) -> list[Header]:
        """Exchange what of a piece travels between hosts; returns what the members said with it."""
        if travel is None:
            return self._sums.mesh.exchange(self._operation, PIECE, said)
        sent, received = travel
        answers = self._sums.mesh.exchange(self._operation, PIECE, said, views(sent), views(received))
        for several in received.values():
            for raw in several:
                raw.store()
        return answers


# ---------------------------------------------------------------------- the sum of a step


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


# ---------------------------------------------------------------------- where a process group's workers meet
# How the workers of one of torch's process groups find each other: by notes that the coordinator keeps.
#
# Torch asks for a *store* in which each worker of a group says where it listens. `NoteStore` is one that
# goes over an authenticated connection to the job's coordinator, as everything else between the processes
# of a job. So it works between hosts, opens no port, and strangers can neither read nor write it.


PATIENCE_S = 120.0
"""How long a store tries to reach the coordinator before it gives up."""
_RETRY_S = 0.05
_LOOK_S = 0.01


class NoteStore(Store):
    """The notes of one process group, as torch reads and writes them.

    Torch keeps only the part of this object that is written in C++: the maker of a process group of it must
    keep this object for as long as the group.
    """

    def __init__(self, directory: Path, group: str) -> None:
        super().__init__()
        # Else a thread of NCCL's would ask the store every second whether another worker has failed.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        self._directory = JobDirectory(directory)
        self._config = self._directory.config()
        launch = os.environ.get("SWELL_LAUNCH") or self._config.launch
        self._hello = NotesHello(f"{launch}/{group}")
        self._own: dict[str, str] = {}
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Write a note."""
        text = (value.encode() if isinstance(value, str) else value).decode("latin-1")
        self._own[key] = text
        self._ask(WriteNotes({key: text}))

    def get(self, key: str) -> bytes:
        """Read a note; wait until it is there."""
        return self._wait([key])[key].encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these notes are there."""
        return len(self._read(keys)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these notes are there."""
        self._wait(keys, timeout)

    def close(self) -> None:
        """Hang up; nothing can be read or written any more, and those who wait for a note are told so."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.close()

    def _wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> dict[str, str]:
        patience: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # set by `set_timeout`
        give_up_s = time.monotonic() + patience.total_seconds()
        while len(found := self._read(keys)) < len(set(keys)):
            if time.monotonic() > give_up_s:
                missing = ", ".join(key for key in keys if key not in found)
                raise DistStoreError(f"no worker of the group has written {missing}")
            time.sleep(_LOOK_S)
        return found

    def _read(self, keys: Sequence[str]) -> dict[str, str]:
        return read(NotesFound, self._ask(ReadNotes(list(keys)))).values

    def _ask(self, message: Struct) -> Message:
        """The coordinator's answer; a coordinator that is being started again is waited for."""
        give_up_s = time.monotonic() + PATIENCE_S
        with self._lock:
            while True:
                try:
                    return self._connected().request(message)
                except (OSError, WireError) as error:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    if self._closed:
                        raise DistStoreError("this store is closed") from None
                    if time.monotonic() > give_up_s:
                        raise DistStoreError(f"the coordinator does not answer: {error}") from None
                except TrainError as error:
                    raise DistStoreError(f"the coordinator refused: {error}") from None
                time.sleep(_RETRY_S)

    def _connected(self) -> Connection:
        if self._closed:
            raise ConnectionError
        if self._connection is None:
            connection = Connection.to_job(self._directory.address(), self._config)
            connection.request(self._hello)
            connection.request(WriteNotes(dict(self._own)))
            self._connection = connection
        return self._connection


# ---------------------------------------------------------------------- sums by process groups
# Sums on the workers' own devices, by torch.distributed: NCCL between GPUs.
#
# The mesh of sockets and shared memory works everywhere and at once, so every generation begins with it. If
# each member has its own GPU, a process group of torch is built in the background at the same time. It
# takes over the sums once the step headers of all members say that it is ready; no switch and no recovery
# waits for it. The mesh still decides who is a member, whether a step counts and who died: a group only
# adds.
#
# The members of a group find each other by notes that the coordinator keeps (`notes`).


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
    def of(cls, config: JobFile, directory: Path, device: torch.device, mode: str) -> Grouping | None:
        """The grouping of a job with these settings; None if the job always sums through the mesh."""
        backend = os.environ.get("SWELL_COLLECTIVES") or config.collectives
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
