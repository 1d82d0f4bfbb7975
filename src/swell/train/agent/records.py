"""Records: how two workers on different hosts encrypt gradients, for less CPU time than TLS takes.

Python's TLS encrypts 16 KiB at a time and copies the data several times on its way between memory and
socket. Two workers that are connected by TLS (`sealed`) therefore tell each other a random token over that
connection, compute one key for each direction from both tokens, and go on with AES-256-GCM in records of up
to 256 KiB. A record is encrypted straight from the gradients and decrypted straight to where they belong.
Both workers need the package `cryptography` for this; if one of them lacks it, the connection stays TLS. An
attacker on the network cannot bring that about, because the tokens go inside TLS.

A record is its length (4 bytes, authenticated), the encrypted bytes, and a tag of 16 bytes. The nonce is the
number of the record in its direction, which never starts again. So a record that was changed, left out,
repeated or moved fails its check, and the connection ends. Of a record that did not arrive completely
nothing is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any

from swell.train.agent.sealed import PIECE_BYTES, EncryptedSocket, SealedSocket, Stream

_LENGTH = struct.Struct("!I")
_NONCE = struct.Struct("!4xQ")
_TAG_BYTES = 16
_TOKEN_BYTES = 32
_AHEAD_BYTES = 64 << 10
"""How much is read from the socket while the length of the next record is unknown."""
KEY_LASTS = 1 << 18
"""Records (64 GiB at most) after which a key is replaced by its hash. AES-GCM allows 2^32."""


class Direction:
    """The key of one direction of a connection, and the number of its next record."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = _aead()(key)
        self._number = 0
        self._numbering = threading.Lock()
        """Held while a record gets its number: no two records may ever have the same one."""

    def encrypt(self, plain: memoryview, into: memoryview) -> memoryview:
        """Write the record of `plain` into `into`; returns the part of `into` that is to be sent."""
        end = _LENGTH.size + len(plain) + _TAG_BYTES
        _LENGTH.pack_into(into, 0, len(plain))
        aead, nonce = self._next()
        aead.encrypt_into(nonce, plain, into[: _LENGTH.size], into[_LENGTH.size : end])
        return into[:end]

    def decrypt(self, record: memoryview, into: memoryview) -> None:
        """Check the next record and write its content into `into`, which is as long as the content.

        Raises `ConnectionError` if this is not what the other side sent next; `into` is then all zeros.
        """
        from cryptography.exceptions import InvalidTag

        aead, nonce = self._next()
        try:
            aead.decrypt_into(nonce, record[_LENGTH.size :], record[: _LENGTH.size], into)
        except InvalidTag:
            into[:] = bytes(len(into))  # decrypt_into has written there what nobody vouches for
            raise ConnectionError("a record was changed, repeated or left out on its way") from None

    def _next(self) -> tuple[Any, bytes]:
        """The cipher and the nonce of the next record."""
        with self._numbering:
            number, self._number = self._number, self._number + 1
            if number and number % KEY_LASTS == 0:
                self._key = hmac.digest(self._key, b"swell: the next key", "sha256")
                self._aead = _aead()(self._key)
            return self._aead, _NONCE.pack(number)


