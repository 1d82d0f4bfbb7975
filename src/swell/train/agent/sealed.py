"""Encrypted connections between hosts: TLS 1.3, in which both sides prove that they have the job's secret.

`Seal` is one end of such a connection without any I/O; the coordinator has it behind its event loop.
`SealedSocket` is a socket with a seal, and is used like a socket by `wire.Connection` and by meshes. Within
one host nothing is sealed: who could read the loopback could also read the processes' memory.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import ipaddress
import socket
import ssl
import tempfile
import threading
import time
from typing import Any

from swell.train.agent.certificate import certificate

MOST_HELLO_BYTES = 16 << 10
"""Most that is read from a side before it has proved anything; a handshake has about 1.5 KiB."""
_RECORD = 16 << 10
PIECE_BYTES = 256 << 10
"""How much is encrypted and sent at once."""


class Seal:
    """One end of an encrypted connection, without I/O: bytes of the network in, bytes for it out."""

    def __init__(self, secret: str, *, server: bool) -> None:
        self._received, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(secret, server).wrap_bio(self._received, self._out, server_side=server)
        self._strange = 0
        self.established = False
        """True once the other side has proved that it has the secret."""

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take what the network brought; returns what is to be sent in answer (only in the handshake)."""
        self._received.write(data)
        if not self.established:
            self._strange += memoryview(data).nbytes
            try:
                self._tls.do_handshake()
                self.established = True
            except ssl.SSLWantReadError:
                if self._strange > MOST_HELLO_BYTES:
                    raise ConnectionError("the other side sends much and proves nothing") from None
        return self._out.read()

    def seal(self, data: bytes | memoryview) -> bytes:
        """What is to be sent so that the other side reads `data`."""
        self._tls.write(data)
        return self._out.read()

    def read(self) -> bytes:
        """Everything that the other side said, as far as it has arrived."""
        parts = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while more := self._tls.read(_RECORD):
                parts.append(more)
        return b"".join(parts)

    def read_into(self, place: memoryview) -> int:
        """As `read`, as much as there is room for; returns the number of bytes."""
        count = 0
        while count < len(place):
            try:
                more = self._tls.read(len(place) - count, place[count:])
            except ssl.SSLWantReadError:
                break
            if not more:
                break
            count += int(more)
        return count

    def holds(self) -> bool:
        """Whether there may be something to read without the network."""
        return bool(self._tls.pending() or self._received.pending)

    def rest(self) -> bytes:
        """What the network brought after the last sealed bytes: TLS takes no more than its own records."""
        if self._tls.pending():
            raise ConnectionError("the other side said more before it left TLS")
        return self._received.read()


class EncryptedSocket(abc.ABC):
    """A connected socket whose traffic is encrypted; has those methods of a socket that are used here."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent = memoryview(b"")
        """The rest of an encrypted piece that the system did not take at once."""
        self._piece = 0
        """How much of what `send` was given is in that piece."""

    def recv(self, count: int, flags: int = 0) -> bytes:
        """As of a socket. With MSG_PEEK a byte stands for "there is something", whatever was said."""
        if flags & socket.MSG_PEEK:
            return b"?" if self.holds() else self._sock.recv(1, flags)
        place = memoryview(bytearray(min(count, PIECE_BYTES)))
        return bytes(place[: self.recv_into(place, flags=flags)])

    @abc.abstractmethod
    def recv_into(self, place: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket."""

    @abc.abstractmethod
    def holds(self) -> bool:
        """Whether there may be something to read without the network."""

    @abc.abstractmethod
    def arrived(self) -> bytes:
        """What can be read without the network: no poll shows that it is there."""

    def send(self, data: Any) -> int:
        """As of a socket; if it cannot go on without waiting, it wants the same data again the next time."""
        if not self._unsent:
            piece = memoryview(data)[:PIECE_BYTES]
            self._piece = len(piece)
            self._unsent = self._encrypt(piece)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        return self._piece

    @abc.abstractmethod
    def _encrypt(self, piece: memoryview) -> memoryview:
        """What is to be sent so that the other side reads `piece`; it is used until all of it is sent."""

    def sendall(self, data: Any) -> None:
        """As of a socket."""
        left = memoryview(data).cast("B")
        while left:
            left = left[self.send(left) :]

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """As of a socket."""
        self._sock.settimeout(timeout_s)

    def setblocking(self, flag: bool) -> None:
        """As of a socket."""
        self._sock.setblocking(flag)

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        """As of a socket."""
        self._sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """As of a socket."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """As of a socket."""
        self._sock.close()


class SealedSocket(EncryptedSocket):
    """A connected socket with a seal."""

    def __init__(self, sock: socket.socket, secret: str, *, server: bool, timeout_s: float) -> None:
        super().__init__(sock)
        self._seal = Seal(secret, server=server)
        self._using = threading.Lock()
        """Held while the seal is used, which never waits: one thread may send while another receives."""
        self._place = memoryview(bytearray(PIECE_BYTES))
        by_s = time.monotonic() + timeout_s
        answer = self._seal.feed(b"")
        while True:
            sock.settimeout(max(by_s - time.monotonic(), 0.001))
            sock.sendall(answer)
            if self._seal.established:
                break
            data = sock.recv(MOST_HELLO_BYTES)
            if not data:
                raise ConnectionError("the other side closed the connection")
            answer = self._seal.feed(data)

    def recv_into(self, place: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket: waits for some bytes, and takes as many as are there."""
        while True:
            with self._using:
                count = self._seal.read_into(place)
            if count:
                return count
            received = self._sock.recv_into(self._place, 0, flags)
            if not received:
                return 0
            with self._using:
                self._seal.feed(self._place[:received])

    def holds(self) -> bool:
        """Whether there may be something to read without the network."""
        with self._using:
            return self._seal.holds()

    def arrived(self) -> bytes:
        """What can be read without the network: no poll shows that it is there."""
        with self._using:
            return self._seal.read()

    def leave(self) -> tuple[socket.socket, bytes]:
        """The socket without its seal, and what has arrived after the last that was sealed.

        Both sides have read everything that the other one sealed; this socket is not used any more.
        """
        return self._sock, self._seal.rest()

    def _encrypt(self, piece: memoryview) -> memoryview:
        with self._using:
            return memoryview(self._seal.seal(piece))


Stream = socket.socket | EncryptedSocket
"""A connection to another process."""


def arrived(sock: Stream) -> bytes:
    """What has arrived and is not in the system's hands any more, so that no poll shows it."""
    return sock.arrived() if isinstance(sock, EncryptedSocket) else b""


def holds(sock: Stream) -> bool:
    """Whether there may be something to read that no poll shows."""
    return isinstance(sock, EncryptedSocket) and sock.holds()


def crosses_hosts(own: Any, other: Any) -> bool:
    """Whether a connection between these two addresses leaves this host; both ends come to the same answer.

    A connection to an address of the own host has that address at both ends.
    """
    if not isinstance(own, tuple) or not isinstance(other, tuple) or own[0] == other[0]:
        return False
    return not ipaddress.ip_address(other[0].partition("%")[0]).is_loopback


@functools.lru_cache(maxsize=8)
def _context(secret: str, server: bool) -> ssl.SSLContext:
    own, key = certificate(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who has the key of the job's one certificate belongs to the job
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # nothing is sent unasked: a pulse is a connection on which nothing comes
    context.load_verify_locations(cadata=own)
    with tempfile.NamedTemporaryFile("w", prefix="swell-") as file:  # readable by its owner only
        file.write(own + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
