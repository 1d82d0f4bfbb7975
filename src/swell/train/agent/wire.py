"""The wire protocol between coordinator, workers, launcher and command line (docs/wire-protocol.md).

Frames are length-prefixed JSON objects. A connection starts with a mutual challenge over the job's secret;
afterwards every frame carries a MAC under a key of that connection, with a counter, so that frames can
neither be forged nor replayed. Nothing is ever unpickled.

`Channel` is the protocol without any I/O (bytes in, messages out); `Connection` is the blocking socket around
it that workers and tools use. The coordinator puts the same `Channel` behind its event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from typing import Any

from swell.train.agent.errors import TrainError

VERSION = 1
MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")
_MAC_BYTES = 16

Message = dict[str, Any]


class WireError(TrainError):
    """The other side does not speak the protocol, or does not have this job's secret."""


def new_secret() -> str:
    """A fresh secret for one job, as text."""
    return os.urandom(32).hex()


def _proof(secret: bytes, role: bytes, first: str, second: str) -> str:
    text = role + b"|" + first.encode() + b"|" + second.encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


class Channel:
    """One end of a connection, without I/O: feed it bytes, get messages; give it messages, get bytes.

    The accepting side speaks first: hello with a nonce; the client answers with its own nonce and a proof;
    the server proves itself in turn. `established` turns true when this end has verified the other.
    """

    def __init__(self, secret: str, *, server: bool) -> None:
        self._secret = secret.encode()
        self._server = server
        self._nonce = os.urandom(16).hex()
        self._buffer = bytearray()
        self._key = b""
        self._sent = 0
        self._received = 0
        self.established = False

    def opening(self) -> bytes:
        """The bytes this end sends before having heard anything."""
        if not self._server:
            return b""
        return self._plain({"swell": VERSION, "nonce": self._nonce})

    def feed(self, data: bytes) -> tuple[list[Message], bytes]:
        """Take received bytes; return the messages they complete and bytes to send back (handshake only)."""
        self._buffer += data
        messages: list[Message] = []
        reply = b""
        while (frame := self._next_frame()) is not None:
            if self._key:
                messages.append(self._open(frame))
            else:
                reply += self._shake(_parse(frame))
        return messages, reply

    def encode(self, message: Message) -> bytes:
        """The frame that carries `message`."""
        if not self.established:
            raise WireError("a message was sent before the handshake was over")
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        mac = self._mac(b"s" if self._server else b"c", self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body) + _MAC_BYTES) + mac + body

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES + _MAC_BYTES:
            raise WireError(
                f"the other side announced a frame of {length} bytes; this is not a swell connection"
            )
        if len(self._buffer) < _LENGTH.size + length:
            return None
        frame = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return frame

    def _open(self, frame: bytes) -> Message:
        mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        expected = self._mac(b"c" if self._server else b"s", self._received, body)
        if not hmac.compare_digest(mac, expected):
            raise WireError("a frame failed its check: wrong secret or a damaged connection")
        self._received += 1
        return _parse(body)

    def _mac(self, direction: bytes, counter: int, body: bytes) -> bytes:
        text = direction + _COUNTER.pack(counter) + body
        return hmac.new(self._key, text, hashlib.sha256).digest()[:_MAC_BYTES]

    def _shake(self, message: Message) -> bytes:
        if "error" in message:
            raise WireError(f"the other side refused the connection: {message['error']}")
        if message.get("swell") != VERSION:
            raise WireError(
                f"the other side speaks version {message.get('swell')} of the protocol, this one {VERSION}; "
                "use the same release of swell on both sides"
            )
        nonce = str(message.get("nonce", ""))
        if self._server:
            expected = _proof(self._secret, b"client", self._nonce, nonce)
            if not hmac.compare_digest(str(message.get("proof", "")), expected):
                raise WireError("the client does not know the job's secret")
            self._key = _proof(self._secret, b"session", self._nonce, nonce).encode()
            self.established = True
            proof = _proof(self._secret, b"server", nonce, self._nonce)
            return self._plain({"swell": VERSION, "nonce": self._nonce, "proof": proof})
        if "proof" not in message:
            proof = _proof(self._secret, b"client", nonce, self._nonce)
            return self._plain({"swell": VERSION, "nonce": self._nonce, "proof": proof})
        expected = _proof(self._secret, b"server", self._nonce, nonce)
        if not hmac.compare_digest(str(message["proof"]), expected):
            raise WireError("the server does not know the job's secret")
        self._key = _proof(self._secret, b"session", nonce, self._nonce).encode()
        self.established = True
        return b""

    @staticmethod
    def _plain(message: Message) -> bytes:
        body = json.dumps(message).encode()
        return _LENGTH.pack(len(body)) + body


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise WireError(f"a frame is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("a frame is JSON but not an object")
    return message


class Connection:
    """A blocking, authenticated connection; `send` may be called from several threads."""

    def __init__(
        self, sock: socket.socket, secret: str, *, server: bool = False, timeout_s: float = 5.0
    ) -> None:
        self.sock = sock
        self._channel = Channel(secret, server=server)
        self._inbox: list[Message] = []
        self._lock = threading.Lock()
        sock.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(self._channel.opening())
        while not self._channel.established:
            self._read()
        sock.settimeout(None)

    @classmethod
    def open(cls, address: tuple[str, int], secret: str, *, timeout_s: float = 5.0) -> Connection:
        """Connect to `address` and prove to know `secret`."""
        sock = socket.create_connection(address, timeout=timeout_s)
        try:
            return cls(sock, secret, timeout_s=timeout_s)
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message."""
        with self._lock:
            self.sock.sendall(self._channel.encode(message))

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; ConnectionError when the other side is gone, TimeoutError when it is late."""
        self.sock.settimeout(timeout_s)
        try:
            while not self._inbox:
                self._read()
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(None)
        return self._inbox.pop(0)

    def pending(self) -> list[Message]:
        """Read once what has arrived (call when the socket is readable) and return complete messages."""
        self._read()
        messages, self._inbox = self._inbox, []
        return messages

    def request(self, message: Message, timeout_s: float = 10.0) -> Message:
        """Send a message and wait for one answer; an answer with `error` is raised."""
        self.send(message)
        answer = self.receive(timeout_s)
        if "error" in answer:
            raise TrainError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Close the socket; a blocked `receive` in another thread wakes up."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self) -> None:
        """Read exactly one frame: bytes after it may belong to another protocol on the same socket."""
        head = self._exactly(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES + _MAC_BYTES:
            raise WireError(f"a frame of {length} bytes was announced; this is not a swell connection")
        messages, reply = self._channel.feed(head + self._exactly(length))
        if reply:
            self.sock.sendall(reply)
        self._inbox += messages

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionError("the other side closed the connection")
            data += more
        return data