class RecordSocket(EncryptedSocket):
    """A connected socket that carries records.

    One thread may send while another one receives, and any thread may ask `holds`.
    """

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes, arrived: bytes = b"") -> None:
        """`sending` and `receiving` are keys; `arrived` is what was already received of the records."""
        super().__init__(sock)
        self._sending, self._receiving = Direction(sending), Direction(receiving)
        size = _LENGTH.size + PIECE_BYTES + _TAG_BYTES
        self._out = memoryview(bytearray(size))
        self._in = memoryview(bytearray(size + max(_AHEAD_BYTES, len(arrived))))
        self._in[: len(arrived)] = arrived
        self._begin, self._end = 0, len(arrived)
        """Which part of `_in` has arrived and is not decrypted yet."""
        self._plain = memoryview(b"")
        """The rest of a decrypted record that was longer than what the reader had room for."""
        self._error = ""
        """Why nothing is read from this connection any more, or ''."""

    def _encrypt(self, piece: memoryview) -> memoryview:
        return self._sending.encrypt(piece, self._out)

    def recv_into(self, place: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket: waits for some bytes, and takes those of one record at most."""
        place = memoryview(place)
        try:
            while not (count := self._take(place)):
                if not self._receive_some(flags):
                    return 0
        except ConnectionError as error:
            self._error = str(error)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            raise
        return count

    def holds(self) -> bool:
        """Whether there is something to read without the network."""
        if self._error:
            return False
        here = self._end - self._begin
        return bool(self._plain) or (here >= _LENGTH.size and here >= self._announced())

    def arrived(self) -> bytes:
        """What can be read without the network: no poll shows that it is there."""
        found = bytearray()
        while self.holds():
            found += self.recv(PIECE_BYTES)
        return bytes(found)

    def _receive_some(self, flags: int) -> int:
        """Receive more of the record whose beginning is here; returns the number of bytes, 0 at the end."""
        here = self._end - self._begin
        self._in[:here] = self._in[self._begin : self._end]
        self._begin, self._end = 0, here
        # The rest of this record and the length of the next one.
        more = self._record_bytes() + _LENGTH.size - here if here >= _LENGTH.size else _AHEAD_BYTES
        received = self._sock.recv_into(self._in[here : here + more], 0, flags)
        self._end += received
        return received

    def _take(self, place: memoryview) -> int:
        """Read from what has arrived; returns the number of bytes."""
        if self._error:
            raise ConnectionError(self._error)
        if not self._plain:
            if not self.holds():
                return 0
            begin, end = self._begin, self._begin + self._record_bytes()
            count = end - begin - _LENGTH.size - _TAG_BYTES
            record, self._begin = self._in[begin:end], end
            if count <= len(place):
                self._receiving.decrypt(record, place[:count])
                return count
            plain = memoryview(bytearray(count))
            self._receiving.decrypt(record, plain)
            self._plain = plain
        count = min(len(place), len(self._plain))
        place[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _record_bytes(self) -> int:
        """How long the record is whose length has arrived; raises `ConnectionError` if it may not be."""
        whole = self._announced()
        content = whole - _LENGTH.size - _TAG_BYTES
        if not 0 < content <= PIECE_BYTES:
            raise ConnectionError(f"a record of {content} bytes was announced")
        return whole

    def _announced(self) -> int:
        return int(_LENGTH.size + _LENGTH.unpack_from(self._in, self._begin)[0] + _TAG_BYTES)


def fresh_token(sock: Stream) -> str:
    """This side's token, to be told to the other side over `sock`; '' if this side cannot use records."""
    return secrets.token_hex(_TOKEN_BYTES) if isinstance(sock, SealedSocket) and _aead() is not None else ""


def use_records(sock: Stream, own: str, other: str) -> Stream:
    """Go on with records, by the tokens that both sides told each other; if one is '', `sock` stays as it is.

    The keys depend on both tokens, so a key is new as long as one of the two sides has a fresh token.
    """
    if not isinstance(sock, SealedSocket) or not own or not other:
        return sock
    try:
        sender, receiver = bytes.fromhex(own), bytes.fromhex(other)
    except ValueError:
        raise ConnectionError("the other side sent a token that is not hexadecimal") from None
    if len(receiver) != _TOKEN_BYTES or sender == receiver:
        raise ConnectionError("the other side sent a token that cannot be one of its own")
    plain, arrived = sock.leave()
    return RecordSocket(plain, _key(sender, receiver), _key(receiver, sender), arrived)


def _key(sender: bytes, receiver: bytes) -> bytes:
    """The key for what the side with the token `sender` sends."""
    return hmac.digest(sender + receiver, b"swell: the key of one direction", hashlib.sha256)


@functools.cache
def _aead() -> Any:
    """AES-GCM of the package `cryptography`; None if that is missing, or older than 47."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return AESGCM if hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into") else None
