"""The process that supervisors are forked from: used when it is there, done without when it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.engines import RunState, nursery
from swell.engines.local import LocalSite
from swell.engines.nursery import SHARED
from swell.engines.processes import MARK, mark, parent, workers_of

from .conftest import Bench


def _running(bench: Bench, job_id: str) -> None:
    bench.wait(bench.engines[-1], job_id, lambda seen: seen and seen.state is RunState.RUNNING)


def _supervisor(bench: Bench, job_id: str) -> int:
    return int((bench.home / "jobs" / job_id / "lock").read_text().split()[0])


def test_the_first_job_waits_for_the_nursery_and_is_forked_from_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED)
    engine = bench.engine()
    engine.apply(bench.launch("a", "--epochs", 1000, "--sample-ms", 3), (0, 1))
    _running(bench, "a")
    supervisor = _supervisor(bench, "a")
    assert Path(f"/proc/{supervisor}/comm").read_text() == "swell-superviso\n"
    assert f"{MARK}={mark(bench.home / 'jobs' / 'a')}" in Path(f"/proc/{supervisor}/environ").read_text()
    nursery = parent(supervisor)
    assert nursery is not None and b"swell.engines.nursery" in Path(f"/proc/{nursery}/cmdline").read_bytes()
    workers = set(workers_of(bench.home / "jobs" / "a"))
    assert len(workers) == 2

    engine.close()  # the nursery ends with its engine, the job does not
    wait_until(lambda: not Path(f"/proc/{nursery}").exists(), 30, lambda: f"process {nursery}")
    steps = len(bench.steps("a"))
    bench.wait_for(lambda: len(bench.steps("a")) > steps)
    assert set(workers_of(bench.home / "jobs" / "a")) == workers


def test_a_job_starts_without_a_nursery_that_was_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED, str(bench.home / "nobody-listens"))
    (bench.home / "nobody-listens").touch()
    bench.engine().apply(bench.launch("a"), (0,))
    _running(bench, "a")
    assert b"swell.engines.supervisor" in Path(f"/proc/{_supervisor(bench, 'a')}/cmdline").read_bytes()


STRANGER = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    sock.sendall(json.dumps({"directory": sys.argv[2], "env": {"SWELL_LOCAL_JOB": "x"}}).encode() + b"\\n")
    print(sock.recv(64))
"""


def test_a_nursery_forks_for_its_engine_alone_and_comes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED)
    monkeypatch.setattr(nursery, "_RENEW_S", 0.0)
    engine = bench.engine()
    assert isinstance(engine.site, LocalSite)
    made = engine.site._nursery
    assert made is not None and made._process is not None
    wait_until(made.path.exists, 120, "the nursery")
    (bench.home / "jobs" / "a").mkdir(parents=True)
    words = [sys.executable, "-c", STRANGER, str(made.path), str(bench.home / "jobs" / "a")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120)
    closed = ("ConnectionResetError", "BrokenPipeError")  # before or while the stranger spoke
    assert said.stdout == "b''\n" or any(error in said.stderr for error in closed), said
    first = made._process
    first.kill()
    wait_until(lambda: made._process is not first and made.path.exists(), 120, "the next nursery")
    engine.apply(bench.launch("b", "--epochs", 1), (0,))
    bench.wait(engine, "b", lambda seen: seen and seen.state is RunState.FINISHED, 200)
    assert not (bench.home / "jobs" / "a" / "supervisor.log").exists()
