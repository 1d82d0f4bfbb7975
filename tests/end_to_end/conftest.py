"""A whole platform for a test: store, control plane and an engine with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.control.model import JobRecord, JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Event
from swell.engines import Engine
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.processes import processes_of
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine
from swell.policies import DEFAULT

TOY = Path(__file__).parent.parent / "engines" / "toy.py"

ENGINES = ["local", "ray"]
"""Every engine that real jobs run on; each gets the same tests. Ray has four nodes of two slots."""


class Platform:
    """A control plane in this process and the jobs it runs."""

    def __init__(
        self, home: Path, engine: Callable[[], Engine], policy: str, round_s: float | None = None
    ) -> None:
        self.home, self._engine, self._policy, self._round_s = home, engine, policy, round_s
        self.plane = self._open()

    def _open(self) -> ControlPlane:
        store = Store(connect(str(self.home / "store.db")))
        options = {"policy": self._policy, "round_s": self._round_s}
        plane = ControlPlane(store, self._engine(), home=self.home, interval_s=1.0, **options)  # type: ignore[arg-type]
        plane.start()
        return plane

    def restart(self) -> None:
        """Another control plane in place of this one; jobs go on meanwhile."""
        self.close()
        self.plane = self._open()

    def close(self) -> None:
        """Stop the control plane."""
        self.plane.stop()
        self.plane.store.close()

    @property
    def slots(self) -> int:
        """How many there are."""
        return sum(node.gpus for node in self.plane.nodes.states())

    def submit(self, name: str, *args: object, **options: object) -> JobRecord:
        """Hand in the toy."""
        args = tuple(map(str, args))
        request = JobRequest(name=name, script=str(TOY), args=args, workdir=str(TOY.parent), **options)  # type: ignore[arg-type]
        return self.plane.jobs.submit(request, "ann")

    def wait(
        self, job_id: str, condition: Callable[[JobRecord], object], timeout_s: float = 90.0
    ) -> JobRecord:
        """The job's record once `condition` holds."""

        def look() -> JobRecord | None:
            record = self.plane.jobs.get(job_id)
            return record if condition(record) else None

        def state() -> str:
            return f"{self.plane.jobs.get(job_id)} {self.plane.trouble} {self.output(job_id)[-1500:]}"

        record = wait_until(look, timeout_s, state, poll_s=0.05)
        assert record is not None
        return record

    def wait_over(self, *job_ids: str, timeout_s: float = 120.0) -> list[JobRecord]:
        """All records once they are over."""
        until = time.monotonic() + timeout_s
        return [self.wait(j, lambda r: r.phase.over, max(until - time.monotonic(), 0.0)) for j in job_ids]

    def output(self, job_id: str) -> str:
        """What the job printed."""
        path = self.home / "jobs" / job_id / "output.log"
        return path.read_text() if path.exists() else ""

    def steps(self, job_id: str) -> int:
        """Steps its leaders printed."""
        return self.output(job_id).count("| step ")

    def loss(self, job_id: str) -> float:
        """The loss the toy printed at its end."""
        lines = [line for line in self.output(job_id).splitlines() if "final loss" in line]
        assert len(lines) == 1, f"the end of training was printed {len(lines)} times"
        return float(lines[0].split()[-1])

    def events(self) -> list[Event]:
        """The whole log."""
        return [event for _, event in self.plane.events(limit=100_000)]


@pytest.fixture(autouse=True, scope="session")
def _prepared(nursery: Nursery) -> None:
    """Jobs on local engines start in a fraction of a second."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Engine]:
    """Makes an engine; `nodes` such as 2x2 is what a local one shall be like."""
    if request.param == "local":
        return lambda nodes: SupervisedEngine(LocalSite(tmp_path, nodes=nodes))
    address = request.getfixturevalue("ray_cluster").address
    return lambda _: SupervisedEngine(RaySite(tmp_path, RayOptions(address=address)))


@pytest.fixture
def platform(tmp_path: Path, engine: Callable[[str], Engine]) -> Iterator[Callable[..., Platform]]:
    """Makes a platform; afterwards nothing of it is left."""
    made: list[Platform] = []

    def make(policy: str = DEFAULT, nodes: str = "1x4", round_s: float | None = None) -> Platform:
        made.append(Platform(tmp_path, lambda: engine(nodes), policy, round_s))
        return made[-1]

    yield make
    for one in made:
        for record in one.plane.jobs.find():
            if not record.phase.over:
                with contextlib.suppress(Exception):
                    one.plane.jobs.cancel(record.job_id)
        one.close()
    for folder in (tmp_path / "jobs").glob("*"):
        for pid in processes_of(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def finished(record: JobRecord) -> bool:
    """Whether a job came to a good end."""
    return record.phase is Phase.FINISHED
