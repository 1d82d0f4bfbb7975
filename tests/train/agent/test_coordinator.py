"""The coordinator without sockets: what it answers to whom, what it tells the launcher, what it remembers."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from swell.train.agent import children, coordinator_process
from swell.train.agent.coordinator import LAST_WORDS_S, Coordinator
from swell.train.agent.coordinator_process import MOST_STARTS, CoordinatorProcess, pause_s
from swell.train.agent.errors import BROKEN, TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.membership import Membership
from swell.train.agent.protocol import HEARD, StatusAnswer, plain
from swell.train.agent.replicas import Replicas


class Someone:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.role, self.name, self.fencing = "", "", None
        self.told: list[dict[str, Any]] = []

    def send(self, message: Struct | dict[str, Any]) -> None:
        self.told.append(json.loads(json.dumps(plain(message), default=plain)))

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

    def status(self) -> dict[str, Any]:
        return plain(self.coordinator.status(StatusAnswer))

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
    assert offer["members"] == [worker.name] and offer["addresses"][worker.name] == ["127.0.0.1", 7]
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


def test_a_tool_is_sent_the_story_of_the_membership(path: Path) -> None:
    office, tool = Office(path), Someone()
    office.say(office.agent, type="hello", role="agent", alive=[])
    office.say(tool, type="hello", role="tool")
    (answer,) = office.say(tool, type="story")
    assert answer["type"] == "story" and answer["lines"][0].startswith("agent_connected([], ")
    assert "Spawn(worker='w0', slot=None)" in answer["lines"][0]


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
    before = office.status()
    for message, said in (
        ({"type": "resize", "workers": 2}, "unknown message 'resize' from a stranger"),
        ({"type": "hello", "role": "king"}, "must be worker, agent, tool or notes"),
        ({"type": "hello", "role": "worker", "worker": "w9"}, "pid"),
        ({"type": "hello", "role": "worker", "worker": "../w9"}, "the name of a worker"),
        ({"type": "hello", "role": "agent", "alive": "w0"}, "a list"),
    ):
        (answer,) = office.say(Someone(), **message)
        assert answer["type"] == "error" and said in answer["error"]
    office.say(tool, type="hello", role="tool")
    for message in ({"type": "resize", "workers": 9}, {"type": "ready"}, {"type": "resize", "workers": "x"}):
        assert office.say(tool, **message)[0]["type"] == "error"
    worker = office.worker("w0")
    before = office.status()
    for message in (
        {"type": "switched", "generation": 1, "members": [], "step": 0, "epoch": 0},
        {"type": "switched", "generation": 1, "members": ["w0", "w0"], "step": 0, "epoch": 0},
        {"type": "switched", "generation": 1, "members": ["w0"], "step": float("inf"), "epoch": 0},
        {"type": "switched", "generation": 1, "members": ["w0"], "step": 0},
        {"type": "event", "name": "confined", "fields": {"workers": 1}},
        {"type": "beat", "step": 1, "report": "fast"},
        {"type": "failed", "code": "1"},
    ):
        assert office.say(worker, **message)[0]["type"] == "error"
    assert office.status() == before | {"pids": before["pids"]}


def test_a_second_coordinator_goes_on_where_the_first_was_killed(path: Path) -> None:
    first = Office(path)
    first.say(first.agent, type="hello", role="agent", alive=[])
    worker = first.worker("w0")
    first.say(worker, type="ready", epoch=0)
    number = worker.heard("candidate")[0]["candidate"]["number"]
    second = Office(path)
    again = second.worker("w0", status="member", generation=number, members=["w0"], epoch=2)
    assert again.heard("welcome")[0]["generation"] == number
    status = second.status()
    assert (status["generation"], status["members"], status["epoch"]) == (number, ("w0",), 2)
    second.say(second.agent, type="hello", role="agent", alive=["w0"])
    assert not second.agent.heard("spawn") and not second.agent.heard("kill")


def test_with_two_hundred_members_no_message_costs_as_much_as_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"name": "a", "launch": "x", "secret": "s", "workers_per_replica": 2}
    path = JobDirectory.create(
        tmp_path / "job", settings | dict.fromkeys(["minimum", "maximum", "target"], 200)
    ).path
    written, lists = list[str](), list[object]()
    save, workers = JobDirectory.save_state, Replicas.workers.fget
    assert workers is not None
    monkeypatch.setattr(
        JobDirectory, "save_state", lambda self, text: (written.append(text), save(self, text))[1]
    )
    monkeypatch.setattr(Replicas, "workers", property(lambda self: (lists.append(self), workers(self))[1]))
    office = Office(path)
    office.say(office.agent, type="hello", role="agent", alive=[])
    crowd = [office.worker(spawn["worker"]) for spawn in office.agent.heard("spawn")]
    for worker in crowd:
        office.say(worker, type="ready", epoch=0)
    offer = crowd[0].heard("candidate")[-1]["candidate"]
    assert len(crowd) == 200 == len(offer["addresses"])
    office.say(crowd[0], type="switched", generation=1, members=offer["members"], step=0, epoch=0)

    written.clear(), lists.clear()
    for step, worker in itertools.product(range(1, 4), crowd):
        office.say(worker, type="beat", step=step, report={"step": step})
    office.coordinator._decide(office.coordinator._tick)
    assert len(written) == 1 and json.loads(written[0])["membership"]["inner"]["step"] == 3

    lists.clear()
    office.say(office.agent, type="exited", worker="w7", code=-9)
    office.say(Someone(), type="hello", role="tool")
    assert len(lists) < 20, "each of them makes the list of workers a few times, not once for each worker"

    second = Office(path)  # a coordinator that was started again in the recovery
    again = {"status": "member", "generation": 1, "members": offer["members"], "broken": 1, "operation": 2}
    greeted = [second.worker(name, **again) for name in offer["members"] if name not in ("w6", "w7")]
    assert sum(len(worker.heard("candidate")) for worker in greeted) < 5 * len(greeted)
    assert all(len(w.heard("candidate")[-1]["candidate"]["addresses"]) == 198 for w in greeted)


SOME = st.one_of(
    st.sampled_from(["w0", "w1", "w7", "x", "", "member", "ready", "done", "confined", "worker", "tool"]),
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([1 << 70, 1e308, float("nan"), 0.5]),
    st.lists(st.sampled_from(["w0", "w1", "w7", "y", 3, None]), max_size=3),
    st.sampled_from([["127.0.0.1", 9], ["127.0.0.1", "x"], {"w0": ["h", 1]}, {"done": 1.5}, {"workers": 1}]),
)
SOUND: dict[str, Any] = {
    "role": "worker", "worker": "w0", "pid": 1, "address": ["127.0.0.1", 9], "status": "member",
    "generation": 1, "members": ["w0"], "epoch": 0, "step": 1, "report": {"generation": 1, "step": 1},
    "operation": 1, "number": 1, "unreachable": [], "workers": 1, "code": 0, "error": "e", "name": "n",
    "fields": {}, "figures": {"done": 1.0}, "reason": "r", "values": {}, "keys": [], "alive": ["w0"],
}  # fmt: skip
KINDS = ["hello", *sorted({str(kind) for role in HEARD if role for kind in HEARD[role]} - {"goodbye"})]
FIELDS = st.dictionaries(st.sampled_from([*SOUND]), SOME, max_size=3)
MESSAGE = st.tuples(st.integers(0, 4), st.sampled_from(KINDS), FIELDS)


@pytest.mark.parametrize("job", [{}, {"workers_per_replica": 2}, {"command": True}, {"slots": [0, 1]}])
@settings(max_examples=60, deadline=None)
@given(messages=st.lists(MESSAGE, max_size=12))
def test_whatever_is_said_to_it_nothing_in_it_breaks(
    job: dict[str, Any], messages: list[tuple[int, str, dict[str, Any]]]
) -> None:
    about = {"name": "a", "launch": "x", "secret": "s", "minimum": 2, "maximum": 2, "target": 2}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "job.json").write_text(json.dumps(about | job))

        async def talk() -> Coordinator:
            office = Office(path)
            office.say(office.agent, type="hello", role="agent", alive=[])
            speakers = [office.agent, office.worker("w0"), office.worker("w1"), Someone(), Someone()]
            machine = getattr(office.coordinator.membership, "inner", office.coordinator.membership)
            for who, kind, fields in messages:
                office.say(speakers[who], **(SOUND | fields | {"type": kind}))
                if isinstance(machine, Membership):
                    machine.validate()
            office.coordinator._decide(office.coordinator._tick)
            return office.coordinator

        assert asyncio.run(talk()).failure is None
        assert Coordinator(path).failure is None, "and the next one reads what this one has saved"


def test_an_error_of_its_own_ends_it_with_a_traceback_and_the_state_that_was_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    office, tool = Office(path), Someone()
    office.say(office.agent, type="hello", role="agent", alive=[])
    office.say(tool, type="hello", role="tool")
    coordinator, whole = office.coordinator, JobDirectory(path).load_state()

    def half(*_: Any) -> Any:
        coordinator.membership.scale.target = 2
        raise KeyError("w7")

    monkeypatch.setattr(type(coordinator.membership), "resize", half)
    assert office.say(tool, type="resize", workers=2) == []
    assert coordinator.over.is_set() and "KeyError: 'w7'" in capsys.readouterr().err
    office.say(tool, type="stop", save=True)
    coordinator.exits["w0"] = (0.0, 0, "")
    coordinator.settle_exit("w0")
    assert JobDirectory(path).load_state() == whole, "nothing is saved afterwards"


BROKEN_COORDINATOR = """
from swell.train.agent import coordinator
def broken(*_):
    raise KeyError("w7")
