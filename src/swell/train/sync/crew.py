"""The members a worker trains with right now, and how it gets from one generation to the next.

`Crew` numbers the operations of a job (steps and metric reductions alike), enters meshes, hands the state to
newcomers, and after a death agrees with the other survivors on the last completed operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from swell.train.agent.errors import PeerLost, UsageError
from swell.train.data.plan import Range, Tree
from swell.train.state import statetree
from swell.train.sync import transfer as states
from swell.train.sync.flat import FlatModel
from swell.train.sync.groups import Grouping
from swell.train.sync.link import Link
from swell.train.sync.mesh import ENTER, READY, STATE, VOTE, Header, Mesh, solo
from swell.train.sync.reducer import Reduced, Reducer
from swell.train.sync.segment import Segment

_KEEP_STAGING_BYTES = 256 << 20
"""Memory for handing over a state is kept for the next newcomer up to this size; more is freed."""


class Carrier(Protocol):
    """What a crew needs of its job."""

    def capture(self) -> dict[str, Any]:
        """The whole state; its tensors are live ones, not copies."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load a whole state (copying its tensors)."""

    def found(self) -> None:
        """Begin without live state: from the newest checkpoint, or from what the script built."""


@dataclass(frozen=True, slots=True)
class Entered:
    """How a new generation begins."""

    complete: bool
    """True if this worker's present operation is complete: all members hold its sum."""
    covered: dict[str, list[Range]]
    """By loader: the samples of the coming step that some member holds gradients for."""
    joined: bool
    """True if this worker joined without state and received it."""


