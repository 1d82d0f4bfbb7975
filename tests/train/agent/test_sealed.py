"""Connections between hosts: who reads the wire learns nothing, who changes it ends a connection and nothing
else, and who has not the secret gets nowhere. Here the loopback plays the network between two hosts."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.train.agent.test_strangers import Running
from tests.train.sync.test_mesh import together
from tests.waiting import wait_until

from swell.train.agent import coordinator, wire
from swell.train.agent.certificate import certificate
from swell.train.agent.errors import PeerLost
from swell.train.agent.protocol import JobFile, Offer
from swell.train.agent.records import RecordSocket
from swell.train.agent.sealed import MOST_HELLO_BYTES, Seal, SealedSocket, crosses_hosts
from swell.train.agent.wire import Connection
from swell.train.sync import control
from swell.train.sync.mesh import PIECE, READY, Mesh, Peer

SECRET = "3f" * 32


class Tap:
    """Two sockets with a wire between them that somebody reads and may change."""

    def __init__(self) -> None:
        self.near, here = socket.socketpair()
        self.far, there = socket.socketpair()
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        for source, target in ((here, there), (there, here)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.change(data))
        except OSError:
            pass
        for sock in (source, target):  # the other thread waits on one of them
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections count as connections between hosts."""
    monkeypatch.setattr(wire, "crosses_hosts", lambda own, other: True)
    monkeypatch.setattr(coordinator, "crosses_hosts", lambda own, other: True)


def connected(tap: Tap, *, encrypt: bool = True) -> tuple[Connection, Connection]:
    one, other = together(
        lambda: Connection(tap.near, SECRET, server=True, encrypt=encrypt),
        lambda: Connection(tap.far, SECRET, encrypt=encrypt),
    )
    assert isinstance(one, Connection) and isinstance(other, Connection), (one, other)
    return one, other


def meshes(one: Connection, other: Connection) -> tuple[Mesh, Mesh]:
    names = ("w0", "w1")
    return (
        Mesh(1, names, "w0", {1: Peer("w1", one.sock, {})}),
        Mesh(1, names, "w1", {0: Peer("w0", other.sock, {})}),
    )


@pytest.mark.parametrize("encrypt", [True, False])
def test_who_reads_the_wire_sees_neither_secret_nor_gradients(between_hosts: None, encrypt: bool) -> None:
    tap = Tap()
    one, other = connected(tap, encrypt=encrypt)
    one.send({"text": "a message"})
    assert other.receive(10) == {"text": "a message"}
    gradients = b"gradient" * 40_000
    sink = bytearray(len(gradients))
    first, second = meshes(one, other)
    heard = together(
        lambda: first.exchange(1, PIECE, {"what": "step"}, {1: [memoryview(gradients)]}, {}),
        lambda: second.exchange(1, PIECE, {"what": "step"}, {}, {0: [memoryview(sink)]}),
    )
    assert heard == [[{"what": "step"}] * 2] * 2 and bytes(sink) == gradients
    readable = [text for text in (b"a message", b"gradient", b"step") if text in tap.seen]
    assert readable == ([] if encrypt else [b"a message", b"gradient", b"step"])
    assert SECRET.encode() not in tap.seen and len(tap.seen) > len(gradients)
    for mesh in (first, second):
        mesh.close()


def test_payloads_of_all_sizes_and_small_messages_follow_each_other(between_hosts: None) -> None:
    """Bytes that arrive early stay where the next exchange finds them, though no poll shows them."""
    ends = meshes(*connected(Tap()))
    sizes = [1, 0, 16_384, 16_385, 300_000, 5, 1_000_000]

    def talk(mesh: Mesh) -> bool:
        other = 1 - mesh.rank
        good = True
        for number, size in enumerate(sizes):
            out = [memoryview(bytes([number + mesh.rank]) * size), memoryview(b"end")]
            sinks = [memoryview(bytearray(size)), memoryview(bytearray(3))]
            mesh.exchange(2 * number, PIECE, {"n": number}, {other: out}, {other: sinks})
            good = good and sinks[0] == bytes([number + other]) * size and sinks[1] == b"end"
            good = good and mesh.exchange(2 * number + 1, READY, {"r": mesh.rank}) == [{"r": 0}, {"r": 1}]
        return good

    assert together(lambda: talk(ends[0]), lambda: talk(ends[1])) == [True, True]
    ends[0].close()
    with pytest.raises(PeerLost):
        ends[1].exchange(100, READY, {})


