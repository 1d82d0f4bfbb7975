"""The border between jobs and the platform: whatever a job says, only that job is hurt."""

from __future__ import annotations

import json
import random
import socket
import string
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.control.model import Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster, JobRequest
from swell.engines import EngineReport, Launch, RunState, supervised_job
from swell.engines.border import BadMessage, read_beat, read_event, read_status, told
from swell.engines.job_state import JobStage, JobState
from swell.engines.null import NullEngine
from swell.engines.supervised import JobListener
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.polling import readable
from swell.train.agent.protocol import JobFile
from swell.train.agent.wire import Connection

GOOD = {
    "rank": 0,
    "step": 3,
    "done": 3,
    "of": 10,
    "loss": 0.5,
    "local_batch": 8,
    "step_s": 0.1,
    "sync_s": 0.01,
}


@pytest.mark.parametrize(
    "report",
    [
        [1],
        "text",
        None,
        GOOD | {"workers": "many"},
        GOOD | {"step_s": -1.0},
        GOOD | {"step_s": float("nan")},
        GOOD | {"done": float("nan")},
        GOOD | {"done": float("inf")},
        GOOD | {"of": -1},
        GOOD | {"local_batch": 10**40},
        GOOD | {"limits": [1]},
        GOOD | {"batch_size": True},
        GOOD | {"sqr": "x", "var": 1.0},
        GOOD | {"rank": "0"},
    ],
)
def test_a_malformed_report_is_refused_as_a_whole(report: object) -> None:
    with pytest.raises(BadMessage, match="must be"):
        read_beat(report)


def test_a_loss_that_diverged_costs_only_the_loss() -> None:
    beat = read_beat(GOOD | {"loss": float("nan"), "metrics": {"a": float("inf"), "b": 2, "c": "x"}})
    assert beat.progress["loss"] is None and beat.progress["metrics"] == {"b": 2.0}
    assert beat.progress["done"] == 3.0 and beat.timing is not None and beat.timing["step_s"] == 0.1


@pytest.mark.parametrize(
    "event",
    [
        {"event": "generation"},
        {"event": "generation", "members": "w0"},
        {"event": "switch", "pause_s": "abc"},
        {"event": "exited", "worker": "w0", "code": "x"},
        {"event": "checkpoint"},
        {"event": "spawn", "worker": "w0", "slot": 4},
        {"event": "spawn", "worker": "w\x1b[2J"},
        {"event": 7},
    ],
)
def test_a_malformed_event_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(BadMessage, match="must be"):
        read_event(event, slots=4)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    ANYTHING,
    st.dictionaries(st.sampled_from([*GOOD, "workers", "limits", "sqr", "var", "metrics"]), ANYTHING),
)
def test_nothing_else_ever_comes_out_of_the_border(raw: object, changes: dict[str, Any]) -> None:
    for reader in (read_beat, lambda r: read_event(r, 4), lambda r: read_status(r, 4)):
        for message in (raw, GOOD | changes, changes):
            try:
                reader(message)  # type: ignore[operator]
            except BadMessage:
                continue


