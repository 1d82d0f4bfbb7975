"""The members a worker trains with right now, and how it gets from one generation to the next.

All members conclude the same from what each of them sent as it entered (`RollCall`). Newcomers are given the
job's state (`HandOver`); those on other hosts are brought level before (`Levelling`). `Crew` numbers the
operations of a job (steps and metric reductions alike), enters meshes, and after a death agrees with the
other survivors on the last completed operation.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swell.train.agent.errors import Misfit, PeerLost, UsageError
from swell.train.data.plan import Range, Tree
from swell.train.state import statetree
from swell.train.sync import level, memory
from swell.train.sync.control import Link
from swell.train.sync.level import Optimized, Source
from swell.train.sync.memory import FlatModel, Segment
from swell.train.sync.mesh import ENTER, PIECE, READY, STATE, VOTE, Header, Mesh, solo
from swell.train.sync.reducer import Grouping, MemberMemory, Norms, Reduced, Reducer, Reduction

# ---------------------------------------------------------------------- the roll call (pure)
# What the members of a new generation conclude from what each of them said as it entered.
#
# Pure: all members have the same headers, so all of them conclude the same.


STEP = "step"
"""What a member is doing that sums gradients; other operations are named by what the script called."""


class RollCall:
    """What each member said as it entered a generation, in rank order."""

    def __init__(self, headers: list[Header]) -> None:
        self.headers = headers
        self.live = [rank for rank, header in enumerate(headers) if header["live"]]
        """The members that have the job's state."""
        self.top = max((headers[rank]["operation"] for rank in self.live), default=0)
        """The operation at which the furthest of them are; all before it are complete."""

    def misfits(self) -> dict[int, str]:
        """The ranks that cannot go on with the others, and why.

        Members go on from the last operation that any of them completed. A worker without state begins where
        the script draws a batch, so it can join members in a step, but not members that are at a `job.reduce`
        after it: their state no longer says where that is. If members are at different operations, the oldest
        of them is right.
        """
        if not self.live:
            return {}
        said = [self.headers[rank] for rank in self.live]
        doing = next((h["doing"] for h in said if h["operation"] == self.top and h["doing"]), "")
        out: dict[int, str] = {}
        for rank, header in enumerate(self.headers):
            if not header["live"]:
                if doing not in ("", STEP):
                    out[rank] = f"it has no state yet, and the others are not at a step but at job.{doing}"
            elif header["operation"] == self.top:
                if header["doing"] not in ("", doing):
                    out[rank] = f"it is at {header['doing']}, and the others are at {doing}"
            elif header["operation"] < self.top - 1 or header["held"] != header["operation"]:
                out[rank] = f"it is at operation {header['operation']}, and the others are at {self.top}"
        return out

    def check_facts(self, members: Sequence[str], rank: int) -> None:
        """Raise UsageError if some member has built something else than the member of that rank."""
        for name, header in zip(members, self.headers):
            for fact, value in self.headers[rank]["facts"].items():
                if header["facts"].get(fact) != value:
                    raise UsageError(
                        f"{fact}: worker {name} has {header['facts'].get(fact)!r}, worker "
                        f"{members[rank]} has {value!r}; every worker must build the same"
                    )

    def near(self, rank: int) -> set[int]:
        """The members with which this one shares memory: each of the two reads the other's."""
        return {other for other in self.headers[rank]["reads"] if rank in self.headers[other]["reads"]}

    @property
    def apart(self) -> bool:
        """Whether any two members cannot read each other's memory."""
        return any(len(header["reads"]) < len(self.headers) - 1 for header in self.headers)

    def furthest(self, ranks: Sequence[int]) -> int:
        """The first of `ranks` that has the job's state as of the furthest operation."""
        return next(r for r in ranks if r in self.live and self.headers[r]["operation"] == self.top)

    def level_with(self, rank: int) -> list[int]:
        """The newcomers that have become level with this member."""
        mine = self.headers[rank]["level"]
        if mine is None:
            return []
        return [r for r, header in enumerate(self.headers) if not header["live"] and header["level"] == mine]

    @property
    def _all_hold(self) -> bool:
        """Whether all members hold the sum of the furthest operation.

        A newcomer has no sum to complete the operation with: then all members do it again.
        """
        return all(h["live"] and h["operation"] == h["held"] == self.top for h in self.headers)

    def complete(self, rank: int) -> bool:
        """Whether the present operation of that member is complete: all members hold its sum."""
        mine = self.headers[rank]
        if not mine["live"]:
            return False
        # If another member is further, all members voted for the operation, so this one holds its sum.
        return mine["operation"] < self.top or self._all_hold

    def covered(self) -> dict[str, list[Range]]:
        """By loader: the samples of the coming step that some member holds gradients for."""
        merged: dict[str, list[Range]] = {}
        for header in self.headers if not self._all_hold else ():
            if header["live"] and header["operation"] == self.top:
                for name, ranges in header["covered"].items():
                    merged.setdefault(name, []).extend((int(a), int(b)) for a, b in ranges)
        return merged


