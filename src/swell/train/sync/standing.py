"""What a worker knows of its place in the job: a pure state machine, events in, instructions out.

The events are the coordinator's messages, meshes that were connected, and what the worker's main thread does;
`line` carries out the instructions. It has the sockets, threads and clocks; meshes are only handed on.

    starting --ready--> ready --(enter)--> member --(leave)--> leaving
                          |                  |
                        (turn)             (done)--> done
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swell.train.agent import protocol
from swell.train.agent.errors import FENCED, PeerLost
from swell.train.agent.protocol import Address, Offer, Status

if TYPE_CHECKING:
    from swell.train.sync.mesh import Mesh, Waits

STOP = -1
"""Stands in place of a candidate's number: save the job's state and end this run."""
_STANDSTILL_S = 1.0
"""A step that waits for others for this long, and for three steps, is reported."""
_SUSPECT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the coordinator something."""

    message: protocol.FromWorker


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect the mesh of a candidate in the background; then `Standing.connected`."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give a mesh up, which wakes threads that wait for its members."""

    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Try:
    """Find out which of these workers can be reached, and tell the coordinator (a check)."""

    number: int
    addresses: dict[str, Address]


@dataclass(frozen=True, slots=True)
class End:
    """End this process at once."""

    code: int


@dataclass(frozen=True, slots=True)
class Complain:
    """Write to the worker's log that the coordinator refused a message."""

    reason: str


Instruction = Send | Connect | Abandon | Try | End | Complain


