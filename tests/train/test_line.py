"""A worker's line to its coordinator, of which this test plays the coordinator's end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.polling import writable
from swell.train.agent.wire import Connection
from swell.train.sync.link import Link

CONFIG = {"name": "a", "secret": "s", "host": "127.0.0.1", "silent_after_s": 600.0}


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10)
        yield made


@pytest.fixture
def link(tmp_path: Path, door: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    for name in ("SWELL_LAUNCH", "SWELL_HOST"):
        monkeypatch.delenv(name, raising=False)
    directory = JobDirectory.create(tmp_path / "job", CONFIG)
    directory.write_address("127.0.0.1", door.getsockname()[1], 0)
    made = Link(directory, "w0")
    yield made
    made.close()


def met(door: socket.socket) -> Connection:
    """The coordinator's end, after the greeting and the first heartbeat."""
    connection = Connection.accepted(door.accept()[0], CONFIG)
    said = [connection.receive(10)["type"] for _ in range(2)]
    assert said == ["hello", "beat"]
    return connection


def test_epochs_are_told_in_their_order_and_without_the_control_thread(
    door: socket.socket, link: Link
) -> None:
    connection = met(door)
    for epoch in range(1, 50):
        link.at_epoch(epoch)
        assert connection.receive(10) == {"type": "epoch", "epoch": epoch}
    with link.line.changed:  # the control thread cannot send
        link.event("first")
        link.at_epoch(50)
        link.event("last")
    told = [connection.receive(10) for _ in range(3)]
    assert [m.get("name", m.get("epoch")) for m in told] == ["first", 50, "last"]


def test_a_coordinator_that_reads_nothing_holds_nobody_up(door: socket.socket, link: Link) -> None:
    connection = met(door)
    sock = link.line._open
    assert sock is not None
    full = {"type": "event", "name": "x" * 1000}
    while writable(sock):
        sock.send(full)
    telling = threading.Thread(target=lambda: [link.at_epoch(epoch) for epoch in range(1, 1000)])
    telling.start()
    telling.join(10)
    assert not telling.is_alive()
    while (said := connection.receive(10)) != {"type": "epoch", "epoch": 999}:
        assert said == full or said["type"] == "epoch"


def test_a_new_coordinator_hears_the_epoch_in_the_greeting(door: socket.socket, link: Link) -> None:
    met(door).close()
    link.at_epoch(7)
    again = Connection.accepted(door.accept()[0], CONFIG)
    assert again.receive(10)["epoch"] == 7
