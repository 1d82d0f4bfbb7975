"""Records between hosts: what arrives is exactly what was sent, in that order, or the connection ends."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import pytest
from tests.train.sync.test_mesh import together

from swell.train.agent import records
from swell.train.agent.records import RecordSocket, fresh_token, use_records
from swell.train.agent.sealed import PIECE_BYTES, SealedSocket, Stream, arrived, holds
from swell.train.sync.mesh import PIECE, READY, Mesh, Peer

SECRET = "5a" * 32
ONE, OTHER = bytes(range(32)), bytes(range(32, 64))


def sealed_pair() -> tuple[SealedSocket, SealedSocket]:
    """Two ends of a TLS connection."""
    near, far = socket.socketpair()
    made = together(
        lambda: SealedSocket(near, SECRET, server=True, timeout_s=30),
        lambda: SealedSocket(far, SECRET, server=False, timeout_s=30),
    )
    one, other = made
    assert isinstance(one, SealedSocket) and isinstance(other, SealedSocket), made
    one.settimeout(30)
    other.settimeout(30)
    return one, other


def record_pair() -> tuple[RecordSocket, RecordSocket]:
    """Two ends of a connection that has changed from TLS to records."""
    one, other = sealed_pair()
    tokens = fresh_token(one), fresh_token(other)
    ends = use_records(one, tokens[0], tokens[1]), use_records(other, tokens[1], tokens[0])
    assert isinstance(ends[0], RecordSocket) and isinstance(ends[1], RecordSocket)
    return ends[0], ends[1]


class Wire:
    """A sender and a receiver, and somebody between them who holds every record."""

    def __init__(self) -> None:
        near, self._from = socket.socketpair()
        self.to, far = socket.socketpair()
        for sock in (near, self._from, self.to, far):
            sock.settimeout(30)
        self.sender = RecordSocket(near, ONE, OTHER)
        self.receiver = RecordSocket(far, OTHER, ONE)

    def record(self, content: bytes) -> bytes:
        """The record of some content, as it goes over the network."""
        self.sender.sendall(content)
        return self._from.recv(PIECE_BYTES + 20, socket.MSG_WAITALL | socket.MSG_DONTWAIT)


def swapped(wire: Wire) -> bytes:
    first, second = wire.record(b"one"), wire.record(b"two")
    return second + first


def flipped(at: int) -> Callable[[Wire], bytes]:
    def change(wire: Wire) -> bytes:
        record = bytearray(wire.record(b"gradients" * 9))
        record[at] ^= 1
        return bytes(record) + wire.record(b"more")

    return change


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(flipped(4), id="the content changed"),
        pytest.param(flipped(-1), id="the tag changed"),
        pytest.param(flipped(3), id="the length changed"),
        pytest.param(swapped, id="two swapped"),
        pytest.param(lambda w: (w.record(b"one"), w.record(b"two"))[1], id="one left out"),
        pytest.param(lambda w: os.urandom(60), id="noise"),
        pytest.param(lambda w: struct.pack("!I", 0) + bytes(16), id="an empty record"),
        pytest.param(lambda w: struct.pack("!I", PIECE_BYTES + 1), id="too long a record"),
        pytest.param(lambda w: struct.pack("!I", 3) + b"abc" + bytes(16), id="plain text"),
    ],
)
def test_a_forged_record_ends_the_connection_and_gives_nothing(attack: Callable[[Wire], bytes]) -> None:
    wire = Wire()
    wire.to.sendall(attack(wire))
    place = bytearray(b"\xaa" * 200)
    with pytest.raises(ConnectionError, match="record"):
        wire.receiver.recv_into(place)
    assert not place.replace(b"\xaa", b"").strip(b"\0")  # untouched or wiped: nothing of the content
    good = wire.record(b"a good record")
    with pytest.raises(OSError):
        wire.to.sendall(good)  # the connection has been shut down
    with pytest.raises(ConnectionError, match="record"):
        wire.receiver.recv_into(place)
    assert not wire.receiver.holds() and wire.receiver.arrived() == b""
    with pytest.raises(OSError):
        wire.receiver.sendall(b"no answer either")


def test_a_repeated_record_ends_the_connection() -> None:
    wire = Wire()
    record = wire.record(b"once")
    wire.to.sendall(record + record)
    assert wire.receiver.recv(100) == b"once"
    with pytest.raises(ConnectionError, match="repeated"):
        wire.receiver.recv(100)


def test_a_record_sent_back_to_its_sender_is_refused() -> None:
    wire = Wire()
    wire._from.sendall(wire.record(b"mine"))
    with pytest.raises(ConnectionError, match="changed"):
        wire.sender.recv(100)


@pytest.mark.parametrize("missing", [1, 16, 90])
def test_a_record_cut_short_by_the_end_is_not_read(missing: int) -> None:
    wire = Wire()
    wire.to.sendall((wire.record(b"first") + wire.record(b"x" * 73))[:-missing])
    wire.to.close()
    assert wire.receiver.recv(100) == b"first"
    assert wire.receiver.recv(100) == b"" == wire.receiver.recv(100)


def test_keys_change_and_no_key_has_the_same_nonce_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEY_LASTS", 3)
    used = []
    real = records._aead()

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._real = key, real(key)
            self.decrypt_into = self._real.decrypt_into

        def encrypt_into(self, nonce: bytes, *others: object) -> None:
            used.append((self._key, nonce))
            self._real.encrypt_into(nonce, *others)

    monkeypatch.setattr(records, "_aead", lambda: Watched)
    one, other = record_pair()
    for number in range(10):
        for sender, receiver in ((one, other), (other, one)):
            sender.sendall(b"%d" % number)
            assert receiver.recv(10) == b"%d" % number
    assert len(set(used)) == len(used) == 20
    assert len({key for key, _ in used}) == 8  # four in each direction, none of them in both
    again = record_pair()
    again[0].sendall(b"a new connection")
    assert again[1].recv(100) == b"a new connection"
    assert len({key for key, _ in used}) == 9


def test_tokens_that_cannot_be_the_other_sides_own_are_refused() -> None:
    one, _ = sealed_pair()
    own = fresh_token(one)
    for wrong in (own, own[:32], own + "00", "zz" * 32):
        with pytest.raises(ConnectionError, match="token"):
            use_records(one, own, wrong)


def test_without_the_package_on_one_side_both_stay_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sealed_pair()
    token = fresh_token(one)
    assert token
    monkeypatch.setattr(records, "_aead", lambda: None)
    assert fresh_token(other) == ""
    assert use_records(one, token, "") is one and use_records(other, "", token) is other
    one.sendall(b"by TLS")
    assert other.recv(100) == b"by TLS"
    plain, _ = socket.socketpair()
    assert fresh_token(plain) == "" and use_records(plain, "", token) is plain


def test_a_record_longer_than_the_readers_place_is_read_in_parts() -> None:
    one, other = record_pair()
    content = os.urandom(2 * PIECE_BYTES + 5)
    found = bytearray()

    def read() -> None:
        place = bytearray(100_000)
        while len(found) < len(content):
            found.extend(place[: other.recv_into(place)])

    assert together(lambda: one.sendall(content), read) == [None, None]
    assert found == content and not other.holds()


def test_records_that_arrive_together_with_the_last_of_tls_are_not_lost() -> None:
    one, other = sealed_pair()
    tokens = fresh_token(one), fresh_token(other)
    one.sendall(b"the last of TLS")
    sender = use_records(one, *tokens)
    for content in (b"first", b"second", b"y" * 50_000):
        sender.sendall(content)  # the other side has read nothing yet: it all waits in one socket
    assert other.recv(15) == b"the last of TLS"
    receiver = use_records(other, tokens[1], tokens[0])
    assert receiver.recv(100) == b"first" and holds(receiver)
    assert arrived(receiver) == b"second" + b"y" * 50_000 and not holds(receiver)


def test_a_message_that_nobody_read_before_the_change_ends_the_connection() -> None:
    one, other = sealed_pair()
    tokens = fresh_token(one), fresh_token(other)
    one.sendall(b"read me, and me")
    assert other.recv(7) == b"read me"
    with pytest.raises(ConnectionError, match="before it left TLS"):
        use_records(other, tokens[1], tokens[0])


def test_both_sides_send_more_than_the_sockets_hold_at_the_same_time() -> None:
    ends: tuple[Stream, Stream] = record_pair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    names = ("w0", "w1")
    meshes = [
        Mesh(1, names, "w0", {1: Peer("w1", ends[0], {})}),
        Mesh(1, names, "w1", {0: Peer("w0", ends[1], {})}),
    ]
    size = 3_000_001

    def talk(mesh: Mesh) -> bool:
        other = 1 - mesh.rank
        good = True
        for number in range(3):
            out, sink = bytes([number + mesh.rank]) * size, bytearray(size)
            mesh.exchange(number, PIECE, {}, {other: [memoryview(out)]}, {other: [memoryview(sink)]})
            good = good and sink == bytes([number + other]) * size
            good = good and mesh.exchange(100 + number, READY, {"r": mesh.rank}) == [{"r": 0}, {"r": 1}]
        return good

    assert together(lambda: talk(meshes[0]), lambda: talk(meshes[1])) == [True, True]
    for mesh in meshes:
        mesh.close()
