"""A worker's connections to other workers: meshes of candidates, and whether the links between hosts hold.

`Peers` connects the members of a candidate to each other in the background. For every member on another host
it also holds a *pulse*: one more connection over which nothing is said, so that the probes of the system
(`keepalive`) are all that goes over it. A mesh's own connections cannot tell a cut link from a member that
computes for a minute and reads nothing; a pulse can. Whoever notices something tells the coordinator, which
asks everybody for a `check`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping

from swell.train.agent.errors import PeerLost, Refused
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.protocol import Address, Joined, Joining, Met, Offer, Pulse, age, read
from swell.train.agent.records import fresh_token, use_records
from swell.train.agent.sealed import Stream
from swell.train.agent.wire import MOST_STRANGERS, Connection, Message, WireError
from swell.train.sync.mesh import Mesh, Peer

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
        config: Message,
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
                connection.send(Met())
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
            connection.send(Met())
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
    """Close a socket; whoever waits on it, here or at the other end, wakes up."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        sock.close()