class Mouth:
    """A connection on which a job says what a test wants it to say."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages

    def pending(self) -> list[dict[str, Any]]:
        return self.messages


def running(name: str, home: Path) -> SupervisedJob:
    """A job that trains."""
    request = JobRequest(name=name, script="train.py")
    return SupervisedJob(
        Launch(job_id=name, request=request, job_dir=home / name), JobState(stage=JobStage.RUNNING)
    )


def malformed(count: int) -> Iterator[dict[str, Any]]:
    """Messages with the right names and any values at all."""
    draw = random.Random(1)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1e308,
        float("nan"),
        float("inf"),
        "x",
        [],
        [1],
        {},
        {"a": 1},
        10**30,
    ]
    names = [
        *GOOD,
        "workers",
        "limits",
        "sqr",
        "var",
        "metrics",
        "mode",
        "accumulation",
        "at_most",
        "target_loss",
    ]
    for _ in range(count):
        report: Any = {name: draw.choice([*values, GOOD.get(name)]) for name in names}
        kind = draw.choice(["report", "event", "report", "".join(draw.choices(string.ascii_letters, k=4))])
        if kind == "event":
            report = {"event": draw.choice(["spawn", "exited", "generation", "switch", "checkpoint", 3])}
            yield {
                "type": kind,
                **{n: draw.choice(values) for n in ("worker", "slot", "members", "code")},
                **report,
            }
        else:
            yield {"type": kind, "report": draw.choice([report, draw.choice(values)])}


def test_ten_thousand_malformed_messages_leave_the_engine_and_the_other_jobs_alone(tmp_path: Path) -> None:
    listener = JobListener(lambda: Cluster.parse("1x4"), threading.Lock())
    bad, good = running("bad", tmp_path), running("good", tmp_path)
    bad.line.connection = mouth = Mouth([])  # type: ignore[assignment]
    for message in malformed(10_000):
        mouth.messages = [message]
        listener.read(bad)
        bad.state.validate()
    good.line.connection = Mouth([{"type": "report", "report": GOOD}])  # type: ignore[assignment]
    listener.read(good)
    reports = list(listener.reports())
    assert [r.kind for r in reports if r.job_id == "good"] == ["progress", "timing"]
    assert len(reports) < 500, "one job's reports do not push out those of others"
    assert bad.complaints > 5_000 and good.complaints == 0
    for report in reports:
        assert json.loads(json.dumps(dict(report.data), allow_nan=False)), "no NaN passes"


def test_no_report_that_passes_the_border_makes_a_turn_fail(tmp_path: Path) -> None:
    """The values within the bounds are extreme, and the plane goes on to decide and to accept."""
    (tmp_path / "train.py").write_text("")
    engine = NullEngine(Cluster.parse("1x4"), duration_s=1000.0)
    store = Store(connect(str(tmp_path / "store.db")))
    plane = ControlPlane(store, engine, home=tmp_path)
    plane.come_up()
    request = JobRequest(name="a", script="train.py", workdir=str(tmp_path))
    jobs = [plane.jobs.submit(request, "ann").job_id for _ in range(2)]
    plane.turn()
    said: list[EngineReport] = []
    engine.reports = lambda: iter([said.pop() for _ in range(len(said))])  # type: ignore[method-assign]
    draw = random.Random(2)
    extremes = [1e-9, 1e-3, 1.0, 1e7]
    for _ in range(15):
        beat = read_beat(
            GOOD
            | {
                "step_s": draw.choice(extremes),
                "sync_s": draw.choice([0.0, *extremes]),
                "done": draw.choice([0, 1e15]),
            }
            | {
                "of": draw.choice([0, 1, 1e15]),
                "local_batch": draw.choice([1, 10**12]),
                "workers": draw.choice([1, 4]),
            }
            | {"sqr": draw.choice([-1e30, 0.0, 1e30]), "var": draw.choice([0.0, 1e30])}
        )
        assert beat.timing is not None and beat.noise is not None
        for kind, data in (
            ("progress", beat.progress),
            ("timing", beat.timing | {"nodes": 1}),
            ("noise", beat.noise),
        ):
            said.append(EngineReport(job_id=jobs[0], time_s=plane.clock(), kind=kind, data=data))
        plane.turn()
    assert plane.jobs.submit(request, "ben").phase is Phase.QUEUED
    plane.turn()
    assert plane.jobs.get(jobs[1]).phase is Phase.RUNNING
    plane.stop()
    store.close()


def test_a_coordinator_that_never_answers_is_tried_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_job, "ANSWER_S", 0.02)
    run = JobDirectory.create(tmp_path / "runs" / "0000", {"name": "a", "secret": "s"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run.write_address("127.0.0.1", silent.getsockname()[1], 1)
        line, tried = supervised_job.CoordinatorLine(), set[float]()
        for turn in range(300):  # a minute of turns
            assert line.connect(tmp_path, turn * 0.2, slots=4) is None
            tried.add(line.tried_s)
    assert len(tried) < 12, "the other jobs do not wait for it at every turn"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"type": "story", "lines": ["a\x1b[2J\nb", "c"] * 100}, ["a[2J b", "c"] * 32),
        ({"type": "story", "lines": [3]}, []),
        ({"type": "story"}, []),
        ({"type": "error", "error": "unknown message 'story' from tool"}, []),
    ],
)
def test_a_story_is_checked_as_all_that_a_job_sends(
    tmp_path: Path, answer: dict[str, Any], shown: list[str]
) -> None:
    facts = JobFile(name="a", secret="s")
    run = JobDirectory.create(tmp_path / "runs" / "0000", facts)

    def coordinate(listener: socket.socket) -> None:
        connection = Connection.accepted(listener.accept()[0], facts)
        for said in ({"type": "welcome"}, answer):
            connection.receive(5.0)
            connection.send(said)

    assert supervised_job.story_of(tmp_path) == [], "there is no coordinator yet"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=coordinate, args=(listener,), daemon=True).start()
        run.write_address("127.0.0.1", listener.getsockname()[1], 1)
        assert supervised_job.story_of(tmp_path) == shown


def test_a_connection_begins_with_what_runs_and_ends_where_an_event_is_missing(tmp_path: Path) -> None:
    facts = JobFile(name="a", secret="s")
    run, told = JobDirectory.create(tmp_path / "runs" / "0000", facts), threading.Event()
    status = {"workers": {}, "members": [], "target": 1}

    def coordinate(listener: socket.socket) -> None:
        connection = Connection.accepted(listener.accept()[0], facts)
        connection.receive(5.0)
        connection.send({"type": "welcome", **status, "processes": {}, "event": 4})
        connection.receive(5.0)  # "watch": a worker was started meanwhile
        watching = {**status, "workers": {"w0": "starting"}, "processes": {"w0": 1}, "event": 5}
        connection.send({"type": "watching", **watching})
        for number in (6, 7, 9):
            connection.send({"type": "event", "event": "ready", "worker": "w0", "number": number})
        told.wait(30.0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=coordinate, args=(listener,), daemon=True).start()
        run.write_address("127.0.0.1", listener.getsockname()[1], 1)
        line = supervised_job.CoordinatorLine()
        seen = line.connect(tmp_path, 0.0, slots=4)
        assert seen is not None and (seen.processes, seen.event) == ({"w0": 1}, 5)
        heard: list[int] = []
        while line.connection is not None:
            assert readable([line.connection], 30.0)
            heard += [message["number"] for message in line.pending()]
        told.set()
    assert heard == [6, 7], "event 8 is missing: the next connection has a snapshot that includes it"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "left_out", "worker": "w2", "by": ["w0", "w1"]},
            "w2 was left out: w0 and w1 cannot reach it",
        ),
        (
            {"event": "left_out", "worker": "w2", "silent_s": 5.1},
            "w2 was left out: nothing was heard of it for 5 s",
        ),
        (
            {"event": "unreachable", "worker": "w3", "by": ["w0", "w1", "w2"]},
            "newcomer w3 cannot be reached by w0, w1 and w2; it is tried again",
        ),
        ({"event": "standstill", "step": 7, "workers": ["w2"]}, "step 8 stands still and waits for w2"),
        ({"event": "back", "worker": "w3", "instead_of": "w2"}, "w3 is back in the place of w2"),
        (
            {"event": "out_of_step", "worker": "w0", "step": 7},
            "w0 found the workers out of step; step 8 is made again, see the job's log",
        ),
        (
            {"event": "straggler", "worker": "w1", "times": 2.04},
            "w1 was 2.0 times slower than the others and is replaced",
        ),
        (
            {"event": "straggler", "worker": "w1", "times": 80, "link": True},
            "the links to w1 were 80.0 times slower than the others' and it is replaced",
        ),
        ({"event": "generation", "members": ["w0"]}, ""),
    ],
)
def test_cut_links_and_slow_workers_are_told_in_words(event: dict[str, Any], text: str) -> None:
    assert told(read_event(event, 4)) == text


@pytest.mark.parametrize(
    "event",
    [
        {"event": "left_out", "worker": 3},
        {"event": "left_out", "worker": "w1", "by": "w0"},
        {"event": "standstill", "step": -1, "workers": []},
        {"event": "back", "worker": "w3"},
        {"event": "out_of_step", "worker": "w3", "step": "last"},
        {"event": "straggler", "worker": "w3", "times": "many"},
        {"event": "straggler", "worker": "w3", "times": 2.0, "leader": "x"},
    ],
)
def test_nonsense_about_links_and_slow_workers_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        read_event(event, 4)


def test_a_job_without_a_living_worker_is_not_running_and_each_loss_is_told_once(tmp_path: Path) -> None:
    listener = JobListener(lambda: Cluster.parse("1x2"), threading.Lock())
    job = running("a", tmp_path)

    def happens(**event: Any) -> None:
        listener._take_event(job, {"type": "event", **event})

    def seen() -> RunState | None:
        observed = job.state.observed("a")
        return None if observed is None else observed.state

    for name in ("w0", "w1"):
        happens(event="spawn", worker=name)
    happens(event="generation", members=["w0", "w1"])
    happens(event="standstill", step=4, workers=["w1"])
    happens(event="left_out", worker="w1", by=["w0"])
    happens(event="fenced", worker="w1")
    assert seen() is RunState.RUNNING
    told = [(r.kind, r.data.get("reason") or r.data.get("text")) for r in listener.reports()]
    assert [one for one in told if one[0] != "resized"] == [
        ("noticed", "step 5 stands still and waits for w1"),
        ("worker_lost", "w1 was left out: w0 cannot reach it"),
    ]
    happens(event="generation", members=["w0"])
    happens(event="exited", worker="w0", code=-9)
    assert seen() is RunState.STARTING
    happens(event="spawn", worker="w2")
    listener._take_report(job, {"step": 5, "rank": 0})
    assert seen() is RunState.RUNNING
