"""The connections of one generation: from every member to every other.

A mesh does two things: it exchanges one small message (with or without bulk data) between all members, and
it raises `PeerLost` when a member is gone. Every member waits for every other directly, so all of them see a
death at once; in a ring, by contrast, members that are no neighbours of the dead one wait for a time-out.
`abandon()` may be called from the control thread: it wakes a main thread that waits for a peer that will
never answer.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.train.agent.errors import OutOfStep, PeerLost, UsageError
from swell.train.agent.polling import readable
from swell.train.agent.sealed import Stream, arrived, holds

Views = Mapping[int, list[memoryview]]
"""By rank: memory to send from, or to receive into."""
_GLANCE_MS = 8.0


class Bulk:
    """What is still to be sent to each member and received from it, so that no two can block each other."""

    def __init__(self, mesh: Mesh, exchange: tuple[int, int], sinks: Views) -> None:
        self._mesh = mesh
        self._exchange = exchange
        self._sinks = sinks
        self._outgoing: dict[int, list[memoryview]] = {}
        self._incoming: dict[int, list[memoryview]] = {}
        self._waiting = set(mesh.peers)
        """The members from which something is still to come."""
        self.answers: dict[int, dict[str, Any]] = {}
        """The members' headers, by rank."""
        self._began_s: dict[int, float] = {}
        """By rank: when a member's header was here, and so the rest of what it sends was on its way."""

    def run(self, frame: Any, text: bytes, payloads: Views) -> None:
        """Send a header and each member's payload; receive theirs. `frame` makes a header's frame."""
        peers = self._mesh.peers
        by_descriptor = {peer.sock.fileno(): rank for rank, peer in peers.items()}
        poller = select.poll()
        for rank, peer in peers.items():
            bulk = [part.cast("B") for part in payloads.get(rank, []) if len(part)]
            self._outgoing[rank] = [memoryview(frame(sum(len(part) for part in bulk)) + text), *bulk]
            poller.register(peer.sock.fileno(), select.POLLIN | select.POLLOUT)
            peer.sock.setblocking(False)
        try:
            for rank, peer in peers.items():  # a fast peer's frame may have arrived with its previous one
                self._mesh.inbox[rank] += arrived(peer.sock)
                self._take_header(rank)
            while self._waiting or any(self._outgoing.values()):
                events = poller.poll(_GLANCE_MS if self._mesh.processes else None)
                if not events:
                    self._mesh.glance()
                for descriptor, event in events:
                    rank = by_descriptor[descriptor]
                    if event & select.POLLOUT and self._outgoing[rank]:
                        _send_some(peers[rank].sock, self._outgoing[rank])
                    if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and rank in self._waiting:
                        self._receive(rank)
                    mask = select.POLLIN if rank in self._waiting else 0
                    mask |= select.POLLOUT if self._outgoing[rank] else 0
                    if mask:
                        poller.modify(descriptor, mask)
                    else:
                        poller.unregister(descriptor)
        finally:
            for peer in peers.values():
                with contextlib.suppress(OSError):
                    peer.sock.setblocking(True)

    def _receive(self, rank: int) -> None:
        """Take what has arrived from a member; of a sealed connection all of it, because no poll shows it."""
        sock = self._mesh.peers[rank].sock
        with contextlib.suppress(BlockingIOError):
            while rank in self._waiting:
                if rank not in self.answers:
                    data = sock.recv(1 << 16)
                    if not data:
                        raise self._mesh.gone(rank)
                    self._mesh.inbox[rank] += data
                    self._take_header(rank)
                else:
                    left = self._incoming[rank]
                    count = sock.recv_into(left[0])
                    if count == 0:
                        raise self._mesh.gone(rank)
                    _advance(left, count)
                    self._check_complete(rank)
                if not holds(sock):
                    return

    def _take_header(self, rank: int) -> None:
        """Read a member's header if it is here, and the part of its payload that came with it."""
        header = self._mesh.parse(rank, *self._exchange)
        if header is None:
            return
        self.answers[rank] = header
        inbox = self._mesh.inbox[rank]
        left = [sink.cast("B") for sink in self._sinks.get(rank, []) if len(sink)]
        while left and inbox:
            count = min(len(left[0]), len(inbox))
            left[0][:count] = inbox[:count]
            del inbox[:count]
            _advance(left, count)
        self._incoming[rank], self._began_s[rank] = left, time.perf_counter()
        self._check_complete(rank)

    def _check_complete(self, rank: int) -> None:
        if not self._incoming[rank]:
            self._waiting.discard(rank)
            self._mesh.heard.add(rank)
            count = sum(len(sink.cast("B")) for sink in self._sinks.get(rank, []))
            self._mesh.note_arrival(rank, count, time.perf_counter() - self._began_s[rank])


