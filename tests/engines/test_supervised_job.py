"""How the engine carries out what `job_state` says: targets, orders, reports."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, cast

import pytest

from swell.domain import Cluster, JobRequest
from swell.engines import Launch, supervisor
from swell.engines.border import BadMessage, confined, read_event, read_status
from swell.engines.job_state import JobStage, JobState, ReportedWorkers
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.order import make_folder
from swell.engines.supervised import JobListener, SupervisedEngine
from swell.engines.supervised_job import MOST_REASON, Allowance, CoordinatorLine, SupervisedJob
from swell.engines.supervisor import reason_of
from swell.train.agent import protocol
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.wire import Connection


def _launch(home: Path, job_id: str = "a", **fields: Any) -> Launch:
    request = JobRequest(name="a", script="train.py", **fields)
    return Launch(job_id=job_id, request=request, job_dir=home / "jobs" / job_id)


def _running(
    home: Path, job_id: str = "a", workers: ReportedWorkers | None = None, **state: Any
) -> SupervisedJob:
    known = JobState(stage=JobStage.STARTING, workers=workers or ReportedWorkers(), **state)
    return SupervisedJob(_launch(home, job_id), known)


def _status(workers: dict[str, int]) -> protocol.JobStatus:
    """What a coordinator answers whose members are these workers, on these slots."""
    names = dict.fromkeys(workers, "member")
    return read_status({"workers": names, "slots": workers, "members": list(workers), "target": 1}, 4)


def _told_by(engine: SupervisedEngine, job: SupervisedJob, now_s: float = 0.0) -> list[Any]:
    """What a turn of the engine sends the job's coordinator."""
    job.line.connection = cast(Connection, line := _Line())
    engine._jobs[job.job_id] = job
    engine._send_target(job, now_s)
    engine._listener.report(job, job.state.unlogged())
    return [message.slots for message in line.sent]


def _gpus(engine: SupervisedEngine) -> list[tuple[int, ...]]:
    return [report.data["gpus"] for report in engine.reports() if report.kind == "resized"]


def _run_of(directory: Path, host: str, port: int) -> Path:
    """A run of a job whose coordinator is said to listen there."""
    run = directory / "runs" / "0000"
    run.mkdir(parents=True)
    (run / "coordinator.json").write_text(json.dumps({"host": host, "port": port, "pid": 1}))
    (run / "job.json").write_text(json.dumps({"secret": "00" * 32}))
    return run


@pytest.mark.parametrize("what", ["runs", "0000"])
def test_no_link_leads_the_engine_to_the_coordinator_of_another_job(tmp_path: Path, what: str) -> None:
    bad, good = tmp_path / "jobs" / "bad", tmp_path / "jobs" / "good"
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        _run_of(good, *coordinator.getsockname())
        if what == "runs":
            bad.mkdir()
            (bad / "runs").symlink_to(good / "runs")
        else:
            (bad / "runs").mkdir(parents=True)
            (bad / "runs" / "0000").symlink_to(good / "runs" / "0000")
        coordinator.settimeout(0.2)
        for directory, connected in ((bad, False), (good, True)):
            assert CoordinatorLine().connect(directory, 0.0, 4) is None
            with contextlib.nullcontext() if connected else pytest.raises(TimeoutError):
                coordinator.accept()[0].close()


def test_the_engine_looks_up_no_name_that_a_job_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: looked_up.append(host) or [])
    _run_of(tmp_path / "jobs" / "bad", "nobody-answers.example", 1)
    with pytest.raises(BadMessage, match="must be an IP address"):
        CoordinatorLine().connect(tmp_path / "jobs" / "bad", 0.0, 4)
    assert looked_up == []


def test_a_job_that_moves_before_it_trains_is_reported_on_its_new_slot(tmp_path: Path) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    job = _running(tmp_path, wanted=(3,), told=(0,), logged=(0,))
    assert _told_by(engine, job) == [[3]] and job.state.told == (3,)
    assert _gpus(engine) == [(3,)]


