"""Links between hosts, as far as one host can show: who is reachable, how long a worker goes on alone,
and what a standstill says."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.train.sync.test_mesh import meshes, together
from tests.waiting import wait_until

from swell.train.agent.errors import RESPAWN, PeerLost
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.protocol import Welcome
from swell.train.sync import control
from swell.train.sync.control import Link, is_cut, unreachable
from swell.train.sync.mesh import READY, solo


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A worker whose coordinator is on another host, and away."""
    monkeypatch.delenv("SWELL_LAUNCH", raising=False)
    monkeypatch.setenv("SWELL_HOST", "127.0.0.1")
    config = {"name": "a", "secret": "s", "host": "127.0.0.2", "away_s": 0.2}
    made = Link(JobDirectory.create(tmp_path / "link", config), "w0")
    yield made
    made.close()


def test_a_host_is_reached_if_it_accepts_or_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepts = server.getsockname()[:2]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            refuses = other.getsockname()[:2]
            assert unreachable({"w1": accepts, "w2": refuses}, "127.0.0.9") == []


def test_a_full_backlog_is_what_silence_looks_like() -> None:
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()[:2]
        for sock in (first, second):  # nobody accepts: further ones get no answer
            sock.setblocking(False)
            sock.connect_ex(address)
        assert unreachable({"w1": address}, "127.0.0.9", 0.2) == ["w1"]
        assert unreachable({"w1": address}, "127.0.0.1", 0.2) == [], "but this host is always there"


def test_a_reset_connection_is_a_dead_process_and_no_cut_link() -> None:
    assert is_cut(TimeoutError()) and is_cut(OSError(errno.EHOSTUNREACH, ""))
    assert not is_cut(ConnectionResetError(errno.ECONNRESET, ""))
    assert not is_cut(ConnectionRefusedError(errno.ECONNREFUSED, ""))


def test_probes_are_asked_of_the_system_and_other_sockets_are_left_alone() -> None:
    with socket.socket() as sock:
        keep_alive(sock, every_s=3, probes=2, unacknowledged_s=4.0)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 3
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
    ours, theirs = socket.socketpair()
    keep_alive(ours, every_s=3, probes=2)
    ours.close()
    theirs.close()


def test_without_a_coordinator_a_worker_on_another_host_stops_before_others_are_started(link: Link) -> None:
    link.line.standing.current = mesh = solo("w0")
    assert mesh.exchange(1, READY, {"n": 1}) == [{"n": 1}]
    link.line.standing.welcome = Welcome()  # it was there before
    wait_until(lambda: mesh.broken, 30, "the worker to stop")
    with pytest.raises(PeerLost):
        mesh.exchange(2, READY, {"n": 1})


def test_a_worker_that_waits_in_vain_asks_to_be_started_again(
    link: Link, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "PATIENCE_S", 0.05)
    with pytest.raises(SystemExit) as end:
        link.welcome()
    assert end.value.code == RESPAWN, "which is no failure of the script"
    assert "started again" in capsys.readouterr().err


def test_a_mesh_says_for_whom_it_waits() -> None:
    crowd = meshes(3)
    assert crowd[0].waits() is None
    crowd[1].peers[0].sock.sendall(b"x")  # its message is on the way
    found = []

    def look() -> None:
        def for_one() -> bool:
            waits = crowd[0].waits()
            return waits is not None and waits.workers == ["w2"]

        wait_until(for_one, 30, "the exchange, and the message of the other one")
        found.append(crowd[0].waits())
        crowd[0].abandon()

    results = together(lambda: crowd[0].exchange(4, READY, {}), look)
    assert isinstance(results[0], PeerLost)
    assert found[0].workers == ["w2"] and found[0].exchange == (1, 4, READY)
    assert crowd[0].waits() is None