def _send_some(sock: Stream, left: list[memoryview]) -> None:
    with contextlib.suppress(BlockingIOError):
        _advance(left, sock.send(left[0]))


def _advance(parts: list[memoryview], count: int) -> None:
    if count == len(parts[0]):
        parts.pop(0)
    else:
        parts[0] = parts[0][count:]


# ---------------------------------------------------------------------- the mesh of a generation


_FRAME = struct.Struct("!QBIQ")  # operation, phase, header bytes, payload bytes

READY, REDUCED, VOTE, ENTER, STATE, PIECE, LEVEL = range(7)

TREE_FROM = 24
"""From this many members on, small messages go along a tree (measured: decision 0005)."""
_CHILDREN = 8
_GLANCE_S = 0.008
"""How long to wait for a member before checking whether it is still alive."""
_PF_EXITING = 0x4
_LATEST = 12
"""Exchanges that a member remembers, to say what it did before it was out of step."""
_FITS_BYTES = 16 << 10
"""A header up to this size fits into the buffers of a connection. With a longer one a member must read while
it sends, or two of them wait for each other."""
MOST_HEADER_BYTES = 64 << 20
"""The longest header. A member that announces a longer one is not understood: its connection is given up."""

Header = dict[str, Any]


@dataclass(slots=True)
class Peer:
    """Another member: its connection and what it told about itself when connecting."""

    name: str
    sock: Stream
    about: Header


@dataclass(frozen=True, slots=True)
class Waits:
    """That an exchange waits for others."""

    exchange: tuple[int, int, int]
    """Generation, operation and phase."""
    since_s: float
    workers: list[str]


