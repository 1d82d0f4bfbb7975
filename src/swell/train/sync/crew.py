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

from swell.train.agent.errors import Misfit, UsageError
from swell.train.data.plan import Range, Tree
from swell.train.sync import level
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Grouping
from swell.train.sync.handover import Carrier, HandOver
from swell.train.sync.level import Optimized, Source
from swell.train.sync.link import Link
from swell.train.sync.mesh import ENTER, READY, VOTE, Header, Mesh, solo
from swell.train.sync.reducer import Norms, Reduced, Reducer
from swell.train.sync.reduction import Reduction

STEP = "step"
"""What a member is doing that sums gradients; other operations are named by what the script called."""


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
        self._doing = ""
        """What the present operation is (`STEP`, "reduce", ...); empty between two operations."""
        self.handover = HandOver(carrier, flat.device)
        self._source: Source | None = None
        """What brings the newcomers of the present candidate level."""
        self._level = False
        self._tries = 0
        """How often this newcomer began to become level."""
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
    ) -> Reduced:
        """Sum the gradients over all members; PeerLost if a member is gone."""
        self._doing = STEP
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

    def share(self, header: Header) -> list[Header]:
        """Try once to exchange the headers of all members, as an operation with a vote."""
        self._doing = str(header.get("what", "share"))
        headers = self.mesh.exchange(self.operation, READY, header)
        self._held, self._held_headers = self.operation, headers
        self.mesh.exchange(self.operation, VOTE, {})
        return headers

    def held_headers(self) -> list[Header]:
        """The headers of the last `share`, if it was completed only by a recovery."""
        return self._held_headers

    # ------------------------------------------------------------------ generations

    def _levels(self, mesh: Mesh) -> Optimized | None:
        """What newcomers on other hosts get in the background; None if the model is small."""
        large = self.flat.layout.region_bytes >= level.LEAST_BYTES
        return self._carrier.optimized() if large and not mesh.recovery else None

    def levelled(self, mesh: Mesh) -> bool:
        """Between two steps: whether the newcomers of candidate `mesh` are as level as they can be."""
        optimized = self._levels(mesh)
        if optimized is None:
            return True
        if self._source is None or self._source.mesh is not mesh:
            self._drop_source()
            self._source = Source(mesh, optimized, self.reducer.memory.readable(mesh))
        return self._source.at_boundary()

    def needs_staging(self, mesh: Mesh) -> bool:
        """Whether some newcomer of `mesh` gets the whole state in the pause."""
        members = set(self.mesh.members)
        newcomers = [rank for rank, name in enumerate(mesh.members) if name not in members]
        source = self._source
        return source is None or source.gave_up or set(newcomers) != set(source.newcomers)

    def follow(self, mesh: Mesh) -> None:
        """As a newcomer: become level with the members of candidate `mesh`, until they switch to it."""
        optimized = self._levels(mesh)
        self._level = False
        if optimized is not None:
            self._tries += 1
            self._level = level.follow(mesh, optimized, self.reducer.memory.readable(mesh), self._tries - 1)

    def _drop_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    @_uncollected()
    def enter(self, mesh: Mesh, covered: dict[str, list[Range]]) -> Entered:
        """Begin a generation: agree on the position of all members, and give state to those without."""
        self.mesh = mesh
        levelling = self._level
        if self._source is not None:
            levelling = self._source.mesh is mesh and bool(self._source.newcomers)
            if self._source.mesh is mesh:
                self._source.finish()
            self._drop_source()
        self._level = False
        holding = max(self._held, self.reducer.held)
        mine: Header = {
            "what": "enter",
            "live": self.live,
            "operation": self.operation,
            "held": holding,
            "doing": self._doing,
            "covered": covered,
            "facts": self._facts,
            "staging": self.handover.staging,
            "reads": self.reducer.memory.readable(mesh),
            "level": level.fingerprint(self._carrier.steady()) if levelling else None,
        }
        begin = time.perf_counter()
        headers = mesh.exchange(0, ENTER, mine)
        waited_s = time.perf_counter() - begin
        if unfit := misfits(headers):
            if mesh.rank in unfit:
                raise Misfit(unfit[mesh.rank])
            raise mesh.gone(min(unfit))
        if self.link is not None:
            self.link.hold(mesh.number)
        for name, header in zip(mesh.members, headers):
            for fact, value in self._facts.items():
                if header["facts"].get(fact) != value:
                    raise UsageError(
                        f"{fact}: worker {name} has {header['facts'].get(fact)!r}, worker "
                        f"{mesh.members[mesh.rank]} has {value!r}; every worker must build the same"
                    )
        reads = mine["reads"]
        pairs = {(a, b) for a in range(mesh.size) for b in headers[a]["reads"]}
        apart = any((b, a) not in pairs for a in range(mesh.size) for b in range(mesh.size) if a != b)
        self.reducer.connect(mesh, {r for r in reads if mesh.rank in headers[r]["reads"]}, apart)
        live = [rank for rank, header in enumerate(headers) if header["live"]]
        top = max((headers[r]["operation"] for r in live), default=self.operation)
        joined = not self.live
        stride = self.flat.stride
        alike = range(mesh.rank % stride, mesh.size, stride)  # those with the same part of the model
        if not live:
            if mesh.rank < stride:
                self.operation = self._carrier.found()
            if mesh.size > stride:
                self._hand_over(alike[0], list(alike[1:]), headers)
        elif len(live) < mesh.size:
            source = next(r for r in alike if r in live and headers[r]["operation"] == top)
            self._hand_over(source, [r for r in alike if r not in live], headers)
        complete = False
        if not joined:
            if self.operation < top:
                complete = True  # all members voted for it, so this one holds its sum
            else:
                # A newcomer has no sum to complete the operation with: then all members do it again.
                complete = all(h["live"] and h["operation"] == top and h["held"] == top for h in headers)
        self.live, self.proven = True, self.proven or bool(live)
        merged: dict[str, list[Range]] = {}
        if not complete or self.operation < top:
            for header in headers:
                if header["live"] and header["operation"] == top:
                    for name, ranges in header["covered"].items():
                        merged.setdefault(name, []).extend((int(a), int(b)) for a, b in ranges)
        if not complete:
            self._held = self.reducer.held = -1
        equal = sum(not h["live"] and h["level"] is not None and h["level"] == mine["level"] for h in headers)
        return Entered(complete, merged, joined, waited_s, equal)

    def _hand_over(self, source: int, to: list[int], headers: list[Header]) -> None:
        """Give the state of `source` to the ranks in `to`."""
        mesh = self.mesh
        if mesh.rank == source:
            far = [r for r in to if r in self.reducer.memory.far]
            mine = headers[source]["level"]
            equal = [r for r in far if mine is not None and headers[r]["level"] == mine]
            self.handover.give(mesh, to, far, equal, self.operation)
            return
        near, staging = source not in self.reducer.memory.far, headers[source]["staging"]
        operation = self.handover.take(mesh, source, mesh.rank in to, near, staging)
        if operation is not None:
            self.operation = operation

    def lay_out(self, flat: FlatModel) -> None:
        """Sum other parameters from now on; only in a generation of one, or before the first."""
        self.flat, self.reducer = flat, Reducer(flat, self._grouping)
        self._facts["model"] = flat.layout.digest
        if self.live:
            self.reducer.connect(self.mesh, set())

    def close(self) -> None:
        """Leave the generation."""
        self.mesh.close()


def misfits(headers: list[Header]) -> dict[int, str]:
    """The ranks that cannot go on with the others in a new generation, and why; all members find the same.

    Members go on from the last operation that any of them completed. A worker without state begins where the
    script draws a batch, so it can join members in a step, but not members that are at a `job.reduce` after
    it: their state no longer says where that is. If members are at different operations, the oldest of them
    is right.
    """
    live = [header for header in headers if header["live"]]
    if not live:
        return {}
    top = max(header["operation"] for header in live)
    doing = next((h["doing"] for h in live if h["operation"] == top and h["doing"]), "")
    out: dict[int, str] = {}
    for rank, header in enumerate(headers):
        if not header["live"]:
            if doing not in ("", STEP):
                out[rank] = f"it has no state yet, and the others are not at a step but at job.{doing}"
        elif header["operation"] == top:
            if header["doing"] not in ("", doing):
                out[rank] = f"it is at {header['doing']}, and the others are at {doing}"
        elif header["operation"] < top - 1 or header["held"] != header["operation"]:
            out[rank] = f"it is at operation {header['operation']}, and the others are at {top}"
    return out
