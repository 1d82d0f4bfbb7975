"""start.json: what one version of swell wrote, the next can read; and nobody but the platform writes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.domain import JobRequest
from swell.engines import Launch
from swell.engines.local import LocalSite
from swell.engines.nursery import Nursery
from swell.engines.order import JobOrder, LeaderFence, folder_of, order_outdated
from swell.engines.processes import MARK, mark
from swell.engines.supervised import SupervisedEngine
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import supervise


def _order(home: Path, job_id: str = "a", **fields: Any) -> JobOrder:
    request = JobRequest(name="a", script="t.py", args=("1",), workdir="/w", env={"A": "b"})
    launch = Launch(job_id=job_id, request=request, job_dir=home / "jobs" / job_id, max_workers=5)
    return JobOrder(**{"launch": launch, "slots": (3,), "placement": (3, 4)} | fields)


def test_an_order_comes_back_as_it_was_and_only_the_platform_can_read_it(tmp_path: Path) -> None:
    order = _order(tmp_path, account="nobody", extras={"ray": {"session": "s"}})
    order.write()
    folder = folder_of(order.launch.job_dir)
    assert JobOrder.read(order.launch.job_dir) == order
    assert folder == tmp_path / "orders" / "a", "outside the job's directory"
    for path in (folder.parent, folder, folder / "start.json"):
        assert path.stat().st_mode & 0o077 == 0, "env may hold secrets"


def test_a_relative_working_directory_is_where_the_engine_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = JobRequest(name="a", script="t.py", workdir="here")
    launch = Launch(job_id="a", request=request, job_dir=tmp_path / "jobs" / "a")
    JobOrder(launch=launch, slots=(), placement=()).write()
    assert JobOrder.read(launch.job_dir).launch.workdir == tmp_path / "here"


def test_an_order_of_a_newer_version_is_read(tmp_path: Path) -> None:
    order = _order(tmp_path)
    order.write()
    path = folder_of(order.launch.job_dir) / "start.json"
    content = json.loads(path.read_text())
    content["request"]["invented_later"] = 1
    path.write_text(json.dumps(content))
    assert JobOrder.read(order.launch.job_dir) == order


def _taken_over(home: Path) -> set[str]:
    """The jobs that an engine finds in this home as it starts."""
    engine = SupervisedEngine(LocalSite(home, slots=4))
    engine.may_act = lambda: False  # its thread is to do nothing
    engine.start(lambda: None)
    try:
        assert all(name == job.job_id for name, job in engine._jobs.items())
        return set(engine._jobs)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"request": ' * 50_000,
        "null",
        "\x00\xff",
        json.dumps({"request": {"name": "a", "script": "t.py"}, "owner": ""}),
    ],
    ids=["lists", "objects", "null", "noise", "incomplete"],
)
def test_an_order_that_cannot_be_read_costs_that_job_only(
    tmp_path: Path, nursery: Nursery, text: str
) -> None:
    for job_id in ("a", "b", "c"):
        _order(tmp_path, job_id).write()
    (tmp_path / "orders" / "b" / "start.json").write_text(text)
    assert _taken_over(tmp_path) == {"a", "c"}


@pytest.mark.parametrize(
    "changed",
    [
        {"max_workers": float("inf")},
        {"max_workers": True},
        {"slots": [0.5]},
        {"slots": "01"},
        {"slots": [-1]},
        {"placement": {"0": 1}},
        {"placement": None},
        {"request": []},
    ],
    ids=str,
)
def test_odd_values_of_an_order_cost_that_job_only(
    tmp_path: Path, nursery: Nursery, changed: dict[str, Any]
) -> None:
    for job_id in ("a", "b"):
        _order(tmp_path, job_id).write()
    path = tmp_path / "orders" / "b" / "start.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert _taken_over(tmp_path) == {"a"}


def test_a_job_that_an_older_version_started_is_ended_and_nothing_of_its_order_is_read(
    tmp_path: Path, nursery: Nursery
) -> None:
    own = tmp_path / "jobs" / "a"
    own.mkdir(parents=True)
    (own / "start.json").write_text("[" * 100_000)
    (tmp_path / "jobs" / "b" / "start.json").mkdir(parents=True)
    old = subprocess.Popen(["sleep", "300"], env={MARK: mark(own)})
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    engine.start(lambda: None)
    try:
        assert old.wait(10) == -9 and engine._jobs == {}
        assert not (own / "start.json").exists()
    finally:
        engine.close()
        old.kill()


def test_files_in_a_jobs_own_directory_say_nothing_about_jobs(tmp_path: Path, nursery: Nursery) -> None:
    """A job that names another one in an order, and ends it, in the place where older versions read that."""
    _order(tmp_path, "victim").write()
    for job_id in ("victim", "thief"):
        own = tmp_path / "jobs" / job_id
        own.mkdir(parents=True)
        written = json.loads((tmp_path / "orders" / "victim" / "start.json").read_text())
        (own / "start.json").write_text(json.dumps(written | {"job_id": "victim"}))
        (own / "exit.json").write_text(json.dumps({"code": 0, "reason": ""}))
    engine = SupervisedEngine(LocalSite(tmp_path, slots=4))
    engine.start(lambda: None)
    try:
        assert set(engine._jobs) == {"victim"}
        assert engine._jobs["victim"].state.outcome is None
        assert (tmp_path / "jobs" / "victim" / "start.json").exists(), "it is the job's own"
        assert not (tmp_path / "jobs" / "thief" / "start.json").exists()
    finally:
        engine.close()


# A control plane that leads no longer touches no job, and what it started too late does not run.


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