class Mesh:
    """All connections of one member in one generation."""

    def __init__(self, number: int, members: tuple[str, ...], me: str, peers: Mapping[int, Peer]) -> None:
        self.number = number
        self.members = members
        self.rank = members.index(me)
        self.size = len(members)
        self.peers = dict(peers)
        self.recovery = False
        """True if this replaces a generation that broke."""
        self.broken = False
        self.lost = ""
        """The peer whose connection ended first, or ''."""
        self.certain = False
        """True if the system says that `lost` is exiting, so that not just its connection ended."""
        self.processes: dict[int, int] = {}
        """Process ids of the members known to be on this host."""
        for peer in self.peers.values():
            peer.sock.settimeout(None)
            with contextlib.suppress(OSError):
                peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox = {rank: bytearray() for rank in self.peers}
        """What has arrived from each member and was not used yet."""
        self.heard: set[int] = set()
        """The members whose part of the present exchange is here."""
        self._awaited: tuple[int, ...] = ()
        """In an exchange along a tree: the members that this one waits for."""
        self._last_words = False
        """True if a leaving member's connection may end in the present exchange once its message is here."""
        self._present: tuple[int, int, float] | None = None
        """The present exchange: operation, phase and when it began."""
        self._begun = 0
        """How many exchanges this member has begun in this generation."""
        self._arrivals: dict[int, tuple[int, float]] = {}
        """By rank: bytes of payloads that have arrived, and for how many seconds they were on their way."""
        self._latest: deque[tuple[int, int, Any]] = deque(maxlen=_LATEST)
        """The last of them: operation, phase and what the script called."""

    def exchange(
        self,
        operation: int,
        phase: int,
        header: Header,
        payloads: Mapping[int, list[memoryview]] | None = None,
        sinks: Mapping[int, list[memoryview]] | None = None,
    ) -> list[Header]:
        """Send `header` (and each peer its payload) to all members; returns all headers in rank order.

        Payloads arrive in `sinks`; both sides have agreed on their sizes before. If any member has a payload
        in this exchange, all members give both, empty ones too: such an exchange never goes along a tree.
        """
        if self.broken:
            raise PeerLost(f"generation {self.number} was given up")
        if self.size == 1:
            return [header]
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MOST_HEADER_BYTES:
            what = header.get("what", "an exchange")
            raise UsageError(f"{what}: {len(text)} bytes are over the limit of {MOST_HEADER_BYTES}")
        self._begun += 1
        self._latest.append((operation, phase, header.get("what")))
        self.heard, self._last_words = set(), False
        self._present = (operation, phase, time.monotonic())
        try:
            small = payloads is None and sinks is None
            if small and self.size >= TREE_FROM:
                answers = self._exchange_along_tree(operation, phase, text)
            elif not small or len(text) > _FITS_BYTES:
                bulk = Bulk(self, (operation, phase), sinks or {})
                bulk.run(lambda size: _FRAME.pack(operation, phase, len(text), size), text, payloads or {})
                answers = bulk.answers
            else:
                frame = _FRAME.pack(operation, phase, len(text), 0) + text
                for peer in self.peers.values():
                    peer.sock.sendall(frame)
                self._last_words = phase == VOTE
                answers = {}
                for rank in self.peers:
                    answers[rank] = self._receive(rank, operation, phase)
                    self.heard.add(rank)
                self._last_words = False
            for rank, answer in answers.items():
                if answer.get("what") != header.get("what"):
                    self._complain(rank, (operation, phase), (operation, phase), answer, header)
        except OSError as error:
            raise PeerLost(f"generation {self.number} broke: {error}") from None
        finally:
            self._present = None
        answers[self.rank] = header
        return [answers[rank] for rank in range(self.size)]

    def history(self) -> str:
        """What this member has exchanged in this generation, in words, for the job's log."""
        names = [f"{one}.{phase}{f' {what}' if what else ''}" for one, phase, what in self._latest]
        return (
            f"generation {self.number} of {' '.join(self.members)}, {self._begun} exchanges, "
            f"the last ones (operation.phase): {', '.join(names)}"
        )

    def note_arrival(self, rank: int, count: int, seconds: float) -> None:
        """Note that `count` bytes of a payload have arrived, `seconds` after the first of them."""
        before, before_s = self._arrivals.get(rank, (0, 0.0))
        self._arrivals[rank] = (before + count, before_s + seconds)

    def take_arrivals(self) -> dict[str, tuple[int, float]]:
        """By member: bytes of payloads since the last call, and how many seconds they were on their way."""
        taken, self._arrivals = self._arrivals, {}
        return {self.members[rank]: arrival for rank, arrival in taken.items() if arrival[0]}

    def waits(self) -> Waits | None:
        """Which members the present exchange still waits for, if there is one; any thread may ask."""
        present = self._present
        if present is None or self.broken:
            return None
        silent = [rank for rank in self._awaited or list(self.peers) if rank not in self.heard]
        missing = [rank for rank in silent if not self._has_word(rank)] or silent
        if not missing:
            return None
        operation, phase, began_s = present
        names = [self.members[rank] for rank in missing]
        return Waits((self.number, operation, phase), time.monotonic() - began_s, names)

    def pair(self, rank: int) -> Mesh:
        """A mesh of this member and one other, over their connection; not while this mesh exchanges."""
        low, high = sorted((self.rank, rank))
        other = 1 if rank == high else 0
        names = (self.members[low], self.members[high])
        pair = Mesh(self.number, names, self.members[self.rank], {other: self.peers[rank]})
        pair.inbox[other] = self.inbox[rank]  # what arrives early belongs to the connection
        return pair

    def abandon(self) -> None:
        """Give this generation up: threads that wait on it, here or at the other end, wake up."""
        self.broken = True
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def look(self) -> None:
        """Raise PeerLost if a member is gone; for code that waits for members by other means."""
        self.glance()
        for rank, peer in self.peers.items():
            try:
                ended = self.broken or peer.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                raise self.gone(rank)

    def glance(self) -> None:
        """Check whether a member on this host is exiting.

        A killed process closes its sockets only after its memory has been freed, which may take a tenth of a
        second; /proc shows at once that it is exiting.
        """
        for rank, pid in self.processes.items():
            if self._last_words and self._awaited and rank not in self._awaited:
                continue  # a member that has all votes, and has sent them on, may leave
            if _exiting(pid) and not (self._last_words and self._has_word(rank)):
                self.certain = not self.broken
                raise self.gone(rank)

    def _has_word(self, rank: int) -> bool:
        """Whether that member's message of the present exchange has arrived."""
        if rank in self.heard or self.inbox[rank]:
            return True
        try:
            return bool(self.peers[rank].sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def gone(self, rank: int) -> PeerLost:
        """The error that a member is gone; the first one is remembered."""
        if not self.broken:
            self.lost = self.members[rank]
        return PeerLost(f"{self.members[rank]} is gone")

    def close(self) -> None:
        """Close the sockets; only the thread that uses the mesh may call this."""
        self.abandon()
        for peer in self.peers.values():
            peer.sock.close()

    # ------------------------------------------------------------------ small messages

    def _exchange_along_tree(self, operation: int, phase: int, text: bytes) -> dict[int, Header]:
        """Collect all headers at rank 0, each member those of its children first, and send all of them back.

        Every member has at most a parent and a few children to talk to; only rank 0's answer is read as JSON.
        """
        first = self.rank * _CHILDREN + 1
        children = range(first, min(first + _CHILDREN, self.size))
        parent = (self.rank - 1) // _CHILDREN
        self._last_words = phase == VOTE
        try:
            self._awaited = tuple(children)
            texts = [b"[%d,%s]" % (self.rank, text)]
            for child in children:
                texts.append(self._receive_text(child, operation, phase))
                self.heard.add(child)
            everything = b",".join(texts)
            if self.rank:
                self._awaited = (parent,)
                self._send_text(parent, operation, phase, everything)
                everything = self._receive_text(parent, operation, phase)
            for child in children:
                self._send_text(child, operation, phase, everything)
        finally:
            self._awaited, self._last_words = (), False
        return {rank: header for rank, header in json.loads(b"[%s]" % everything) if rank != self.rank}

    def _send_text(self, rank: int, operation: int, phase: int, text: bytes) -> None:
        self.peers[rank].sock.sendall(_FRAME.pack(operation, phase, len(text), 0) + text)

    def _receive(self, rank: int, operation: int, phase: int) -> Header:
        return _decode(self._receive_text(rank, operation, phase))

    def _receive_text(self, rank: int, operation: int, phase: int) -> bytes:
        head = self._read(rank, _FRAME.size)
        got_operation, got_phase, length, _ = _FRAME.unpack(head)
        text = self._read(rank, self._checked(rank, length))
        if (operation, phase) != (got_operation, got_phase):
            self._check(rank, (operation, phase), (got_operation, got_phase), _decode(text))
        return text

    def _read(self, rank: int, count: int) -> bytes:
        inbox, sock = self.inbox[rank], self.peers[rank].sock
        while len(inbox) < count:
            while self.processes and not holds(sock) and not readable([sock], _GLANCE_S):
                self.glance()
            data = sock.recv(1 << 16)
            if not data:
                raise self.gone(rank)
            inbox += data
        data = bytes(inbox[:count])
        del inbox[:count]
        return data

    def _checked(self, rank: int, length: int) -> int:
        several = self.size if self.size >= TREE_FROM else 1  # along a tree a message has many headers
        if length > several * (MOST_HEADER_BYTES + _FRAME.size):
            self.abandon()
            raise PeerLost(f"{self.members[rank]} announced a header of {length} bytes")
        return length

    def _check(self, rank: int, mine: tuple[int, int], theirs: tuple[int, int], header: Header) -> None:
        if mine != theirs:
            self._complain(rank, mine, theirs, header, {})

    def _complain(
        self, rank: int, mine: tuple[int, int], theirs: tuple[int, int], header: Header, own: Header
    ) -> None:
        self.abandon()
        me, other = self.members[self.rank], self.members[rank]
        raise OutOfStep(
            f"worker {other} is at another point of the script than {me}: {header.get('what', '?')} "
            f"(operation {theirs[0]}.{theirs[1]}) there, {own.get('what', '?')} ({mine[0]}.{mine[1]}) here; "
            "every worker must make the same calls of job.step, job.reduce, job.agree in the same order; a "
            "condition that differs between workers must first be agreed on with job.agree"
        )

    def parse(self, rank: int, operation: int, phase: int) -> Header | None:
        """Take a member's header out of its inbox, if all of it is here."""
        inbox = self.inbox[rank]
        if len(inbox) < _FRAME.size:
            return None
        got_operation, got_phase, length, _ = _FRAME.unpack_from(inbox)
        if len(inbox) < _FRAME.size + self._checked(rank, length):
            return None
        header = _decode(bytes(inbox[_FRAME.size : _FRAME.size + length]))
        del inbox[: _FRAME.size + length]
        self._check(rank, (operation, phase), (got_operation, got_phase), header)
        return header


def _decode(data: bytes) -> Header:
    header = json.loads(data)
    return header if isinstance(header, dict) else {}


def _exiting(pid: int) -> bool:
    """Whether a process is exiting, by its flags in /proc; False on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def solo(name: str = "w0") -> Mesh:
    """The mesh of a job with a single member."""
    return Mesh(0, (name,), name, {})
