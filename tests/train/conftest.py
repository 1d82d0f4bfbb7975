"""Real jobs for tests: real processes, real sockets, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.runtime.stage import Stage as PreparedProcess
from tests.waiting import wait_until

from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

SLOWLY = """
import os as _os, time as _time

def _slowly(seconds, nap=_time.sleep, calls=[0]):
    calls[0] += 1
    slower = {times} * max(1.0, calls[0] / 100)
    nap(seconds if seconds > 0.1 else 0 if _os.path.exists({hurry!r}) else slower * seconds)

_time.sleep = _slowly
"""
"""Put before scripts: their steps take longer, and after a hundred longer and longer, until the test waits
for the end of its job. So no job is over before its test has done to it what it wants, however slow the
machine is."""
TIMES = 4


def printed_json(text: str) -> dict[str, Any]:
    """The only JSON in an output."""
    lines = [line for line in text.splitlines() if '{"' in line]
    assert len(lines) == 1, text
    found: dict[str, Any] = json.loads(lines[0][lines[0].index('{"') :])
    return found


class PlainRun:
    """A script that runs plainly beside its job, without its pauses."""

    def __init__(self, stage: Any, text: str, folder: Path) -> None:
        self._stage, self._output = stage, folder / "printed"
        (folder / "plain.py").write_text("import time; time.sleep = lambda s: None\n" + text)
        self._pid = stage.prepared.plain(folder / "plain.py", cwd=folder, output=self._output, env={})

    def printed(self) -> dict[str, Any]:
        """The JSON that it printed."""
        assert self._stage.prepared.wait(self._pid, 60.0) == 0, self._output.read_text()
        return printed_json(self._output.read_text())


class RunningJob:
    """One job of a test."""

    def __init__(self, stage: Stage, directory: Path, pid: int, hurry: Path) -> None:
        self._stage = stage
        self._hurry = hurry
        self.directory = JobDirectory(directory)
        self.pid = pid
        self.code: int | None = None

    def client(self) -> JobClient:
        return JobClient(self.directory, wait_s=30.0)

    def wait_for(self, condition: Callable[[dict[str, Any]], Any], timeout_s: float = 90.0) -> dict[str, Any]:
        with self.client() as client:
            return client.wait_for(condition, timeout_s)

    def members(self, count: int) -> dict[str, Any]:
        return self.wait_for(lambda s: len(s["members"]) == count and s["step"] > 0)

    def resize(self, count: int) -> None:
        with self.client() as client:
            client.resize(count)

    def kill(self, index: int, number: int = signal.SIGKILL) -> str:
        with self.client() as client:
            status = client.status()
        name: str = status["members"][index]
        os.kill(status["pids"][name], number)
        return name

    def grow_and_lose_the_leader_then_all(self) -> None:
        """One worker becomes two, the leader dies, and then both: the job goes on from its checkpoint."""
        self.resize(2)
        begin = self.members(2)["step"]
        self.wait_for(lambda s: s["step"] >= begin + 3)
        first = self.kill(0)
        self.wait_for(lambda s: len(s["members"]) == 2 and first not in s["members"])
        with self.client() as client:
            status = client.status()
        dead = set(status["members"])
        for name in dead:
            os.kill(status["pids"][name], signal.SIGKILL)
        self.wait_for(lambda s: s["members"] and not dead & set(s["members"]))

    def printed(self) -> dict[str, Any]:
        """The JSON that the leader of a job under `--auto` printed, after the job has ended well."""
        assert self.wait(120.0) == 0, self.output()
        assert "could not follow" not in self.output() and not self.events("confined")
        return printed_json(self.output())

    def kill_coordinator(self) -> None:
        data = json.loads((self.directory.path / "coordinator.json").read_text())
        os.kill(int(data["pid"]), signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        self._hurry.touch()
        if self.code is None:
            self.code = self._stage.prepared.wait(self.pid, timeout_s)
        assert self.code is not None, f"the job did not end in {timeout_s} s: {self.output()}"
        return self.code

    def output(self) -> str:
        path = self.directory.path / "output.txt"
        return path.read_text() if path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.directory.events() if e["event"] == name]

    def leaves_nothing(self) -> None:
        """Wait until no process of this job exists any more: the last may take a moment on a busy machine."""

        def names() -> str:
            alive = [Path("/proc") / pid for pid in self.left_behind()]
            return f"the end of {[(p.name, (p / 'comm').read_text().strip()) for p in alive if p.exists()]}"

        wait_until(lambda: not self.left_behind(), 30, names)

    def left_behind(self) -> list[str]:
        """Processes of this job that still exist."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
                if any(target.startswith(str(self.directory.path)) for target in targets):
                    found.append(process.name)
        return found


class Stage:
    """Starts jobs from one prepared process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0
        self.jobs: list[RunningJob] = []
        self.prepared = PreparedProcess()

    def run(
        self, script: str | Path, *arguments: str, directory: Path | None = None, **config: Any
    ) -> RunningJob:
        """Start a job; `script` is a path or the text of one."""
        self._count += 1
        directory = directory or self._root / f"job{self._count}"
        hurry = self._root / f"hurry{self._count}"
        if isinstance(script, str):
            text = SLOWLY.format(hurry=str(hurry), times=TIMES) + textwrap.dedent(script)
            script = self._root / f"script{self._count}.py"
            script.write_text(text)
        defaults = {"threads": 1, "gather_s": 0.3, "silent_after_s": 5.0, "maximum": 4, "workers": 2}
        fields = {**defaults, **config, "script": str(script), "arguments": list(arguments)}
        job = RunningJob(self, directory, self.prepared.launch(directory, **fields), hurry)
        self.jobs.append(job)
        return job

    def end_jobs(self) -> None:
        for job in self.jobs:
            if job.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGKILL)
                self.prepared.wait(job.pid, 10.0)
        self.jobs.clear()


@pytest.fixture(scope="session")
def _stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("jobs"))
    yield stage
    stage.prepared.close()


@pytest.fixture
def stage(_stage: Stage) -> Iterator[Stage]:
    """Start real jobs; whatever a test leaves running is ended."""
    yield _stage
    _stage.end_jobs()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait for a condition to become true."""

    def check(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
        wait_until(condition, timeout_s, "what this test expects of its jobs")

    return check