class Crew:
    """This worker's place among the members of its generation."""

    def __init__(self, link: Link | None, flat: FlatModel, carrier: Carrier, facts: Header) -> None:
        self.link = link
        self.flat = flat
        grouping = None
        if link is not None:
            mode = str(facts.get("mode", ""))
            grouping = Grouping.of(link.config, link.directory.path, flat.device, mode)
        self.reducer = Reducer(flat, grouping)
        self.mesh: Mesh = solo(link.name if link else "w0")
        self.operation = 0
        """The number of the next operation; all before it are complete."""
        self.live = False
        self._carrier = carrier
        self._facts = facts
        self._held = -1
        self._held_headers: list[Header] = []
        self._staging: Segment | None = None
        if link is not None:
            near = link.config.get("shared_memory", True)
            link.about = {"segment": flat.segment.describe() if near else None, **facts}
            if grouping is not None:
                link.about["device"] = grouping.about()

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
        return 2 if any(self.reducer.is_far(rank) for rank in self.mesh.peers) else 1

    # ------------------------------------------------------------------ operations

    def all_reduce(
        self,
        header: Header,
        tree: Callable[[list[Header]], Tree | None],
        *,
        squares: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Reduced:
        """Sum the gradients over all members; PeerLost if a member is gone."""
        return self.reducer.all_reduce(self.operation, header, tree, squares=squares, weights=weights)

    def completed(self) -> None:
        """Record that the present operation took effect here, and that newcomers in it have their state."""
        self.operation += 1
        if self._staging is not None and self._staging.data_bytes > _KEEP_STAGING_BYTES:
            self._staging = None

    def share(self, header: Header) -> list[Header]:
        """Try once to exchange the headers of all members, as an operation with a vote."""
        headers = self.mesh.exchange(self.operation, READY, header)
        self._held, self._held_headers = self.operation, headers
        self.mesh.exchange(self.operation, VOTE, {})
        return headers

    def held_headers(self) -> list[Header]:
        """The headers of the last `share`, if it was completed only by a recovery."""
        return self._held_headers

    # ------------------------------------------------------------------ generations

    def enter(self, mesh: Mesh, covered: dict[str, list[Range]]) -> Entered:
        """Begin a generation: agree on the position of all members, and give state to those without."""
        self.mesh = mesh
        holding = max(self._held, self.reducer.held)
        mine: Header = {
            "what": "enter",
            "live": self.live,
            "operation": self.operation,
            "held": holding,
            "covered": covered,
            "facts": self._facts,
            "staging": self._staging.describe() if self._staging is not None else None,
        }
        headers = mesh.exchange(0, ENTER, mine)
        if self.link is not None:
            self.link.hold(mesh.number)
        for name, header in zip(mesh.members, headers):
            for fact, value in self._facts.items():
                if header["facts"].get(fact) != value:
                    raise UsageError(
                        f"{fact}: worker {name} has {header['facts'].get(fact)!r}, worker "
                        f"{mesh.members[mesh.rank]} has {value!r}; every worker must build the same"
                    )
        self.reducer.connect(mesh)
        live = [rank for rank, header in enumerate(headers) if header["live"]]
        top = max((headers[r]["operation"] for r in live), default=self.operation)
        joined = not self.live
        if not live:
            if mesh.rank == 0:
                self._carrier.found()
            self._hand_over(0, [r for r in range(mesh.size) if r != 0], None)
        elif len(live) < mesh.size:
            source = next(r for r in live if headers[r]["operation"] == top)
            staging = headers[source]["staging"]
            self._hand_over(source, [r for r in range(mesh.size) if r not in live], staging)
        complete = False
        if not joined:
            if self.operation < top:
                assert holding == self.operation, "all members voted for an operation that one completed"
                complete = True
            else:
                # A newcomer has no sum to complete the operation with: then all members do it again.
                complete = all(h["live"] and h["operation"] == top and h["held"] == top for h in headers)
        self.live = True
        merged: dict[str, list[Range]] = {}
        if not complete or self.operation < top:
            for header in headers:
                if header["live"] and header["operation"] == top:
                    for name, ranges in header["covered"].items():
                        merged.setdefault(name, []).extend((int(a), int(b)) for a, b in ranges)
        if not complete:
            self._held = self.reducer.held = -1
        return Entered(complete, merged, joined)

    def close(self) -> None:
        """Leave the generation."""
        self.mesh.close()

    def prepare(self, mesh: Mesh, to_give: list[Tensor]) -> None:
        """Allocate the memory that `mesh` needs before a member waits for it.

        `to_give` are the tensors of the state if this worker has to hand it over.
        """
        self.reducer.prepare(mesh)
        if to_give:
            self._prepare_to_give(to_give)

    def _prepare_to_give(self, tensors: list[Tensor]) -> None:
        need = states.staged_bytes(states.describe(tensors))
        if self._staging is None or self._staging.data_bytes < need:
            segment = Segment.create(need)
            segment.touch()
            self._staging = segment

    def _hand_over(self, source: int, to: list[int], staging: Header | None) -> None:
        """Copy the state of `source` to the ranks in `to`, through the memory `staging` where possible."""
        mesh = self.mesh
        if not to:
            return
        if mesh.rank == source:
            document, named = statetree.split(self._carrier.capture())
            tensors = [t.detach() for t in named.values()]
            description = states.describe(tensors)
            self._prepare_to_give(tensors)
            assert self._staging is not None
            states.copy_all(states.staged(description, self._staging), tensors)
            far = [r for r in to if self.reducer.is_far(r)]
            message: Header = {
                "document": document,
                "names": list(named),
                "tensors": description,
                "segment": self._staging.describe(),
                "operation": self.operation,
                "through_sockets": far,
            }
            mesh.exchange(0, STATE, message)
            if far:
                raw = [self._staging.bytes(0, states.staged_bytes(description))]
                mesh.exchange(1, STATE, {}, dict.fromkeys(far, raw), {})
            return
        # Map the memory while the source is still copying into it.
        expected = Segment.open(staging) if mesh.rank in to and not self.reducer.is_far(source) else None
        message = mesh.exchange(0, STATE, {})[source]
        segment: Segment | None = None
        if message["through_sockets"]:
            sinks: dict[int, list[memoryview]] = {}
            if mesh.rank in message["through_sockets"]:
                size = states.staged_bytes(message["tensors"])
                segment = Segment.create(size)
                sinks = {source: [segment.bytes(0, size)]}
            mesh.exchange(1, STATE, {}, {}, sinks)
        if mesh.rank in to:
            if segment is None and staging is not None and message["segment"]["token"] == staging["token"]:
                segment = expected
            segment = segment or Segment.open(message["segment"])
            if segment is None:
                raise PeerLost(f"the state of {mesh.members[source]} vanished while it was handed over")
            views = dict(zip(message["names"], states.staged(message["tensors"], segment)))
            self._carrier.restore(statetree.join(message["document"], views))
            self.operation = int(message["operation"])