def test_a_changed_byte_ends_that_connection_and_no_other(between_hosts: None) -> None:
    taps = Tap(), Tap()
    pairs = [meshes(*connected(tap)) for tap in taps]
    taps[0].change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    bad = together(*[lambda m=m: m.exchange(1, READY, {"n": 1}) for m in pairs[0]])
    assert any(isinstance(result, PeerLost) for result in bad)
    good = together(*[lambda m=m: m.exchange(1, READY, {"n": 1}) for m in pairs[1]])
    assert good == [[{"n": 1}] * 2] * 2


@pytest.mark.parametrize("lacks", ["nobody", "w0", "w1"])
def test_workers_leave_tls_for_records_if_both_can(
    between_hosts: None, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    real = control.fresh_token
    made = {
        name: control.Peers(
            name, "127.0.0.1", JobFile(secret=SECRET), threading.Condition(), lambda other: None
        )
        for name in ("w0", "w1")
    }
    # The worker that connects has the younger name, and asks for its token in the thread of its `connect`.
    monkeypatch.setattr(
        control,
        "fresh_token",
        lambda sock: (
            "" if lacks == {"swell-peer": "w0"}.get(threading.current_thread().name, "w1") else real(sock)
        ),
    )
    offer = Offer(1, ("w0", "w1"), {name: one.address for name, one in made.items()}, 0)
    found = together(*[lambda one=one: one.connect(offer, lambda: True) for one in made.values()])
    try:
        first, second = Mesh(1, offer.members, "w0", found[0]), Mesh(1, offer.members, "w1", found[1])
        kind = RecordSocket if lacks == "nobody" else SealedSocket
        assert type(first.peers[1].sock) is type(second.peers[0].sock) is kind
        heard = together(
            lambda: first.exchange(1, READY, {"n": 1}), lambda: second.exchange(1, READY, {"n": 1})
        )
        assert heard == [[{"n": 1}] * 2] * 2
        first.close()
        second.close()
    finally:
        for one in made.values():
            one.close()


@pytest.fixture
def running(between_hosts: None, tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path / "job")
    yield made
    made.stop()


def test_a_stranger_gets_nowhere_and_the_coordinator_goes_on(
    running: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert running.status()["target"] == 1
    with pytest.raises(OSError):  # another secret
        Connection.open(running.address, "another", timeout_s=5.0)
    with pytest.raises(OSError), socket.create_connection(running.address, timeout=30) as sock:
        Connection(sock, "s", encrypt=False, timeout_s=0.5)  # the right secret, in clear
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(b"\x16\x03\x01" + b"\xff" * (MOST_HELLO_BYTES + 1))
        while sock.recv(4096):
            pass
    wait_until(lambda: not running.coordinator.door.strangers, 30, "all strangers to be gone")
    assert running.status()["target"] == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_has_not_the_secret_is_refused() -> None:
    tap = Tap()
    results = together(
        lambda: SealedSocket(tap.near, "another", server=True, timeout_s=0.5),
        lambda: SealedSocket(tap.far, SECRET, server=False, timeout_s=10),
    )
    assert isinstance(results[1], ssl.SSLError) and isinstance(results[0], OSError)


def test_nothing_is_sent_unasked_so_a_pulse_stays_silent(between_hosts: None) -> None:
    one, other = connected(Tap())
    for end in (one, other):
        with pytest.raises(BlockingIOError):
            end.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    one.close()
    assert other.sock.recv(1) == b""


def test_a_certificate_belongs_to_its_secret() -> None:
    assert certificate(SECRET) == certificate(SECRET) != certificate("another")
    one, other = Seal(SECRET, server=True), Seal(SECRET, server=False)
    answer = one.feed(other.feed(b""))
    one.feed(other.feed(answer))
    assert one.established and other.established
    one.feed(other.seal(b"hello"))
    assert one.read() == b"hello"


def test_connections_within_a_host_stay_as_they_are() -> None:
    assert not crosses_hosts("", "")  # a pair of sockets
    assert not crosses_hosts(("10.0.0.1", 1), ("10.0.0.1", 2))
    assert not crosses_hosts(("127.0.0.2", 1), ("127.0.0.1", 2))
    assert not crosses_hosts(("::1", 1, 0, 0), ("::1", 2, 0, 0))
    assert crosses_hosts(("10.0.0.1", 1), ("10.0.0.2", 2))
    assert crosses_hosts(("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 2, 0, 2))
