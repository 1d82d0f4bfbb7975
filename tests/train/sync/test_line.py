"""A worker's line to its coordinator, of which this test plays the coordinator's end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swell.train.agent.errors import RESPAWN
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.polling import writable
from swell.train.agent.protocol import JobFile
from swell.train.agent.wire import Connection
from swell.train.sync.control import Link

CONFIG = JobFile(name="a", secret="s", host="127.0.0.1", silent_after_s=600.0)


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


@pytest.mark.parametrize(
    "malformed",
    [
        {"type": "candidate", "candidate": {"number": "x"}},
        {
            "type": "candidate",
            "candidate": {"number": 1, "members": ["w0"], "addresses": {"w0": [7]}, "epoch": 0},
        },
        {"type": "check", "number": 1, "addresses": []},
        {"type": "turn", "epoch": None},
    ],
)
def test_a_malformed_message_is_logged_and_the_worker_connects_again(
    door: socket.socket, link: Link, malformed: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    met(door).send(malformed)
    assert link.line.standing.offer is None
    again = met(door)
    assert "the coordinator sent a malformed message" in capfd.readouterr().err
    again.send({"type": "welcome", "live": True, "epoch": 0, "generation": 3})
    assert link.welcome().generation == 3


def test_a_refusal_of_the_coordinator_is_in_the_workers_log(
    door: socket.socket, link: Link, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = met(door)
    connection.send({"type": "error", "error": "epoch: got 'x'"})
    connection.send({"type": "of a later release", "x": 1})
    connection.send({"type": "welcome"})
    link.welcome()
    assert "the coordinator refused a message: epoch: got 'x'" in capfd.readouterr().err


BROKEN = """
import pathlib, sys, time
from swell.train.agent.jobdir import JobDirectory
from swell.train.sync.control import Link
from swell.train.sync.control import Standing
def hear(self, message):
    raise KeyError("w7")
Standing.hear = hear
Link(JobDirectory(pathlib.Path(sys.argv[1])), "w0")
time.sleep(60)
"""


def test_an_error_of_its_own_ends_the_worker_with_a_traceback_to_be_started_again(
    door: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWELL_LAUNCH", raising=False)
    directory = JobDirectory.create(tmp_path / "job", CONFIG)
    directory.write_address("127.0.0.1", door.getsockname()[1], 0)
    worker = subprocess.Popen(
        [sys.executable, "-c", BROKEN, str(directory.path)], stderr=subprocess.PIPE, text=True
    )
    door.settimeout(60)
    met(door).send({"type": "welcome"})
    _, log = worker.communicate(timeout=60)
    assert worker.returncode == RESPAWN and "KeyError: 'w7'" in log and "swell's own" in log
