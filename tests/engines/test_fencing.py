"""A control plane that leads no longer touches no job, and what it started too late does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from swell.domain import JobRequest
from swell.engines import Launch
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.order import JobOrder, LeaderFence, order_outdated
from swell.engines.supervised import SupervisedEngine
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import supervise


def launch(home: Path) -> Launch:
    (home / "jobs" / "a").mkdir(parents=True, exist_ok=True)
    request = JobRequest(name="a", script="train.py", workdir=str(home))
    return Launch(job_id="a", request=request, job_dir=home / "jobs" / "a")


def test_numbers_of_a_home_only_grow_and_count_within_one_store(tmp_path: Path) -> None:
    old, new, other = LeaderFence("s", 1), LeaderFence("s", 2), LeaderFence("t", 1)
    old.raise_in(tmp_path)
    assert not old.outdated(tmp_path) and not new.outdated(tmp_path)
    new.raise_in(tmp_path)
    old.raise_in(tmp_path)  # it was frozen before it wrote its number
    assert old.outdated(tmp_path) and not new.outdated(tmp_path)
    assert order_outdated(old.for_order(tmp_path)) and not order_outdated(new.for_order(tmp_path))
    assert not order_outdated({}) and not other.outdated(tmp_path), "another store counts anew"


def test_a_supervisor_with_the_order_of_a_former_leader_does_not_run(tmp_path: Path) -> None:
    given, home = launch(tmp_path), tmp_path
    extras = LeaderFence("s", 1).for_order(home)
    JobOrder(launch=given, slots=(0,), placement=(0,), extras=extras).write()
    LeaderFence("s", 2).raise_in(home)
    assert supervise(given.job_dir) == 0
    assert not (given.job_dir / "runs").exists() and not (home / "orders" / "a" / "exit.json").exists()


class Watched(LocalSite):
    """A site that only notes which jobs it would have started."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, slots=1)
        self.started: list[str] = []

    def start_supervisor(self, job: SupervisedJob) -> Any:
        self.started.append(job.directory.name)

        class Child:
            def poll(self) -> int:
                return 0

            def send_signal(self, number: int) -> None:
                pass

        return Child()


def test_an_engine_touches_no_job_unless_its_control_plane_leads(tmp_path: Path, nursery: Nursery) -> None:
    site, asked = Watched(tmp_path), list[int]()
    engine = SupervisedEngine(site)
    leads = False

    def may_act() -> bool:
        asked.append(1)
        return leads

    engine.may_act = may_act
    engine.start(lambda: None)
    try:
        engine.apply(launch(tmp_path), (0,))
        before = len(asked)
        wait_until(lambda: len(asked) > before + 2, 30, "the engine to ask twice whether it may act")
        assert not site.started
        leads = True
        wait_until(lambda: site.started, 30, "the engine to start the job")
    finally:
        engine.close()