def test_a_job_gets_a_slot_only_when_no_worker_of_another_job_is_on_it(tmp_path: Path) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    other = _running(tmp_path, "other", ReportedWorkers(live={"w0": 3}), logged=(2,))
    job = _running(tmp_path, wanted=(0, 3), told=(0,), logged=(0,))
    engine._jobs["other"] = other
    assert _told_by(engine, job) == [] and job.state.told == (0,), "a worker of the other job is still there"
    other.state.workers.live = {}
    assert _told_by(engine, job) == [[0, 3]]
    job.state.wanted = (0, 2, 3)
    assert _told_by(engine, job, 1.0) == [], "the event log still shows the other job on slot 2"
    assert _told_by(engine, job, 100.0) == [], "and it does not matter how long that takes"


def test_a_job_that_was_found_keeps_what_its_coordinator_was_told_and_what_the_log_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier engine was killed after it had told the job to grow, and before it logged that."""
    monkeypatch.setattr("swell.engines.supervised_job.is_locked", lambda directory: True)
    earlier = SupervisedEngine(LocalSite(tmp_path, slots=4))
    job = _running(tmp_path, wanted=(0,))
    job.write_order((0,), 4, {})
    job.state.started((0,), 0.0)
    job.state.wanted = (0, 1)
    assert _told_by(earlier, job) == [[0, 1]]
    job.state.wanted = (0,)
    job.note(job.state.told)
    found = SupervisedJob.found(job.directory)
    state = found.state
    state.logged = (0, 2)
    assert state.wanted == (0,) and state.slots(0.0) == {0, 1, 2}
    state.connected(_status({"w0": 0, "w1": 1}))
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    assert _told_by(engine, found) == [[0]], "it is told again, whatever it was told before"
    assert _gpus(engine) == [(0, 1)] and state.slots(0.0) == {0, 1}
    assert _told_by(engine, found) == [], "once for each connection"


def test_a_job_that_was_killed_together_with_the_control_plane_keeps_the_slots_of_the_log(
    tmp_path: Path, nursery: Nursery
) -> None:
    launch = _launch(tmp_path)
    SupervisedJob(launch, JobState(wanted=(2, 3))).write_order((2, 3), 4, {})
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    engine.may_act = lambda: False  # its thread is to do nothing
    engine.start(lambda: None, {"a": (2, 3)})
    try:
        (job,) = engine._jobs.values()
        now_s = time.monotonic() + 10.0
        assert not job.state.up and job.state.slots(now_s) == {2, 3}
        other = SupervisedJob(_launch(tmp_path, "b"), JobState(wanted=(1, 3), wanted_s=0.0))
        engine._jobs["b"] = other
        assert engine._granted(other, now_s) == (1,)
        engine.apply(launch, ())
        assert job.state.slots(now_s) == set() and engine._granted(other, now_s) == (1, 3)
    finally:
        engine.close()


def test_a_full_disk_keeps_a_job_from_growing_but_not_from_shrinking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    job = _running(tmp_path, wanted=(0, 1), told=(0, 1))
    job.write_order((0, 1), 4, {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("swell.engines.order.write_json", full)
    job.state.wanted = (0,)
    assert _told_by(engine, job) == [[0]]
    job.state.wanted = (0, 2)
    with pytest.raises(OSError, match="no space"):
        _told_by(engine, job)
    assert job.state.told == (0,)


def test_a_job_of_replicas_uses_only_as_many_slots_as_whole_replicas_need(tmp_path: Path) -> None:
    job = SupervisedJob(_launch(tmp_path, workers_per_replica=2), JobState(told=(2, 3)))
    assert job.whole_replicas((0, 2, 3)) == (2, 3)
    assert job.whole_replicas((0,)) == ()
    assert job.whole_replicas((0, 1, 2, 3)) == (0, 1, 2, 3)


def test_a_job_that_shrinks_keeps_its_slots_until_it_goes_on_without_them(tmp_path: Path) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    workers = ReportedWorkers(live={"w0": 0, "w1": 1})
    job = _running(tmp_path, workers=workers, wanted=(0, 1), told=(0, 1))
    engine._listener.report(job, [("resized", {"pause_s": 0.0, "gpus": (0, 1)})])
    job.state.told = (0,)
    workers.live, workers.members = {"w0": 0}, {"w0", "w1"}  # the other one has left
    engine._listener.report(job, job.state.unlogged())
    assert job.state.slots(0.0) == {0, 1}, "the log still shows it on both, until it says who goes on"
    workers.members = {"w0"}
    engine._listener.report(job, job.state.unlogged())
    assert job.state.slots(0.0) == {0} and _gpus(engine) == [(0, 1), (0,)]
    (make_folder(job.directory) / "exit.json").write_text(json.dumps({"code": 0, "reason": ""}))
    engine._supervisor_ended(job)
    assert job.state.over and job.state.slots(0.0) == {0}, "until its end is noted"


def test_a_report_that_was_not_listened_to_is_made_later(tmp_path: Path) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    workers = ReportedWorkers(live={"w0": 0}, members={"w0"})
    job = _running(tmp_path, workers=workers, wanted=(0,), told=(0,), logged=(0, 1))
    job.allowance = Allowance(rate=0.0, _left=0.0)
    engine._listener.report(job, job.state.unlogged())
    assert job.state.slots(0.0) == {0, 1} and _gpus(engine) == []
    job.allowance = Allowance()
    engine._listener.report(job, job.state.unlogged())
    assert job.state.slots(0.0) == {0} and _gpus(engine) == [(0,)]


def test_a_job_that_can_use_one_worker_only_is_reported_as_it_says_so_and_when_it_is_taken_over(
    tmp_path: Path,
) -> None:
    listener = JobListener(lambda: Cluster.parse("1x4"), threading.Lock())
    job = _running(tmp_path, wanted=(0,), told=(0,))
    reason = "three workers could not follow it (KeyError:\n  'x')"
    listener._take_event(job, {"event": "confined", "workers": 1, "reason": reason})
    expected = {"workers": 1, "reason": "three workers could not follow it (KeyError: 'x')"}
    assert [(r.kind, r.data) for r in listener.reports()] == [("confined", expected)]
    status = {"workers": {}, "members": [], "target": 1, "maximum": 1}
    assert not read_status(status | {"confined": ""}, 4).confined
    found = read_status(status | {"confined": reason}, 4)
    assert confined(found.maximum, found.confined) == ("confined", expected)
    for bad in ({"workers": 0, "reason": "x"}, {"workers": 1}, {"workers": 1, "reason": ["x"]}):
        with pytest.raises(BadMessage):
            read_event({"event": "confined"} | bad, 4)


def test_a_full_disk_at_the_start_of_a_job_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def write(self: JobDirectory, name: str, text: str) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(supervisor.time, "sleep", lambda _: None)
    monkeypatch.setattr(JobDirectory, "_write", write)
    made = supervisor._with_room(lambda: JobDirectory.create(tmp_path / "run", {}))
    assert made.path == tmp_path / "run" and tries == ["job.json"] * 3
    monkeypatch.setattr(supervisor, "_ROOM_S", -1.0)
    tries.clear()
    with pytest.raises(OSError, match="no space"):
        supervisor._with_room(lambda: JobDirectory.create(tmp_path / "next", {}))


class _Line:
    """A connection to a coordinator that takes everything."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_slow_worker_is_reported_with_its_own_slot_unless_it_leads(tmp_path: Path) -> None:
    listener = JobListener(lambda: Cluster.parse("1x4"), threading.Lock())
    job = _running(tmp_path, workers=ReportedWorkers(live={"w1": 2}))
    slow = {"event": "straggler", "worker": "w1", "times": 2.0, "slot": 3}
    for event in (slow | {"leader": True}, slow | {"worker": "w9"}, slow):
        listener._take_event(job, event)
    reports = [(report.kind, report.data) for report in listener.reports()]
    assert [kind for kind, _ in reports] == ["noticed", "noticed", "noticed", "slow"]
    assert reports[-1][1] == {"slot": 2, "times": 2.0}, (
        "the slot that the engine has it on, whatever the job says"
    )