class Standing:
    """One worker's place in its job. Invariant: `meshes` has at most the mesh of the present offer."""

    def __init__(self, name: str, *, lease_s: float | None = None) -> None:
        self.name = name
        self.status = Status.STARTING
        self.epoch = 0
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.current: Mesh | None = None
        """The mesh of the generation that this worker is in."""
        self.offer: Offer | None = None
        """The latest candidate."""
        self.meshes: dict[int, Mesh] = {}
        self.welcome: protocol.Welcome | None = None
        """The coordinator's first message."""
        self.stop = False
        """True once the job was asked to save its state and end."""
        self._turn: int | None = None
        """The epoch that the job has gone on to, while this worker was ready for another one."""
        self._broken = self._operation = 0
        self._pinned = 0
        """The candidate that this worker has agreed to: a newer one has to wait, unless it is a recovery."""
        self._deferred: list[Offer | None] = []
        self._lease_s = lease_s
        """How long to train on without a coordinator on another host; None if it is on this one."""
        self._lost_s: float | None = None
        self._suspected: dict[str, float] = {}
        self._stood: Any = None
        """The exchange whose standstill was last reported."""

    # ------------------------------------------------------------------ events: the coordinator

    def hear(self, message: protocol.ToWorker) -> list[Instruction]:
        """The coordinator sent a message."""
        match message:
            case protocol.Welcome():
                self._lost_s = None
                self.welcome = self.welcome or message
            case protocol.Fenced():
                return [End(FENCED)]
            case protocol.GoToEpoch(epoch):
                if self.status is Status.READY and epoch != self.epoch:
                    self._turn, self.status = epoch, Status.STARTING
            case protocol.SaveAndLeave():
                self.stop = True
            case protocol.NextGeneration(offer):
                return self._candidate(offer)
            case protocol.TryReach(number, addresses):
                return [Try(number, {n: at for n, at in addresses.items() if at and n != self.name})]
            case protocol.Error(error):
                return [Complain(error)]
        return []

    def _candidate(self, offer: Offer | None) -> list[Instruction]:
        if offer is not None and self.offer is not None and offer.number == self.offer.number:
            self.offer.addresses.update({name: at for name, at in offer.addresses.items() if at})
            return []
        recovery = offer is not None and offer.recovery
        if self._pinned and not recovery:
            self._deferred.append(offer)
            return []
        self._pinned, self._deferred, self.offer = 0, [], offer
        out: list[Instruction] = [Abandon(mesh) for mesh in self.meshes.values()]
        self.meshes = {}
        if recovery and self.current is not None:
            out.append(Abandon(self.current))  # the main thread may wait for a peer that will not answer
        if offer is not None and self.name in offer.members:
            out.append(Connect(offer))
        return out

    def away(self, now_s: float) -> list[Instruction]:
        """The coordinator is not connected: stop training before it may start others in this one's place."""
        if self._lease_s is None or self.welcome is None:
            return []
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        over = now_s - self._lost_s > self._lease_s
        return [Abandon(self.current)] if over and self.current is not None else []

    # ------------------------------------------------------------------ events: other workers

    def is_offered(self, number: int) -> bool:
        """Whether candidate `number` is still the latest one."""
        return self.offer is not None and self.offer.number == number

    def connected(self, mesh: Mesh) -> bool:
        """The mesh of a candidate is connected; False if the candidate was replaced meanwhile."""
        if self.is_offered(mesh.number):
            self.meshes[mesh.number] = mesh
        return mesh.number in self.meshes

    def suspect(self, other: str, now_s: float) -> list[Instruction]:
        """The link to another worker seems to be cut: tell the coordinator, now and then."""
        if now_s - self._suspected.get(other, float("-inf")) <= _SUSPECT_EVERY_S:
            return []
        self._suspected[other] = now_s
        return [Send(protocol.Suspect(other))]

    def standstill(self, waits: Waits | None, step: int, step_s: float) -> list[Instruction]:
        """Report an exchange that waits for others much longer than a step takes, once."""
        late = waits is not None and waits.since_s > max(_STANDSTILL_S, 3 * step_s)
        if waits is None or not late or waits.exchange == self._stood:
            return []
        self._stood = waits.exchange
        return [Send(protocol.Waiting(step, tuple(waits.workers)))]

    # ------------------------------------------------------------------ events: the main thread

    def hello(self, pid: int, address: Address) -> protocol.WorkerHello:
        """What a new connection to the coordinator begins with: it repeats what lost messages said."""
        return protocol.WorkerHello(
            worker=self.name,
            pid=pid,
            address=address,
            status=self.status,
            generation=self.generation,
            members=self.members,
            epoch=self.epoch,
            broken=self._broken,
            operation=self._operation,
        )

    def ready(self, epoch: int) -> list[Instruction]:
        """This worker is prepared for `epoch`."""
        self.status, self.epoch, self._turn = Status.READY, epoch, None
        return [Send(protocol.Ready(epoch))]

    def enter(self, mesh: Mesh, step: int, epoch: int) -> list[Instruction]:
        """This worker has entered the generation of `mesh`."""
        self.current, self.generation, self.members = mesh, mesh.number, mesh.members
        self.status, self._broken, self.epoch = Status.MEMBER, 0, epoch
        self.meshes = {n: m for n, m in self.meshes.items() if n > mesh.number}
        return [Send(protocol.Switched(mesh.number, mesh.members, epoch, step)), *self.release()]

    def broke(self, mesh: Mesh, operation: int) -> list[Instruction]:
        """This worker's generation is broken, in `operation`."""
        self._broken, self._operation = mesh.number, operation
        return [Send(protocol.Broken(mesh.number, operation, mesh.lost, mesh.certain))]

    def end(self, status: Status, operation: int | None = None) -> None:
        """This worker leaves, or its loop is over (DONE): it takes no part in `operation`."""
        self.status = status
        self._operation = self._operation if operation is None else operation

    def hold(self, number: int) -> None:
        """Defer newer candidates until `release`: all members have agreed on `number`."""
        if self.is_offered(number):
            self._pinned = number

    def release(self) -> list[Instruction]:
        """Let newer candidates replace the one that `pick` or `hold` kept."""
        self._pinned = 0
        deferred, self._deferred = self._deferred, []
        return self._candidate(deferred[-1]) if deferred else []

    # ------------------------------------------------------------------ questions of the main thread

    def pick(self, epoch: int) -> int:
        """The candidate that this worker, in `epoch`, could switch to now, or 0; kept until `release`."""
        offer = self.offer
        if offer is None or offer.recovery or offer.number <= self.generation:
            return 0
        if offer.epoch != epoch and self.brings_newcomers(offer.number):
            return 0  # its newcomers are in another epoch; the coordinator will tell them
        if self.name in offer.members and offer.number not in self.meshes:
            return 0
        self._pinned = offer.number
        return offer.number

    def take(self, number: int) -> Mesh | None:
        """The mesh of an agreed candidate; None if this worker is not in it and has to leave.

        Raises PeerLost if a recovery has replaced the candidate.
        """
        offer = self.offer
        if offer is None or offer.number != number:
            raise PeerLost(f"candidate {number} was replaced by a newer one")
        return self.meshes[number] if self.name in offer.members else None

    def brings_newcomers(self, number: int) -> bool:
        """Whether candidate `number` is the latest one and has members that this generation has not."""
        offer = self.offer
        if offer is None or offer.number != number:
            return False
        return not set(offer.members) <= set(self.members)

    def joinable(self) -> Mesh | int | None:
        """A connected candidate, or the epoch that the job has gone on to; None if neither is there yet."""
        if self._turn is not None:
            return self._turn
        mesh = self.meshes.get(self.offer.number) if self.offer is not None else None
        return None if mesh is None or mesh.broken else mesh

    def replacement(self, after: int) -> Mesh | bool:
        """The mesh of the generation that replaces `after`; True if this worker is out, False if none."""
        offer = self.offer
        if offer is None or offer.number <= after or not offer.recovery:
            return False
        return self.meshes.get(offer.number, self.name not in offer.members)
