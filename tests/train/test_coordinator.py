"""The coordinator without sockets: what it answers to whom, what it tells the launcher, what it remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swell.train.agent.coordinator import Coordinator
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
    assert office.agent.heard("finish")[0]["code"] == 0
    assert [e["event"] for e in watcher.heard("event")] == ["exited", "finish"]
    office.say(office.agent, type="goodbye")
    assert office.coordinator.over.is_set()


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


def test_whoever_begins_to_watch_gets_a_snapshot_and_every_event_after_it(path: Path) -> None:
    """Workers that were started between the greeting and the watching are in the snapshot."""
    office, tool = Office(path), Someone()
    greeting = office.say(tool, type="hello", role="tool")[0]
    assert greeting["processes"] == {}
    office.say(office.agent, type="hello", role="agent", alive=[])
    (watching,) = office.say(tool, type="watch")
    assert watching["processes"] == {"w0": None} and watching["event"] > greeting["event"]
    office.say(office.agent, type="exited", worker="w0", code=-9)
    numbers = [event["number"] for event in tool.heard("event")]
    assert numbers == list(range(watching["event"] + 1, watching["event"] + 1 + len(numbers))) and numbers
    assert office.coordinator.status()["processes"] == _replayed(tool, watching["processes"])


def _replayed(watcher: Someone, processes: dict[str, Any]) -> dict[str, Any]:
    """The processes of a snapshot after the events that a watcher was sent."""
    now = dict(processes)
    for event in watcher.heard("event"):
        if event["event"] == "spawn":
            now[event["worker"]] = event.get("slot")
        elif event["event"] == "exited":
            now.pop(event["worker"], None)
    return now


def test_a_snapshot_has_processes_of_workers_that_were_given_up_until_they_end(path: Path) -> None:
    office, tool = Office(path), Someone()
    office.say(office.agent, type="hello", role="agent", alive=[])
    office.worker("w0")
    office.coordinator._carry_out(office.coordinator.elastic.vanished("w0", 1.0))
    status = office.say(tool, type="hello", role="tool")[0]
    assert "w0" not in status["workers"] and "w0" in status["processes"]
    second = Office(path)
    assert "w0" in second.coordinator.status()["processes"], "also after a restart"
    second.say(tool, type="hello", role="tool")
    second.say(second.agent, type="hello", role="agent", alive=[])
    assert "w0" not in second.coordinator.status()["processes"], "the launcher has it no longer"
