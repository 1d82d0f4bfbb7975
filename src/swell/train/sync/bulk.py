"""One exchange of a mesh with payloads: all members send and receive at the same time."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swell.train.agent.sealed import Stream, arrived, holds

if TYPE_CHECKING:
    from swell.train.sync.mesh import Mesh

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