def test_a_job_that_waits_for_other_slots_leaves_those_that_services_want_at_once(tmp_path: Path) -> None:
    engine = SupervisedEngine(LocalSite(tmp_path, slots=8))
    engine._jobs["b"] = _running(tmp_path, "b", wanted=(6, 7), told=(6, 7))
    workers = ReportedWorkers(live={"w0": 0, "w1": 1, "w2": 2, "w3": 3})
    workers.members = workers.former = set(workers.live)
    job = _running(tmp_path, workers=workers, wanted=(6, 7), told=(0, 1, 2, 3))
    assert _told_by(engine, job) == [], "it keeps its slots until the others are free"
    engine.reserve(frozenset({1, 2, 3}))
    assert _told_by(engine, job) == [[0]]


HOLDER = """
import fcntl, socket, sys
with open(sys.argv[1], "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    lock.write(socket.gethostname())
    lock.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_signal_goes_to_the_process_that_holds_the_lock_whatever_a_file_says(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "a"
    job.mkdir(parents=True)
    lock = make_folder(job) / "lock"
    with subprocess.Popen(["sleep", "300"]) as other:
        for path in (lock, job / "lock"):
            path.write_text(f"{other.pid} {socket.gethostname()}")
        assert not supervisor.is_locked(job)
        assert not supervisor.signal_supervisor(job, signal.SIGKILL), "nobody holds it"
        words = [sys.executable, "-c", HOLDER, str(lock)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline()
            (job / "lock").write_text(f"{other.pid} {socket.gethostname()}")
            assert supervisor.is_locked(job) and supervisor.supervisor_of(job) == holder.pid
            assert supervisor.signal_supervisor(job, signal.SIGTERM)
            assert holder.wait(30) == -signal.SIGTERM
        assert not supervisor.is_locked(job) and other.poll() is None
        lock.write_text("another-machine")
        other.kill()


def _raised(source: str, name: str = "train.py") -> str:
    """The traceback of a script with this text."""
    try:
        exec(compile(source, f"/home/ann/{name}", "exec"), {})
    except BaseException:
        return traceback.format_exc()
    raise AssertionError("the script did not fail")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nraise ValueError('no')", "ValueError: no (train.py, line 2)"),
        ("raise ValueError('first\\nsecond')", "ValueError: first (train.py, line 1)\nsecond"),
        ("raise ValueError('a\\n  b\\n\\nc')", "ValueError: a (train.py, line 1)\n  b\n\nc"),
        ("assert False", "AssertionError (train.py, line 1)"),
        ("import os\n\nos.listdir('/no')", "FileNotFoundError: [Errno 2] No such file or directory: '/no'"),
        (
            "import json\n\njson.loads('')",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        ("try:\n    1 / 0\nexcept Exception:\n    raise KeyError('k')", "KeyError: 'k' (train.py, line 4)"),
    ],
)
def test_the_reason_of_a_failure_is_the_whole_message_with_the_line_of_the_script(
    source: str, reason: str
) -> None:
    told = reason_of(_raised(source), "train.py")
    assert told == (reason if "(train.py, " in reason else f"{reason} (train.py, line 3)")


def test_a_reason_is_bounded_and_may_be_any_text() -> None:
    assert (
        reason_of("--auto: this script cannot be shared\n", "train.py")
        == "--auto: this script cannot be shared"
    )
    assert reason_of("", "train.py") == reason_of("\n \n", "train.py") == ""
    long = reason_of(_raised("raise ValueError('a' * 9000 + 'the end')"), "train.py")
    assert len(long) < MOST_REASON and long.endswith("the end (train.py, line 1)")
    for odd in ("Traceback (most recent call last):", '  File "x", line 3', "\x00\x1b[2J"):
        assert len(reason_of(odd, "train.py")) <= len(odd)
