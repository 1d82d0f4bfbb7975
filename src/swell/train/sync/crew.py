"""The members a worker trains with right now, and how it gets from one generation to the next.

`Crew` numbers the operations of a job (steps and metric reductions alike), enters meshes, hands the state to
newcomers, and after a death agrees with the other survivors on the last completed operation.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swell.train.agent.errors import Misfit
from swell.train.data.plan import Range, Tree
from swell.train.sync.entering import STEP, RollCall
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Grouping
from swell.train.sync.handover import Carrier, HandOver
from swell.train.sync.levelling import Levelling
from swell.train.sync.link import Link
from swell.train.sync.mesh import ENTER, PIECE, READY, VOTE, Header, Mesh, solo
from swell.train.sync.reducer import Norms, Reduced, Reducer
from swell.train.sync.reduction import Reduction


@dataclass(frozen=True, slots=True)
class Entered:
    """How a new generation begins."""

    complete: bool
    """True if this worker's present operation is complete: all members hold its sum."""
    covered: dict[str, list[Range]]
    """By loader: the samples of the coming step that some member holds gradients for."""
    joined: bool
    """True if this worker joined without state and received it."""
    waited_s: float
    """Seconds until all members had entered."""
    level: int = 0
    """Newcomers that had become level before the switch."""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running: all members would wait for it."""
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


class Crew:
    """This worker's place among the members of its generation."""

    def __init__(self, link: Link | None, flat: FlatModel, carrier: Carrier, facts: Header) -> None:
        self.link = link
        self.flat = flat
        grouping = None
        if link is not None:
            mode = str(facts.get("mode", ""))
            if not flat.sharded:
                grouping = Grouping.of(link.config, link.directory.path, flat.device, mode)
        self.reducer = Reducer(flat, grouping)
        self.mesh: Mesh = solo(link.name if link else "w0")
        self.operation = 0
        """The number of the next operation; all before it are complete."""
        self.live = False
        self.proven = False
        """True once the job's script has completed an operation, here or on the members that it came from."""
        self._carrier = carrier
        self._facts = facts
        self._held = -1
        self._held_headers: list[Header] = []
        self._held_parts: list[list[Tensor]] = []
        self._doing = ""
        """What the present operation is (`STEP`, "reduce", ...); empty between two operations."""
        self.handover = HandOver(carrier, flat.device)
        self.levelling = Levelling(carrier, self.reducer.memory)
        self._grouping = grouping
        if link is not None:
            link.peers.introduce, link.peers.meet = self._introduce, self._meet

    def _introduce(self, newcomer: bool) -> Header:
        """What a peer learns of this worker when it connects; a thread calls this while others train."""
        assert self.link is not None
        shares = self.link.config.get("shared_memory", True)
        segment = self.flat.describe() if shares else None
        about: Header = {"segment": segment, "position": self.flat.position, **self._facts}
        if self._grouping is not None:
            about["device"] = self._grouping.about()
        if newcomer and self.live and shares:
            about["state"] = self.handover.offer()
        return about

    def _meet(self, about: Header, candidate: int) -> None:
        """Map the memory of a member of `candidate`, and as a newcomer the state that it will copy."""
        self.reducer.memory.meet(about, candidate)
        if not self.live:
            self.handover.map(about.get("state"))

    @property
    def rank(self) -> int:
        """This worker's place in the generation."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """Members in the generation."""
        return self.mesh.size

    @property
    def nodes(self) -> int:
        """1 if all members are on one machine, 2 if they are on several (their number does not matter)."""
        return 2 if any(rank in self.reducer.memory.far for rank in self.mesh.peers) else 1

    # ------------------------------------------------------------------ operations

    def all_reduce(
        self,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        norms: Norms | None = None,
        doing: str = STEP,
    ) -> Reduced:
        """Sum the gradients over all members; PeerLost if a member is gone.

        A newcomer may come into a `STEP` that is made again after a death, and into nothing else.
        """
        self._doing = doing
        return self.reducer.all_reduce(self.operation, header, tree, norms=norms)

    def begin(
        self,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        norms: Norms | None = None,
    ) -> Reduction:
        """Begin to sum the gradients over all members while backward computes them."""
        self._doing = STEP
        return self.reducer.begin(self.operation, header, tree, norms=norms)

    def completed(self) -> None:
        """Record that the present operation took effect here, and that newcomers in it have their state."""
        self.operation += 1
        self.proven, self._doing = True, ""
        self.handover.forget()

    def share(self, header: Header, doing: str = "") -> list[Header]:
        """Try once to exchange the headers of all members, as an operation with a vote."""
        self._doing = doing or str(header.get("what", "share"))
        headers = self.mesh.exchange(self.operation, READY, header)
        self._held, self._held_headers = self.operation, headers
        self.mesh.exchange(self.operation, VOTE, {})
        return headers

    def held_headers(self) -> list[Header]:
        """The headers of the last `share`, if it was completed only by a recovery."""
        return self._held_headers

    def gather(
        self, header: Header, mine: list[Tensor], check: Callable[[list[Header]], None]
    ) -> list[list[Tensor]]:
        """Try once to give all members these tensors of each, as an operation with a vote; by rank.

        `check` sees all headers before any tensor is sent, and ends this worker if it is elsewhere.
        """
        self._doing = "gather"
        parts = [part.detach().contiguous() for part in mine]
        flats = [_bytes(part) for part in parts]
        shapes = [[str(part.dtype).removeprefix("torch."), *part.shape] for part in parts]
        headers = self.mesh.exchange(self.operation, READY, {**header, "shapes": shapes})
        check(headers)
        for rank, header in enumerate(headers):
            if "shapes" not in header:  # it does something else, and is about to leave for that
                self.mesh.abandon()
                raise self.mesh.gone(rank)
        out, sinks = [parts] * self.size, {}
        for rank in self.mesh.peers:
            out[rank] = [torch.empty(s[1:], dtype=getattr(torch, s[0])) for s in headers[rank]["shapes"]]
            sinks[rank] = [_bytes(part) for part in out[rank]]
        self.mesh.exchange(self.operation, PIECE, {}, dict.fromkeys(self.mesh.peers, flats), sinks)
        self._held, self._held_parts = self.operation, out
        self.mesh.exchange(self.operation, VOTE, {})
        return out

    def held_parts(self) -> list[list[Tensor]]:
        """The tensors of the last `gather`, if it was completed only by a recovery."""
        return self._held_parts

    # ------------------------------------------------------------------ generations

    def needs_staging(self, mesh: Mesh) -> bool:
        """Whether some newcomer of `mesh` gets the whole state in the pause."""
        newcomers = {rank for rank, name in enumerate(mesh.members) if name not in self.mesh.members}
        return not self.levelling.reaches(newcomers)

    @_uncollected()
    def enter(self, mesh: Mesh, covered: dict[str, list[Range]]) -> Entered:
        """Begin a generation: agree on the position of all members, and give state to those without.

        Every member says where it is and what it has, and all of them conclude the same from that. Those that
        fit connect their memory, newcomers get their state, and an operation that some members had begun is
        either complete for all of them or is made again.
        """
        self.mesh = mesh
        mine = self._position(covered, level=self.levelling.end(mesh))
        begin = time.perf_counter()
        roll = RollCall(mesh.exchange(0, ENTER, mine))
        waited_s = time.perf_counter() - begin
        self._check(roll)
        self.reducer.connect(mesh, roll.near(mesh.rank), roll.apart)
        self._bring_state(roll)
        complete = roll.complete(mesh.rank)
        if not complete:
            self._held = self.reducer.held = -1
        joined, self.live = not self.live, True
        self.proven = self.proven or bool(roll.live)
        return Entered(complete, roll.covered(), joined, waited_s, len(roll.level_with(mesh.rank)))

    def _position(self, covered: dict[str, list[Range]], level: str | None) -> Header:
        """What this worker says as it enters the generation: where it is, and what it has."""
        return {
            "what": "enter",
            "live": self.live,
            "operation": self.operation,
            "held": max(self._held, self.reducer.held),
            "doing": self._doing,
            "covered": covered,
            "facts": self._facts,
            "staging": self.handover.staging,
            "reads": self.reducer.memory.readable(self.mesh),
            "level": level,
        }

    def _check(self, roll: RollCall) -> None:
        """Raise an error if this worker or another one cannot go on with the others."""
        mesh, unfit = self.mesh, roll.misfits()
        if mesh.rank in unfit:
            raise Misfit(unfit[mesh.rank])
        if unfit:
            raise mesh.gone(min(unfit))
        if self.link is not None:
            self.link.hold(mesh.number)
        roll.check_facts(mesh.members, mesh.rank)

    def _bring_state(self, roll: RollCall) -> None:
        """Give the job's state to the members without; if no member has it, the first one begins."""
        mesh, stride = self.mesh, self.flat.stride
        alike = range(mesh.rank % stride, mesh.size, stride)  # those with the same part of the model
        if not roll.live:
            if mesh.rank < stride:
                self.operation = self._carrier.found()
            if mesh.size > stride:
                self._hand_over(alike[0], list(alike[1:]), roll)
        elif len(roll.live) < mesh.size:
            self._hand_over(roll.furthest(alike), [r for r in alike if r not in roll.live], roll)

    def _hand_over(self, source: int, to: list[int], roll: RollCall) -> None:
        """Give the state of `source` to the ranks in `to`."""
        mesh = self.mesh
        if mesh.rank == source:
            far = [r for r in to if r in self.reducer.memory.far]
            level = [r for r in roll.level_with(source) if r in far]
            self.handover.give(mesh, to, far, level, self.operation)
            return
        near, staging = source not in self.reducer.memory.far, roll.headers[source]["staging"]
        operation = self.handover.take(mesh, source, mesh.rank in to, near, staging)
        if operation is not None:
            self.operation = operation

    def lay_out(self, flat: FlatModel) -> None:
        """Sum other parameters from now on; only in a generation of one, or before the first."""
        self.flat, self.reducer = flat, Reducer(flat, self._grouping)
        self.levelling.memory = self.reducer.memory
        self._facts["model"] = flat.layout.digest
        if self.live:
            self.reducer.connect(self.mesh, set())

    def close(self) -> None:
        """Leave the generation."""
        self.mesh.close()


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory, of one on a device a copy."""
    flat = tensor.cpu().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    raw: Any = flat.numpy()
    return memoryview(raw)
