"""The ports of a job: a stranger who connects costs next to nothing, writes nothing, and stops nobody."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.train.agent import coordinator as module
from swell.train.agent.coordinator import Coordinator
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.polling import readable
from swell.train.agent.wire import MAX_HELLO_BYTES, MOST_STRANGERS, VERSION, Channel, Connection, WireError
from swell.train.sync.control import Link


class Running:
    """A coordinator in a thread of this process."""

    def __init__(self, path: Path) -> None:
        settings = {"name": "a", "launch": "x", "secret": "s", "minimum": 1, "maximum": 2, "target": 1}
        self.job = JobDirectory.create(path, settings)
        self.coordinator: Coordinator
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self.address = self.job.address(10.0)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.coordinator = Coordinator(self.job.path)
        await self.coordinator.run()

    def status(self) -> dict[str, Any]:
        """What an honest tool is told."""
        with_secret = Connection.open(self.address, "s", timeout_s=30.0)
        try:
            return with_secret.request({"type": "hello", "role": "tool"}, 5.0)
        finally:
            with_secret.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.coordinator.over.set)
        self._thread.join(10)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)
    made = Running(tmp_path / "job")
    yield made
    made.stop()


def say(address: tuple[str, int], message: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=30)
    sock.sendall(message)
    return sock


def frame(content: object) -> bytes:
    body = json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side hung up, after whatever it said first."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("!I", 16 << 20) + b"x" * 2000,
        struct.pack("!I", MAX_HELLO_BYTES + 1),
        frame({"swell": VERSION, "nonce": "00", "proof": "é"}),
        frame({"swell": VERSION, "nonce": "\ud800", "proof": "x"}),
        frame({"swell": VERSION, "nonce": ["x"], "proof": 3}),
        frame({"swell": "1\nforged line" * 40, "nonce": "00"}),
        frame([1]),
        b"\0\0\0\x02[[",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_stranger_is_hung_up_on_and_the_job_goes_on(
    running: Running, message: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert is_closed(say(running.address, message))
    assert running.status()["target"] == 1
    assert "Traceback" not in capfd.readouterr().err


def test_who_proves_nothing_in_time_is_hung_up_on(running: Running) -> None:
    silent = [socket.create_connection(running.address, timeout=30) for _ in range(MOST_STRANGERS + 20)]
    wait_until(
        lambda: len(running.coordinator.door.strangers) <= MOST_STRANGERS, 30, "the rest to be refused"
    )
    assert all(is_closed(sock) for sock in silent)
    wait_until(lambda: not running.coordinator.door.strangers, 30, "all of them to be forgotten")
    assert running.status()["target"] == 1


def test_strangers_write_only_a_few_short_lines(running: Running, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(60):
        is_closed(say(running.address, frame({"swell": "forged\nline" * 80, "nonce": "00"})))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 25 and all(len(line) < 400 for line in lines)
    assert not any(line.startswith("line") for line in lines)


def test_a_full_disk_ends_no_coordinator(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(JobDirectory, "save_state", full)
    monkeypatch.setattr(JobDirectory, "append_event", JobDirectory.append_event)
    running.job._events.unlink()
    running.job._events.symlink_to("/dev/full")
    running.coordinator.job = running.job
    tool = Connection.open(running.address, "s")
    tool.request({"type": "hello", "role": "tool"})
    assert tool.request({"type": "resize", "workers": 2})["workers"] == 2
    assert running.status()["target"] == 2
    tool.close()


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.delenv("SWELL_LAUNCH", raising=False)
    made = Link(JobDirectory.create(tmp_path / "link", {"name": "a", "secret": "s"}), "w0")
    yield made
    made.close()


def peer(link: Link, number: int) -> dict[str, Any]:
    """What a member of candidate `number` is told when it connects."""
    with_secret = Connection.open(link.peers.listener.getsockname()[:2], "s", timeout_s=30.0)
    with_secret.send({"mesh": number, "worker": "w1", "about": {}})
    return with_secret.receive(5.0)


def test_a_worker_that_ran_out_of_descriptors_accepts_peers_again(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "too many open files")] * 3
    accept = socket.socket.accept

    def scarce(sock: socket.socket) -> Any:
        if failures and sock is link.peers.listener:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    assert is_closed_or_answered(link)
    assert peer(link, 7) == {"about": {}, "token": ""}
    assert not failures


def is_closed_or_answered(link: Link) -> bool:
    """Connect once: the accept that waits already is the last one that works."""
    return peer(link, 6) == {"about": {}, "token": ""}


def test_a_proof_that_is_no_ascii_leaves_no_traceback(link: Link, capfd: pytest.CaptureFixture[str]) -> None:
    address = link.peers.listener.getsockname()[:2]
    assert is_closed(say(address, frame({"swell": VERSION, "nonce": "00", "proof": "é"})))
    assert peer(link, 6) == {"about": {}, "token": ""}
    assert capfd.readouterr().err == ""


def test_half_a_frame_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    ends: dict[str, Connection] = {}
    thread = threading.Thread(target=lambda: ends.update(job=Connection(theirs, "s", server=True)))
    thread.start()
    engine = Connection(ours, "s")
    thread.join(5)
    whole = ends["job"]._channel.encode({"n": 1}) + ends["job"]._channel.encode({"n": 2})
    theirs.sendall(whole[:-5])
    assert engine.pending() == [{"n": 1}]
    assert engine.pending() == []
    theirs.sendall(whole[-5:])
    assert engine.pending() == [{"n": 2}]
    theirs.close()
    with pytest.raises(ConnectionError):
        engine.pending()
    engine.close()


def test_who_reads_nothing_cannot_make_a_sender_wait_for_ever() -> None:
    ours, theirs = socket.socketpair()
    ends: dict[str, Connection] = {}
    thread = threading.Thread(target=lambda: ends.update(job=Connection(theirs, "s", server=True)))
    thread.start()
    engine = Connection(ours, "s")
    thread.join(5)
    engine.limit_sending(0.1)
    with pytest.raises(OSError):
        for _ in range(200):
            engine.send({"text": "x" * 100_000})
    engine.close()
    theirs.close()


def test_a_frame_nested_without_end_is_refused() -> None:
    server, client = Channel("s", server=True), Channel("s", server=False)
    client.feed(server.feed(client.feed(server.opening())[1])[1])
    body = b"[" * 200_000
    mac = client._mac(b"c", 0, body)
    with pytest.raises(WireError, match="not JSON"):
        server.feed(struct.pack("!I", len(body) + len(mac)) + mac + body)


def test_descriptors_from_1024_on_can_be_waited_for() -> None:
    ours, theirs = socket.socketpair()
    import fcntl

    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1100)
    try:
        assert readable([high], 0.0) == []
        theirs.send(b"x")
        assert readable([high, theirs], 1.0) == [high]
        assert readable([socket.socket(fileno=os.dup(high))], None) != []
    finally:
        os.close(high)
        ours.close()
        theirs.close()


def test_a_control_plane_that_leads_no_longer_is_refused(running: Running) -> None:
    former, present, person = (Connection.open(running.address, "s", timeout_s=30.0) for _ in range(3))
    try:
        former.request({"type": "hello", "role": "tool", "fencing": 1}, 5.0)
        assert former.request({"type": "resize", "workers": 2}, 5.0)["type"] == "resized"
        present.request({"type": "hello", "role": "tool", "fencing": 2}, 5.0)
        person.request({"type": "hello", "role": "tool"}, 5.0)
        for order in ({"type": "resize", "workers": 1}, {"type": "stop", "save": True}, {"type": "stop"}):
            with pytest.raises(TrainError, match="another control plane leads"):
                former.request(order, 5.0)
        assert present.request({"type": "resize", "workers": 1}, 5.0)["workers"] == 1
        assert person.request({"type": "resize", "workers": 2}, 5.0)["workers"] == 2
    finally:
        for one in (former, present, person):
            one.close()


@pytest.mark.parametrize("connects", ["before", "after"])
def test_the_last_words_of_a_worker_count_though_its_exit_is_told_first(
    running: Running, connects: str
) -> None:
    """The launcher tells of an exit over its own connection, which may be read before the worker's.

    A worker that lost its coordinator connects to the next one, which may hear of its exit even before that.
    """
    agent = Connection.open(running.address, "s", timeout_s=30.0)
    agent.send({"type": "hello", "role": "agent"})
    spawn = until(agent, "spawn")
    worker = Connection.open(running.address, "s", timeout_s=30.0)
    about = {"worker": spawn["worker"], "pid": os.getpid(), "address": ["127.0.0.1", 1]}
    worker.send(
        {"type": "hello", "role": "worker", "status": "starting", "generation": 0, "members": [], **about}
    )
    worker.send({"type": "ready", "epoch": 0})
    offer = until(worker, "candidate")["candidate"]
    switched = {"generation": offer["number"], "members": offer["members"], "step": 0, "epoch": 0}
    worker.send({"type": "switched", **switched})
    wait_until(lambda: running.status()["members"] == [spawn["worker"]], 20, "the worker to be a member")
    if connects == "after":
        worker.close()
        wait_until(lambda: not running.coordinator.workers, 20, "the connection to be read to its end")
        running.coordinator.membership.workers[spawn["worker"]].address = None  # as a new coordinator has it
    agent.send({"type": "exited", "worker": spawn["worker"], "code": 0})
    wait_until(lambda: any(e["event"] == "exited" for e in running.job.events()), 20, "the exit to be read")
    if connects == "after":
        worker = Connection.open(running.address, "s", timeout_s=30.0)
        worker.send({"type": "hello", "role": "worker", "status": "member", **switched, **about})
    worker.send({"type": "done", "operation": 1})
    worker.close()
    assert until(agent, "finish")["code"] == 0
    agent.close()


def until(connection: Connection, kind: str) -> dict[str, Any]:
    """The next message of this kind."""
    while (message := connection.receive(20.0))["type"] != kind:
        pass
    return message
