"""The coordinator without sockets: what it answers to whom, what it tells the launcher, what it remembers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from swell.train.agent.coordinator import Coordinator
from swell.train.agent.hearing import LAST_WORDS_S
from swell.train.agent.jobdir import JobDirectory


class Someone:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.role, self.name, self.fencing = "", "", None
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def heard(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.told if message["type"] == kind]


class Office:
    """A coordinator and those who speak to it."""

    def __init__(self, path: Path) -> None:
        self.coordinator = Coordinator(path)
        self.agent = Someone()

    def say(self, who: Someone, **message: Any) -> list[dict[str, Any]]:
        """Have `who` say something; returns what it is told."""
        before = len(who.told)
        self.coordinator._receive(who, message)  # type: ignore[arg-type]
        return who.told[before:]

    def worker(self, name: str, **about: Any) -> Someone:
        made = Someone()
        place = {"pid": 1, "address": ["127.0.0.1", 7], "status": "starting", "generation": 0, "members": []}
        self.say(made, type="hello", role="worker", worker=name, **(place | about))
        return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    settings = {"name": "a", "launch": "x", "secret": "s", "minimum": 1, "maximum": 2, "target": 1}
    return JobDirectory.create(tmp_path / "job", settings).path


def test_from_the_first_worker_to_the_end(path: Path) -> None:
    office = Office(path)
    office.say(office.agent, type="hello", role="agent", alive=[])
    (spawn,) = office.agent.heard("spawn")
    worker = office.worker(spawn["worker"])
    assert worker.heard("welcome")[0]["live"] is False
    office.say(worker, type="ready", epoch=0)
    offer = worker.heard("candidate")[0]["candidate"]
    assert offer["members"] == [worker.name] and offer["addresses"][worker.name] == ("127.0.0.1", 7)
    office.say(worker, type="switched", generation=offer["number"], members=[worker.name], step=0, epoch=0)
    watcher = Someone()
    assert office.say(watcher, type="hello", role="tool")[0]["members"] == [worker.name]
    office.say(watcher, type="watch")
    office.say(worker, type="beat", step=3, report={"loss": 0.5})
    assert watcher.heard("report") == [{"type": "report", "worker": worker.name, "report": {"loss": 0.5}}]
    office.say(worker, type="done", operation=4)
    office.say(office.agent, type="exited", worker=worker.name, code=0)
    assert not office.agent.heard("finish"), "its last messages may still be on the way"
    office.say(worker, type="beat", step=3, report={"loss": 0.5, "metrics": {"final": 1.0}})
    office.coordinator._closed(worker)  # type: ignore[arg-type]
    (finish,) = office.agent.heard("finish")
    assert (finish["code"], finish["report"]["metrics"]) == (0, {"final": 1.0})
    assert [e["event"] for e in watcher.heard("event")] == ["exited", "finish"]
    assert office.say(watcher, type="status")[0]["last_report"] == finish["report"]
    office.say(office.agent, type="goodbye")
    assert office.coordinator.over.is_set()


def test_an_exit_waits_for_the_workers_last_messages_for_a_bounded_time(path: Path) -> None:
    office = Office(path)
    office.say(office.agent, type="hello", role="agent", alive=[])
    worker = office.worker(office.agent.heard("spawn")[0]["worker"])
    office.say(worker, type="ready", epoch=0)
    number = worker.heard("candidate")[0]["candidate"]["number"]
    office.say(worker, type="switched", generation=number, members=[worker.name], step=0, epoch=0)
    office.say(office.agent, type="exited", worker=worker.name, code=1, note="it broke")
    now = time.monotonic()
    office.coordinator._tick(now)
    assert not office.agent.heard("finish"), "a descendant may hold the connection open"
    office.coordinator._tick(now + LAST_WORDS_S + 0.1)
    assert office.agent.heard("finish")[0]["reason"] == "it broke"


def test_what_it_does_not_understand_is_refused_and_changes_nothing(path: Path) -> None:
    office, tool = Office(path), Someone()
    before = office.coordinator.status()
    for message, said in (
        ({"type": "resize", "workers": 2}, "unknown message 'resize' from a stranger"),
        ({"type": "hello", "role": "king"}, "must be worker, agent, tool or notes"),
        ({"type": "hello", "role": "worker", "worker": "w9"}, "pid"),
    ):
        (answer,) = office.say(Someone(), **message)
        assert answer["type"] == "error" and said in answer["error"]
    office.say(tool, type="hello", role="tool")
    for message in ({"type": "resize", "workers": 9}, {"type": "ready"}, {"type": "resize", "workers": "x"}):
        assert office.say(tool, **message)[0]["type"] == "error"
    assert office.coordinator.status() == before | {"pids": before["pids"]}


def test_a_second_coordinator_goes_on_where_the_first_was_killed(path: Path) -> None:
    first = Office(path)
    first.say(first.agent, type="hello", role="agent", alive=[])
    worker = first.worker("w0")
    first.say(worker, type="ready", epoch=0)
    number = worker.heard("candidate")[0]["candidate"]["number"]
    second = Office(path)
    again = second.worker("w0", status="member", generation=number, members=["w0"], epoch=2)
    assert again.heard("welcome")[0]["generation"] == number
    status = second.coordinator.status()
    assert (status["generation"], status["members"], status["epoch"]) == (number, ["w0"], 2)
    second.say(second.agent, type="hello", role="agent", alive=["w0"])
    assert not second.agent.heard("spawn") and not second.agent.heard("kill")
