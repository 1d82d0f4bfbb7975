"""The wire protocol of coordinator, workers, launcher and command line (docs/reference/wire-protocol.md).

Frames are length-prefixed JSON objects; `protocol` has the messages in them. A connection to another host is
encrypted first (`sealed`). A connection starts with a mutual challenge over the job's secret; afterwards
every frame carries a MAC under a key of that connection, with a counter, so that frames can neither be forged
nor replayed. Nothing is ever unpickled.

`Channel` is the protocol without any I/O (bytes in, messages out); `Connection` is the blocking socket around
it that workers and tools use. The coordinator puts the same `Channel` behind its event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import socket
import struct
import threading
import time
from typing import Any

from msgspec import Struct

from swell.train.agent.errors import TrainError
from swell.train.agent.protocol import JobFile, plain
from swell.train.agent.sealed import SealedSocket, Stream, crosses_hosts, holds

VERSION = 1
MOST_AT_ONCE = 256
"""Most messages that `Connection.pending` returns at a time."""
MAX_FRAME_BYTES = 16 << 20
MAX_HELLO_BYTES = 1024
"""Largest frame of a side that has not proved yet that it knows the secret: it may be anybody."""
HANDSHAKE_S = 5.0
"""How long a side may take to prove that it knows the secret."""
MOST_STRANGERS = 64
"""Most connections at a time that have not proved anything yet; further ones are closed at once."""
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
        if not secret:
            raise WireError("job.json has no secret")
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

    def encode(self, message: Struct | Message) -> bytes:
        """The frame that carries `message`."""
        if not self.established:
            raise WireError("a message was sent before the handshake was over")
        body = json.dumps(plain(message), default=plain, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        mac = self._mac(b"s" if self._server else b"c", self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body) + _MAC_BYTES) + mac + body

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        self.check_length(length)
        if len(self._buffer) < _LENGTH.size + length:
            return None
        frame = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return frame

    def check_length(self, length: int) -> None:
        """Raise WireError if a frame of this length may not come now."""
        if length > (MAX_FRAME_BYTES + _MAC_BYTES if self.established else MAX_HELLO_BYTES):
            raise WireError(
                f"the other side announced a frame of {length} bytes; this is not a swell connection"
            )

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
            raise WireError(f"the other side refused the connection: {message['error']!r:.200}")
        if message.get("swell") != VERSION:
            raise WireError(
                f"the other side speaks version {message.get('swell')!r:.20} of the protocol, "
                f"this one {VERSION}; use the same release of swell on both sides"
            )
        nonce = message.get("nonce")
        if not isinstance(nonce, str) or not nonce.isascii() or not nonce.isalnum() or len(nonce) > 64:
            raise WireError("the other side sent no nonce; this is not a swell connection")
        if self._server:
            expected = _proof(self._secret, b"client", self._nonce, nonce)
            if not _same(message.get("proof"), expected):
                raise WireError("the client does not know the job's secret")
            self._key = _proof(self._secret, b"session", self._nonce, nonce).encode()
            self.established = True
            proof = _proof(self._secret, b"server", nonce, self._nonce)
            return self._plain({"swell": VERSION, "nonce": self._nonce, "proof": proof})
        if "proof" not in message:
            proof = _proof(self._secret, b"client", nonce, self._nonce)
            return self._plain({"swell": VERSION, "nonce": self._nonce, "proof": proof})
        expected = _proof(self._secret, b"server", self._nonce, nonce)
        if not _same(message["proof"], expected):
            raise WireError("the server does not know the job's secret")
        self._key = _proof(self._secret, b"session", nonce, self._nonce).encode()
        self.established = True
        return b""

    @staticmethod
    def _plain(message: Message) -> bytes:
        body = json.dumps(message).encode()
        return _LENGTH.pack(len(body)) + body


def _same(given: object, expected: str) -> bool:
    """Compare a proof in constant time; what is no ASCII text is none."""
    if not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, expected)


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {error!s:.100}") from None
    if not isinstance(message, dict):
        raise WireError("a frame is JSON but not an object")
    return message


class Connection:
    """A blocking, authenticated connection; `send` may be called from several threads.

    Between hosts it is encrypted, unless `encrypt` is False, on both sides.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        *,
        server: bool = False,
        timeout_s: float = 5.0,
        encrypt: bool = True,
    ) -> None:
        by_s = time.monotonic() + timeout_s
        self.sock: Stream = sock
        if encrypt and crosses_hosts(sock.getsockname(), sock.getpeername()):
            self.sock = SealedSocket(sock, secret, server=server, timeout_s=timeout_s)
        self._channel = Channel(secret, server=server)
        self._inbox: list[Message] = []
        self._frame = bytearray()
        """The part of the next frame that has arrived, its length included."""
        self._error: OSError | WireError | None = None
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self.sock.sendall(self._channel.opening())
        while not self._channel.established:
            self._read(by_s)
        sock.settimeout(None)

    @classmethod
    def open(
        cls,
        address: tuple[str, int],
        secret: str,
        *,
        timeout_s: float = 5.0,
        connect_s: float | None = None,
        encrypt: bool = True,
    ) -> Connection:
        """Connect to `address` (in `connect_s` or else `timeout_s`) and prove to know `secret`."""
        sock = socket.create_connection(address, timeout=timeout_s if connect_s is None else connect_s)
        try:
            return cls(sock, secret, timeout_s=timeout_s, encrypt=encrypt)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def to_job(
        cls,
        address: tuple[str, int],
        config: JobFile,
        *,
        timeout_s: float = 5.0,
        connect_s: float | None = None,
    ) -> Connection:
        """Connect to `address` as the settings of the job (job.json) say."""
        return cls.open(
            address, config.secret, timeout_s=timeout_s, connect_s=connect_s, encrypt=config.encrypt
        )

    @classmethod
    def accepted(cls, sock: socket.socket, config: JobFile) -> Connection:
        """The other end of `to_job`."""
        return cls(sock, config.secret, server=True, encrypt=config.encrypt)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, message: Struct | Message) -> None:
        """Send one message."""
        with self._lock:
            self.sock.sendall(self._channel.encode(message))

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; ConnectionError when the other side is gone, TimeoutError when it is late."""
        by_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._inbox:
                self._read(by_s)
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(None)
        return self._inbox.pop(0)

    def pending(self) -> list[Message]:
        """The messages that have arrived, `MOST_AT_ONCE` at most; call when the socket is readable.

        Never waits for the rest of a message, whatever the other side does.
        """
        if self._error is not None:
            raise self._error
        try:
            for count in itertools.count():
                if count >= MOST_AT_ONCE and not holds(self.sock):
                    break
                while not self._complete():
                    self._receive_some(socket.MSG_DONTWAIT)
                self._take_frame()
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            if not self._inbox:
                raise
            self._error = error  # for the next call: what came before it counts
        messages, self._inbox = self._inbox, []
        return messages

    def limit_sending(self, timeout_s: float) -> None:
        """Have `send` fail if the other side takes nothing for so long; without this it waits for ever."""
        whole = int(timeout_s)
        limit = struct.pack("ll", whole, int((timeout_s - whole) * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def request(self, message: Struct | Message, timeout_s: float = 10.0) -> Message:
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

    def _read(self, by_s: float | None) -> None:
        """Read exactly one frame: bytes after it may belong to another protocol on the same socket."""
        while not self._complete():
            if by_s is not None and time.monotonic() >= by_s:
                raise TimeoutError("the other side is late")
            self.sock.settimeout(None if by_s is None else max(by_s - time.monotonic(), 0.001))
            self._receive_some(0)
        self._take_frame()

    def _missing(self) -> int:
        """How many bytes of the next frame have not arrived yet, as far as that is known."""
        if len(self._frame) < _LENGTH.size:
            return _LENGTH.size - len(self._frame)
        (length,) = _LENGTH.unpack_from(self._frame)
        self._channel.check_length(length)
        return int(_LENGTH.size + length - len(self._frame))

    def _complete(self) -> bool:
        return self._missing() == 0

    def _receive_some(self, flags: int) -> None:
        more = self.sock.recv(min(self._missing(), 1 << 20), flags)
        if not more:
            raise ConnectionError("the other side closed the connection")
        self._frame += more

    def _take_frame(self) -> None:
        frame, self._frame = bytes(self._frame), bytearray()
        messages, reply = self._channel.feed(frame)
        if reply:
            self.sock.sendall(reply)
        self._inbox += messages