# ---------------------------------------------------------------------- the hand-over of the state
# The hand-over of a job's state to newcomers.
#
# Tensors travel in one of three ways. On one GPU the newcomer maps the source's memory and copies from it:
# only for tensors that change in no other way than by a committed step, because the next step needs the
# newcomer's vote, and it votes after it has copied. On one host the source copies into shared memory
# (`staging`), which the newcomer maps. Between hosts the same memory goes through the sockets of the mesh,
# less what the newcomer got in the background (`level`).


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
        self._mapped: dict[str, memory.Mapping] = {}
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
        need = memory.staged_bytes(memory.describe(tensors))
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
            memory.let_go([self._staging])
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
        description = memory.describe(tensors.values())
        self._allocate(list(tensors.values()))
        assert self._staging is not None
        memory.copy_all(memory.staged(description, self._staging), list(tensors.values()))
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
            sizes = {r: memory.staged_bytes(description[: light if r in level else None]) for r in far}
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
                size = memory.staged_bytes(description)
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
        views |= dict(zip(names, memory.staged(description, segment)))
        for name, found in message["direct"].items():
            views[name] = self._view(found, mesh.members[source])
        self._carrier.restore(statetree.join(message["document"], views))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        views.clear()
        memory.let_go([*self._mapped.values(), expected, segment])
        self._mapped = {}
        return int(message["operation"])

    def same_device(self, mesh: Mesh, rank: int) -> bool:
        """Whether that member is on this worker's GPU."""
        theirs = (mesh.peers[rank].about.get("segment") or {}) if rank in mesh.peers else {}
        return self._device.type == "cuda" and theirs.get("gpu") == memory.identity(self._device)

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
            found = memory.allocation(tensor)
            if found is None:
                continue
            base, size = found
            if base not in known:
                known[base] = memory.handle_of(tensor)
            description = known[base]
            if description is not None:
                shape, dtype = memory.describe([tensor])[0]
                out[name] = [description["handle"], size, tensor.data_ptr() - base, shape, dtype]
                self._known[name] = (tensor, out[name])
        return out

    def _open(self, handle: str, size: int) -> memory.Mapping | None:
        if handle not in self._mapped:
            mapping = memory.Mapping.open(handle, size, self._device)
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


# ---------------------------------------------------------------------- bringing newcomers level
# When newcomers are brought level in the background (`level`), and when that ends.
#
# A member is the source of the present candidate's newcomers; a worker without state follows the members of
# its candidate. Both sides end when the candidate is entered, or when another one takes its place.


class Levelling:
    """One worker's side of bringing newcomers level, as a member or as a newcomer."""

    def __init__(self, carrier: Carrier, memory: MemberMemory) -> None:
        self.memory = memory
        self._carrier = carrier
        self._source: Source | None = None
        """What brings the newcomers of the present candidate level."""
        self._level = False
        """Whether this newcomer has become level."""
        self._tries = 0
        """How often this newcomer began to become level."""

    def _optimized(self, mesh: Mesh) -> Optimized | None:
        """What newcomers on other hosts get in the background; None if the model is small."""
        large = self.memory.flat.layout.region_bytes >= level.LEAST_BYTES
        return self._carrier.optimized() if large and not mesh.recovery else None

    def done(self, mesh: Mesh) -> bool:
        """Between two steps: whether the newcomers of candidate `mesh` are as level as they can be."""
        optimized = self._optimized(mesh)
        if optimized is None:
            return True
        if self._source is None or self._source.mesh is not mesh:
            self._drop_source()
            self._source = Source(mesh, optimized, self.memory.readable(mesh))
        return self._source.at_boundary()

    def reaches(self, newcomers: set[int]) -> bool:
        """Whether just these ranks of the present candidate become level."""
        source = self._source
        return source is not None and not source.gave_up and newcomers == set(source.newcomers)

    def follow(self, mesh: Mesh) -> None:
        """As a newcomer: become level with the members of candidate `mesh`, until they switch to it."""
        optimized = self._optimized(mesh)
        self._level = False
        if optimized is not None:
            self._tries += 1
            self._level = level.follow(mesh, optimized, self.memory.readable(mesh), self._tries - 1)

    def end(self, mesh: Mesh) -> str | None:
        """End what is under way, because `mesh` is entered.

        Returns a fingerprint by which members and newcomers see whether they are level; None if they cannot
        be.
        """
        levelling, self._level = self._level, False
        if self._source is not None:
            levelling = self._source.mesh is mesh and bool(self._source.newcomers)
            if self._source.mesh is mesh:
                self._source.finish()
            self._drop_source()
        return level.fingerprint(self._carrier.steady()) if levelling else None

    def _drop_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


# ---------------------------------------------------------------------- the crew
# The members a worker trains with right now, and how it gets from one generation to the next.
#
# `Crew` numbers the operations of a job (steps and metric reductions alike), enters meshes, hands the state
# to newcomers, and after a death agrees with the other survivors on the last completed operation.


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
        shares = self.link.config.shared_memory
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

    def held_sum(self) -> Reduced:
        """What the last `all_reduce` gave, if it was completed only by a recovery."""
        assert self.reducer.result is not None
        return self.reducer.result

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
        """This worker's message as it enters the generation: its position and its state."""
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