coordinator.Coordinator._hello = broken
coordinator.main()
"""


def test_a_coordinator_that_always_breaks_is_started_again_a_limited_number_of_times(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, started = path / "logs" / "coordinator.log", list[float]()

    def start(_module: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        started.append(time.monotonic())
        program = BROKEN_COORDINATOR if len(started) == 1 else f"raise SystemExit({BROKEN})"
        with log.open("ab") as out:
            return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=out)

    monkeypatch.setattr(children, "start", start)
    monkeypatch.setattr(coordinator_process, "FIRST_PAUSE_S", 0.001)
    one = CoordinatorProcess(JobDirectory(path), "x", list)
    one.start()
    with pytest.raises(TrainError, match=rf"ended {MOST_STARTS} times in a row .* exit code {BROKEN}"):
        while time.monotonic() < started[0] + 60:
            process = one._process
            assert process is not None
            if process.returncode is None and (code := process.poll()) is not None:
                assert code == BROKEN
                process.returncode = None  # the launcher reaps it
                one.child_ended(process.pid, code, again=True)
            one.connect()
    assert len(started) == MOST_STARTS
    assert "KeyError: 'w7'" in log.read_text(), "the first one met an error of its own"


def test_coordinators_that_end_early_are_followed_by_growing_pauses() -> None:
    pauses = [pause_s(early) for early in range(1, MOST_STARTS)]
    assert pauses[:3] == [0.0, 0.0, 0.0], "a killed one is followed by the next at once"
    assert pauses == sorted(pauses) and all(0 < b / a <= 2 for a, b in itertools.pairwise(pauses[3:]))
    assert 10 < sum(pauses) < 30


def test_whoever_begins_to_watch_gets_a_snapshot_and_every_event_after_it(path: Path) -> None:
    """Workers that were started between the greeting and the watching are in the snapshot."""
    office, tool = Office(path), Someone()
    greeting = office.say(tool, type="hello", role="tool")[0]
    assert greeting["processes"] == {}
    office.say(office.agent, type="hello", role="agent", alive=[])
    (watching,) = office.say(tool, type="watch")
    assert watching["processes"] == {"w0": None} and watching["event"] > greeting["event"]
    worker = office.worker("w0")
    office.say(worker, type="ready", epoch=0)
    office.say(worker, type="switched", generation=1, members=["w0"], step=0, epoch=0)
    office.say(office.agent, type="exited", worker="w0", code=-9)
    assert {"candidate", "generation"} <= {event["event"] for event in tool.heard("event")}
    numbers = [event["number"] for event in tool.heard("event")]
    assert numbers == list(range(watching["event"] + 1, watching["event"] + 1 + len(numbers))) and numbers
    assert office.status()["processes"] == _replayed(tool, watching["processes"])


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
    office.coordinator._decide(lambda now: office.coordinator.elastic.vanished("w0", now))
    status = office.say(tool, type="hello", role="tool")[0]
    assert "w0" not in status["workers"] and "w0" in status["processes"]
    second = Office(path)
    assert "w0" in second.status()["processes"], "also after a restart"
    second.say(tool, type="hello", role="tool")
    second.say(second.agent, type="hello", role="agent", alive=[])
    assert "w0" not in second.status()["processes"], "the launcher has it no longer"
