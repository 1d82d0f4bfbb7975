"""One all-reduce of a large model, piece by piece, while backward may still be computing.

A thread of its own exchanges and sums the pieces in their one order (`pieces`); the main thread releases each
piece when its gradients are in place. All members go through the same exchanges, whether or not their
backward is still running: a header each, then for every piece this member's input (*scatter*) and its part of
the sum of the piece before (*gather*), then the vote. Two members that share no memory send each other their
whole inputs and both add: that is as many bytes, nothing has to be gathered, and the network does not wait
for additions.

`PieceSums` has what is the same for all sums of a generation; a `Reduction` is one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field

from swell.train.data.plan import Tree
from swell.train.sync.adding import Adder, Norms, Raw, views
from swell.train.sync.memory import MemberMemory, Travel
from swell.train.sync.mesh import PIECE, READY, Header, Mesh
from swell.train.sync.pieces import Piece, Release, cut, part

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
