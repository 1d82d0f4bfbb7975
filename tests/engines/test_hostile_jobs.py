"""Real jobs that misbehave: the engine, the other jobs and the readers of their output go on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.domain import JobRequest
from swell.engines import Launch, RunState
from swell.engines.processes import for_jobs
from swell.engines.supervisor import is_locked

from .conftest import Bench

HOSTILE = Path(__file__).with_name("hostile.py")


def launch(bench: Bench, told: Path) -> Launch:
    request = JobRequest(
        name="h", script=str(HOSTILE), args=(str(told),), workdir=str(bench.home), env={"MINE": "1"}
    )
    return Launch(job_id="h", request=request, job_dir=bench.home / "jobs" / "h", max_workers=4)


def test_a_job_with_many_files_a_survivor_and_a_pipe_for_output(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATORS_PASSWORD", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # so are the engine's own descriptors
    try:
        engine = bench.engine()
        told = bench.home / "told.json"
        engine.apply(launch(bench, told), (0,))
        seen = bench.wait(engine, "h", lambda o: o and o.state in (RunState.FINISHED, RunState.FAILED))
        assert seen is not None and seen.state is RunState.FINISHED, bench.output("h")
        said = json.loads(told.read_text())
        assert said["descriptors"] > 1023
        assert "secret" not in said["env"].values() and said["env"]["MINE"] == "1"
        wait_until(lambda: not _alive(said["pid"]), 20, "the process that shed its environment to be ended")
        began_s = time.monotonic()
        assert engine.logs("h", bench.home / "jobs" / "h") == (b"", 0)
        assert time.monotonic() - began_s < 1.0
        assert engine.parts()[0].look() == ""
    finally:
        for descriptor in many:
            os.close(descriptor)


def test_a_job_that_is_stopped_before_it_trains_gives_its_slots_back_at_once(bench: Bench) -> None:
    engine = bench.engine()
    order = bench.launch("a", "--epochs", 100, "--sample-ms", 50)
    engine.apply(order, (0, 1))
    bench.wait_for(lambda: is_locked(bench.home / "jobs" / "a"))
    engine.apply(order, ())
    began_s = time.monotonic()
    bench.wait(engine, "a", lambda o: o and o.state is RunState.STOPPED)
    assert time.monotonic() - began_s < 15.0
    assert not bench.processes("a")


def test_a_zygote_that_is_killed_before_its_first_worker_costs_nothing(bench: Bench) -> None:
    engine = bench.engine()
    order = bench.launch("a", "--epochs", 1)
    engine.apply(order, (0,))
    (zygote,) = wait_until(
        lambda: _named("swell-zygote", bench.processes("a")), 30, "the zygote", poll_s=0.001
    )
    os.kill(zygote, signal.SIGKILL)
    bench.hurry()
    seen = bench.wait(engine, "a", lambda o: o and o.state in (RunState.FINISHED, RunState.FAILED))
    assert seen is not None and seen.state is RunState.FINISHED, seen


def _named(name: str, pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except OSError:
            continue
    return found


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_jobs_get_what_programs_need_and_what_the_operator_passes() -> None:
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "AWS_SECRET_ACCESS_KEY": "x",
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
    }
    assert for_jobs(given) == {"PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO"}
    assert for_jobs(given, ["HF_HOME"])["HF_HOME"] == "/hf"
    assert (
        for_jobs({"RAY_AUTH_TOKEN": "x", "TORCH_HUB_TOKEN": "y", "SWELL_STORE": "postgresql://u:p@h"}) == {}
    )
