"""A worker's side of the control plane: what it knows of its place in the job, its connections to other
workers, and the thread that talks to the coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swell.train.agent import protocol
from swell.train.agent.errors import FENCED, RESPAWN, PeerLost, Refused
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.polling import readable, writable
from swell.train.agent.protocol import Address, Joined, Joining, Mapped, Offer, Pulse, Status, age, read
from swell.train.agent.records import fresh_token, use_records
from swell.train.agent.sealed import Stream
from swell.train.agent.wire import MOST_STRANGERS, Connection, Message, WireError
from swell.train.sync.mesh import Mesh, Peer

if TYPE_CHECKING:
    from swell.train.sync.mesh import Mesh, Waits

# ---------------------------------------------------------------------- its place in the job (pure)
# What a worker knows of its place in the job: a pure state machine, events in, instructions out.
#
# The events are the coordinator's messages, meshes that were connected, and what the worker's main thread
# does; `Line` carries out the instructions. It has the sockets, threads and clocks; meshes are only handed
# on.
#
#     starting --ready--> ready --(enter)--> member --(leave)--> leaving
#                           |                  |
#                         (turn)             (done)--> done


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


# ---------------------------------------------------------------------- connections to other workers
# A worker's connections to other workers: meshes of candidates, and whether the links between hosts hold.
#
# `Peers` connects the members of a candidate to each other in the background. For every member on another
# host it also holds a *pulse*: one more connection over which nothing is said, so that the probes of the
# system (`keepalive`) are all that goes over it. A mesh's own connections cannot tell a cut link from a
# member that computes for a minute and reads nothing; a pulse can. A worker that notices reports to the
# coordinator, which asks everybody for a `check`.


RETRY_S = 0.05
_ANSWER_S = 5.0
_PREPARE_S = 60.0
"""Longest that a peer may take to map memory before it counts as connected."""
_CONNECT_S = 1.0
"""Longest attempt to connect to a member: its system answers at once, however busy it is."""
_CHECK_S = 0.8
_PULSE = {"every_s": 1, "probes": 2}
_LATE_S = 2.0
"""A member on another host that has not connected after this long is suspected."""
_DIAL_S = 120.0
"""Longest that one candidate is tried to be connected."""


class Peers:
    """The connections of one worker to others, made and accepted in threads of their own."""

    def __init__(
        self,
        name: str,
        host: str,
        config: protocol.JobFile,
        changed: threading.Condition,
        suspect: Callable[[str], None],
    ) -> None:
        self.name = name
        self.host = host
        self.listener = socket.create_server((host, 0), backlog=64)
        self.introduce: Callable[[bool], Message] = lambda newcomer: {}
        """What a peer (a newcomer or a member) is told about this worker; called by connecting threads."""
        self.meet: Callable[[Message, int], None] = lambda about, candidate: None
        """Takes what a member of a candidate told about itself, and prepares for it, before the two count as
        connected."""
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self._config = config
        self._changed = changed
        """Guards what is below, and is notified when a peer has connected."""
        self._suspect = suspect
        self._inbound: dict[tuple[int, str], Peer] = {}
        self._addresses: dict[str, Address] = {}
        """Of the members on other hosts, those of a connected candidate included."""
        self._pulses: dict[str, Stream] = {}
        self._closed = False
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        """Taken by every connection until it has proved that it knows the job's secret."""
        threading.Thread(target=self._accept, name="swell-accept", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where other workers reach this one."""
        host, port = self.listener.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Accept nobody any more."""
        self._closed = True
        close(self.listener)

    def enter(self, mesh: Mesh) -> None:
        """Go on in the generation of `mesh`; with the lock held."""
        self.generation, self.members = mesh.number, mesh.members
        self._addresses = {name: at for name, at in self._addresses.items() if name in mesh.members}
        for key in [k for k in self._inbound if k[0] <= mesh.number]:
            close(self._inbound.pop(key).sock)

    # ------------------------------------------------------------------ connecting a candidate

    def connect(self, offer: Offer, wanted: Callable[[], bool]) -> dict[int, Peer] | None:
        """Connect to the members before this one in the list; those after it connect to this worker.

        Returns None once the candidate is not `wanted` any more: it was replaced, or this took too long.
        """
        rank = offer.members.index(self.name)
        peers: dict[int, Peer] = {}
        give_up_s = time.monotonic() + _DIAL_S

        def going_on() -> bool:
            return wanted() and time.monotonic() < give_up_s

        known = {name: at for name, at in dict(offer.addresses).items() if at is not None}
        far = {name: at for name, at in known.items() if at[0] != self.host}
        try:
            for other in range(rank):
                peers[other] = self._dial(offer, offer.members[other], going_on)
            expected = {(offer.number, offer.members[r]): r for r in range(rank + 1, len(offer.members))}
            if self._await(expected, peers, far, going_on):
                with self._changed:
                    self._addresses |= {name: at for name, at in far.items() if name != self.name}
                self._feel_all()
                return peers
        except (OSError, WireError, PeerLost):
            pass
        for peer in peers.values():  # the coordinator decides what comes next
            close(peer.sock)
        return None

    def _dial(self, offer: Offer, other: str, going_on: Callable[[], bool]) -> Peer:
        while True:
            address = offer.addresses.get(other)
            try:
                if address is None:  # the coordinator was started again, and sends it once it has it
                    raise ConnectionError(f"where {other} listens is not known yet")
                connection = Connection.to_job(address, self._config, connect_s=_CONNECT_S)
                keep_alive(connection.sock, every_s=10, probes=5)
                about, token = self.introduce(other not in self.members), fresh_token(connection.sock)
                connection.send(Joining(offer.number, self.name, about, token))
                answer = read(Joined, connection.receive(_ANSWER_S))
                self.meet(answer.about, offer.number)
                connection.send(Mapped())
                connection.receive(_PREPARE_S)
                sock = use_records(connection.sock, token, answer.token)
                return Peer(other, sock, answer.about)
            except (OSError, Refused) as error:
                far = address is not None and address[0] != self.host
                if far and isinstance(error, OSError) and is_cut(error):
                    self._suspect(other)
                if not going_on():
                    raise PeerLost(f"{other} cannot be reached") from None
                time.sleep(RETRY_S)

    def _await(
        self,
        expected: Mapping[tuple[int, str], int],
        peers: dict[int, Peer],
        far: Mapping[str, Address],
        going_on: Callable[[], bool],
    ) -> bool:
        """Wait for those who connect to this worker, and add them to `peers`."""
        late_s = time.monotonic() + _LATE_S
        with self._changed:
            while going_on():
                missing = [name for number, name in expected if (number, name) not in self._inbound]
                if not missing:
                    for key, rank in expected.items():
                        peers[rank] = self._inbound.pop(key)
                    return True
                if time.monotonic() > late_s:
                    late_s += _LATE_S / 2
                    for name in [name for name in missing if name in far][:1]:
                        self._suspect(name)
                self._changed.wait(0.5)
        return False

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                time.sleep(RETRY_S)  # no descriptor is free at the moment, say; `close` sets `_closed` first
                continue
            if not self._strangers.acquire(blocking=False):
                close(sock)
                continue
            threading.Thread(target=self._receive, args=(sock,), name="swell-peer", daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        try:
            self._welcome(sock)
        finally:
            self._strangers.release()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            connection = Connection.accepted(sock, self._config)
            message = connection.receive(_ANSWER_S)
            if "pulse" in message:
                self._hold(read(Pulse, message).pulse, connection.sock)
                return
            keep_alive(sock, every_s=10, probes=5)
            joining = read(Joining, message)
            number, other = joining.mesh, joining.worker
            if number <= self.generation:
                raise PeerLost("stale")
            token = fresh_token(connection.sock)
            connection.send(Joined(self.introduce(other not in self.members), token))
            self.meet(joining.about, number)
            connection.receive(_PREPARE_S)
            connection.send(Mapped())
            mesh_sock = use_records(connection.sock, token, joining.token)
        except (OSError, WireError, PeerLost, Refused):
            close(sock)
            return
        except Exception:  # of `meet`, which prepares memory: the candidate does without this connection
            traceback.print_exc()
            close(sock)
            return
        with self._changed:
            self._inbound[number, other] = Peer(other, mesh_sock, joining.about)
            self._changed.notify_all()

    # ------------------------------------------------------------------ links between hosts

    def pulses(self) -> list[Stream]:
        """The pulses, to be watched: one that can be read has ended."""
        with self._changed:
            return list(self._pulses.values())

    def ended(self, socks: Iterable[Stream]) -> None:
        """Drop pulses that have ended, and suspect the links of those that did not end by themselves."""
        for sock in socks:
            with self._changed:
                name = next((n for n, s in self._pulses.items() if s is sock), None)
                if name is not None:
                    del self._pulses[name]
            if name is None:
                continue
            try:
                sock.recv(64, socket.MSG_DONTWAIT)
            except OSError as error:
                if is_cut(error):
                    self._suspect(name)
            close(sock)
        self._feel_all()

    def _feel_all(self) -> None:
        """Open a pulse to each older member on another host that has none; younger ones open theirs."""
        with self._changed:
            far = {name: at for name, at in self._addresses.items() if age(name) < age(self.name)}
            missing = {name: at for name, at in far.items() if name not in self._pulses}
            gone = [name for name in self._pulses if name not in self._addresses]
            for name in gone:
                close(self._pulses.pop(name))
        for name, address in missing.items():
            threading.Thread(target=self._feel, args=(name, address), name="swell-pulse", daemon=True).start()

    def _feel(self, name: str, address: Address) -> None:
        while not self._closed and self._addresses.get(name) == address and name not in self._pulses:
            try:
                connection = Connection.to_job(address, self._config, connect_s=_CONNECT_S)
                connection.send(Pulse(self.name))
            except ConnectionRefusedError:
                return  # the process has ended, which others find out
            except (OSError, WireError) as error:
                if isinstance(error, OSError) and is_cut(error):
                    self._suspect(name)
                time.sleep(_CONNECT_S)
            else:
                self._hold(name, connection.sock)

    def _hold(self, name: str, sock: Stream) -> None:
        keep_alive(sock, **_PULSE)
        with self._changed:
            before = self._pulses.pop(name, None)
            self._pulses[name] = sock
        if before is not None:
            close(before)


def is_cut(error: OSError) -> bool:
    """Whether this may be the end of a link, and not of a process at the other end of it."""
    cut = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
    return isinstance(error, TimeoutError) or error.errno in cut


def unreachable(addresses: Mapping[str, Address], own: str, timeout_s: float = _CHECK_S) -> list[str]:
    """Who of these cannot be reached; those on this host (`own`) always can.

    The other host's system accepts a connection, or refuses it, however busy the process is.
    """
    tries: dict[int, tuple[str, socket.socket]] = {}
    found = []
    poller = select.poll()
    for name, address in addresses.items():
        if address[0] == own:
            continue
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            found += [name] if is_cut(OSError(code, "")) else []
            sock.close()
            continue
        tries[sock.fileno()] = (name, sock)
        poller.register(sock.fileno(), select.POLLOUT)
    give_up_s = time.monotonic() + timeout_s
    while tries and (left_s := give_up_s - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left_s * 1e3):
            poller.unregister(descriptor)
            name, sock = tries.pop(descriptor)
            if is_cut(OSError(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "")):
                found.append(name)
            sock.close()
    for name, sock in tries.values():
        found.append(name)
        sock.close()
    return sorted(found)


def close(sock: Stream) -> None:
    """Close a socket; threads that wait on it, here or at the other end, wake up."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()


# ---------------------------------------------------------------------- the control thread
# A worker's control thread: it talks to the coordinator and carries out what `Standing` returns.
#
# The thread sends heartbeats with the latest report. Meshes of candidates are connected in further threads,
# while the main thread trains.
#
# A lost connection is made again. A malformed message is logged, and ends the connection too; the next ones
# come after growing pauses. Any other exception is an error of ours that leaves `Standing` half changed: it
# is logged, and the process ends to be started again.


_REACH_S = 2.0
_LONGEST_PAUSE_S = 5.0
"""Longest pause before a new connection to a coordinator that sent a malformed message."""
_LEASE = 0.75
"""Members train on while the coordinator is cut off from them, for this part of `away_s`."""


class Line:
    """The connection of one worker to its coordinator, whatever happens to either."""

    def __init__(
        self,
        directory: JobDirectory,
        config: protocol.JobFile,
        name: str,
        progress: Callable[[], tuple[int, Message]],
    ) -> None:
        self._directory, self._config = directory, config
        self._progress = progress
        """The worker's step and its latest report."""
        self._host = own_host(config)
        self._far = self._host != config.listens_at
        self._beat_s = min(0.5, config.silent_after_s / 6)
        self.standing = Standing(name, lease_s=_LEASE * config.away_s if self._far else None)
        self.changed = threading.Condition()
        """Guards `standing` and the outbox, and is notified when either changes."""
        self.peers = Peers(name, self._host, config, self.changed, self._suspect)
        self._outbox: list[protocol.FromWorker] = []
        self._open: Connection | None = None
        """The connection, while `_talk` has it."""
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._closed = False
        threading.Thread(target=self._run, name="swell-link", daemon=True).start()

    # ------------------------------------------------------------------ for all threads

    def do(self, instructions: list[Instruction]) -> None:
        """Carry out instructions; with the lock held."""
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self.send(message)
                case Connect(offer):
                    self._start(self._connect, offer)
                case Abandon(mesh):
                    mesh.abandon()
                case Try(number, addresses):
                    self._start(self._try, number, addresses)
                case Complain(reason):
                    self._complain(f"the coordinator refused a message: {reason}")
                case End(code):
                    os._exit(code)
        self.changed.notify_all()

    def send(self, message: protocol.FromWorker) -> None:
        """Queue a message to the coordinator."""
        with self.changed:
            self._outbox.append(message)
        self._poke()

    def send_now(self, message: protocol.FromWorker) -> None:
        """Send a short message from the caller's thread if that takes no waiting, and queue it otherwise.

        To wake the control thread takes five times as long, which shows where an epoch is some milliseconds.
        """
        with self.changed:
            if self._open is None or self._outbox or self._far or not writable(self._open):
                self.send(message)
                return
            with contextlib.suppress(OSError):  # the control thread finds out, and its greeting says the same
                self._open.send(message)

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages have been sent."""
        with self.changed:
            self.changed.wait_for(lambda: not self._outbox, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._poke()
        self.peers.close()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    # ------------------------------------------------------------------ the control thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            traceback.print_exc()
            self._complain("the error above is swell's own; this worker ends, to be started again")
            os._exit(RESPAWN)

    def _complain(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            sys.stderr.write(f"worker {self.standing.name}: {text:.300}\n")
            sys.stderr.flush()

    def _serve(self) -> None:
        connection: Connection | None = None
        pause_s = RETRY_S
        while not self._closed:
            try:
                connection = Connection.to_job(self._directory.address(), self._config, connect_s=_REACH_S)
                if self._far:
                    keep_alive(connection.sock, every_s=1, probes=2, unacknowledged_s=3.0)
                with self.changed:
                    # Messages of other types may be lost: the greeting repeats what they say.
                    keep = (protocol.WorkerEvent, protocol.Done)
                    self._outbox = [message for message in self._outbox if isinstance(message, keep)]
                    hello = self.standing.hello(os.getpid(), self.peers.address)
                connection.send(hello)
                self._open = connection
                self._talk(connection)
            except (OSError, WireError):
                pause_s = RETRY_S
            except Refused as error:
                self._complain(f"the coordinator sent a malformed message: {error}")
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with self.changed:
                self._open = None
                if connection is not None:
                    connection.close()
                self.do(self.standing.away(time.monotonic()))
            if not self._closed:
                time.sleep(pause_s)

    def _talk(self, connection: Connection) -> None:
        next_beat = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= next_beat:
                step, report = self._progress()
                connection.send(protocol.Beat(step, report))
                next_beat = now + self._beat_s
                self._look_for_standstill(step, float(report.get("step_s", 0.0)))
            self._empty_outbox(connection)
            pulses = self.peers.pulses()
            watch: list[Any] = [connection, self._wake_r, *pulses]
            ready = readable(watch, next_beat - time.monotonic())
            if ended := [sock for sock in pulses if sock in ready]:
                self.peers.ended(ended)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if connection in ready:
                for raw in connection.pending():
                    if (message := protocol.received(protocol.TO_WORKER, raw)) is not None:
                        with self.changed:
                            self.do(self.standing.hear(message))

    def _empty_outbox(self, connection: Connection) -> None:
        with self.changed:
            count = len(self._outbox)
            messages = self._outbox[:count]
        for message in messages:
            connection.send(message)
        if count:
            with self.changed:
                del self._outbox[:count]
                self.changed.notify_all()

    def _look_for_standstill(self, step: int, step_s: float) -> None:
        current = self.standing.current
        waits = current.waits() if current is not None else None
        with self.changed:
            self.do(self.standing.standstill(waits, step, step_s))

    # ------------------------------------------------------------------ threads for what takes a while

    def _start(self, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="swell-connect", daemon=True).start()

    def _try(self, number: int, addresses: dict[str, protocol.Address]) -> None:
        missing = unreachable(addresses, self._host)
        self.send(protocol.Checked(number, tuple(missing)))

    def _suspect(self, other: str) -> None:
        with self.changed:
            self.do(self.standing.suspect(other, time.monotonic()))

    def _connect(self, offer: protocol.Offer) -> None:
        found = self.peers.connect(offer, lambda: self.standing.is_offered(offer.number))
        if found is None:
            return
        mesh = Mesh(offer.number, offer.members, self.standing.name, found)
        mesh.recovery = offer.recovery
        with self.changed:
            if self.standing.connected(mesh):
                self.changed.notify_all()
                return
        mesh.close()


# ---------------------------------------------------------------------- for the main thread
# A worker's side of the control plane, for its main thread.
#
# At a step boundary the main thread only asks cheap questions (`offer`, `take`). It waits only when it has
# no generation to train in (`wait_join`, `wait_recovery`). `Line` has the thread that talks to the
# coordinator, `Standing` what is known of the job: events in, instructions out.


PATIENCE_S = 120.0
"""How long a worker that cannot train waits for the coordinator, before it ends to be started again."""


class Link:
    """What the main thread of one worker asks and reports."""

    def __init__(self, directory: JobDirectory, name: str) -> None:
        config = directory.config()
        if os.environ.get("SWELL_LAUNCH", config.launch) != config.launch:
            os._exit(FENCED)  # started for an earlier run of this job
        self.name = name
        self.directory = directory
        self.config = config
        self._pid = os.getpid()
        self.step = 0
        self.report: Message = {}
        """What heartbeats say, besides the step."""
        self.line = Line(directory, config, name, lambda: (self.step, self.report))
        self.peers = self.line.peers
        self._standing = self.line.standing
        self._changed = self.line.changed

    def welcome(self) -> protocol.Welcome:
        """The coordinator's first message: whether the job is training already, and in which epoch."""
        with self._changed:
            self._wait(lambda: self._standing.welcome is not None, PATIENCE_S, "to be welcomed")
            assert self._standing.welcome is not None
            return self._standing.welcome

    def announce_ready(self, epoch: int) -> None:
        """Tell the coordinator that this worker is prepared for `epoch`."""
        with self._changed:
            self.line.do(self._standing.ready(epoch))

    def wait_join(self) -> Mesh | int:
        """Wait for a connected candidate (its mesh) or for the job to go to another epoch (its number)."""
        with self._changed:
            self._wait(lambda: self._standing.joinable() is not None, None, "to join")
            found = self._standing.joinable()
            assert found is not None
            return found

    def offer(self, epoch: int) -> int:
        """The number of the candidate that this worker, in `epoch`, could switch to right now, or 0.

        The candidate is kept until `release`: once a worker has agreed, a newer one must not replace it.
        """
        standing = self._standing
        if standing.stop:
            return STOP
        offer = standing.offer
        if offer is None or offer.number <= standing.generation:  # most steps: no lock
            return 0
        with self._changed:
            return self._standing.pick(epoch)

    def hold(self, number: int) -> None:
        """Defer newer candidates until this worker has its state: all members have entered `number`."""
        with self._changed:
            self._standing.hold(number)

    def release(self) -> None:
        """Let newer candidates replace the one that `offer` or `hold` kept."""
        with self._changed:
            self.line.do(self._standing.release())

    def take(self, number: int) -> Mesh | None:
        """The mesh of an agreed candidate; None if this worker is not in it and has to leave.

        Raises PeerLost if a recovery has replaced the candidate.
        """
        with self._changed:
            return self._standing.take(number)

    def brings_newcomers(self, number: int) -> bool:
        """Whether candidate `number` is still there and has members that this generation has not."""
        with self._changed:
            return self._standing.brings_newcomers(number)

    def candidate(self) -> str:
        """The latest candidate in words, for the job's log."""
        offer = self._standing.offer
        return "none" if offer is None else f"{offer.number} of {' '.join(offer.members)}"

    def wait_recovery(self, broken: Mesh, operation: int) -> Mesh:
        """Report that a generation is broken, and wait for the mesh of the one that replaces it."""
        with self._changed:
            self.line.do(self._standing.broke(broken, operation))
            self._wait(
                lambda: bool(self._standing.replacement(broken.number)), PATIENCE_S, "for a new generation"
            )
            found = self._standing.replacement(broken.number)
        if isinstance(found, bool):  # the others went on without this worker
            raise SystemExit(RESPAWN)
        return found

    def entered(self, mesh: Mesh, step: int, epoch: int) -> None:
        """Report that this worker has entered the generation of `mesh`."""
        with self._changed:
            self.peers.enter(mesh)
            self.step = step
            self.line.do(self._standing.enter(mesh, step, epoch))

    def at_epoch(self, epoch: int) -> None:
        """Report that this worker begins `epoch`."""
        self._standing.epoch = epoch
        self.line.send_now(protocol.AtEpoch(epoch))

    def event(self, name: str, **fields: Any) -> None:
        """Add an event to the job's history."""
        self.line.send(protocol.WorkerEvent(name, fields))

    def leaving(self, number: int) -> None:
        """Report that this worker leaves: candidate `number` was agreed on without it."""
        with self._changed:
            self._standing.end(Status.LEAVING)
        self.line.send(protocol.Left(number))
        self.flush()

    def stopped(self) -> None:
        """Report that the job's state is on disk and that its workers leave."""
        self.line.send(protocol.Stopped())
        self.flush()

    def done(self, operation: int) -> None:
        """Report that this worker's training loop is over: it takes no part in `operation` and later ones."""
        with self._changed:
            self._standing.end(Status.DONE, operation)
        # A short job may end between two heartbeats, so the last report is sent now.
        self.line.send(protocol.Beat(self.step, self.report))
        self.line.send(protocol.Done(operation))

    def last_report(self) -> None:
        """Send the latest report, at the end of the process; a worker that left the job has none to send."""
        if os.getpid() == self._pid and self._standing.status in (Status.MEMBER, Status.DONE):
            self.line.send(protocol.Beat(self.step, self.report))
            self.flush()

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until all messages have been sent, at the end of the process."""
        self.line.flush(timeout_s)

    def close(self) -> None:
        """Close the connections; for workers inside a process that lives longer (tests)."""
        self.line.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        if not self._changed.wait_for(condition, timeout_s):
            # No failure of the script: a link is cut, say. The coordinator has the worker started again.
            sys.stderr.write(
                f"worker {self.name} waited {timeout_s:g} s {what}; it ends, to be started again. See"
                " logs/coordinator.log in the job's directory\n"
            )
            raise SystemExit(RESPAWN)
