"""Local engines with a home of their own, and a look at /proc to see what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.domain import JobRequest
from swell.engines import EngineReport, Launch, Observed
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.processes import processes_of
from swell.engines.supervised import SupervisedEngine

TOY = Path(__file__).with_name("toy.py")


class Bench:
    """A home directory, the engines on it, and the jobs started in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.engines: list[SupervisedEngine] = []
        self.reports: list[EngineReport] = []

    def engine(self, slots: int = 4, **options: object) -> SupervisedEngine:
        """Another engine on the same home, as after a restart of the control plane."""
        made = SupervisedEngine(LocalSite(self.home, slots=slots, **options))  # type: ignore[arg-type]
        made.start(lambda: None)
        self.engines.append(made)
        return made

    def launch(self, job_id: str, *args: object, **options: object) -> Launch:
        """A job that runs the toy, whose samples take no time any more after `hurry`."""
        fields: dict[str, Any] = {
            "script": str(TOY),
            "workdir": str(self.home),
            "checkpoint_s": 1.0,
        } | options
        arguments = ("--hurry", str(self.home / "hurry"), *(str(a) for a in args))
        request = JobRequest(name=job_id, args=arguments, **fields)
        return Launch(job_id=job_id, request=request, job_dir=self.home / "jobs" / job_id, max_workers=4)

    def hurry(self) -> None:
        """Let jobs end that were given more than enough to do."""
        (self.home / "hurry").touch()

    def wait(
        self,
        engine: SupervisedEngine,
        job_id: str,
        condition: Callable[[Observed | None], object],
        timeout_s: float = 60,
    ) -> Observed | None:
        """What the engine sees of the job once `condition` holds."""

        def look() -> tuple[Observed | None] | None:
            self.reports.extend(engine.reports())
            seen = engine.observe().get(job_id)
            return (seen,) if condition(seen) else None

        def state() -> str:
            return f"{job_id}, which is {engine.observe().get(job_id)}: {self.output(job_id)[-2000:]}"

        (seen,) = wait_until(look, timeout_s, state, poll_s=0.05) or (None,)
        return seen

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        """Until `condition` holds."""
        wait_until(condition, timeout_s, lambda: f"the jobs in {self.home}", poll_s=0.05)

    def output(self, job_id: str) -> str:
        """What the job's workers printed."""
        path = self.home / "jobs" / job_id / "output.log"
        return path.read_text() if path.exists() else ""

    def steps(self, job_id: str) -> list[int]:
        """The steps the job's leaders printed, in order."""
        return [int(line.split()[2]) for line in self.output(job_id).splitlines() if "| step " in line]

    def processes(self, job_id: str) -> list[int]:
        """Every living process of a job."""
        return processes_of(self.home / "jobs" / job_id)


@pytest.fixture
def bench(tmp_path: Path, nursery: Nursery) -> Iterator[Bench]:
    """A place for engines; whatever still runs at the end is killed."""
    bench = Bench(tmp_path)
    yield bench
    for engine in bench.engines:
        engine.close()
    for folder in (tmp_path / "jobs").glob("*"):
        for pid in processes_of(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
