"""Two control planes on one Postgres: one is frozen, then one is killed.

`benchmarks.platform.failover` is the whole of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.platform.failover import TOY, Plane, pids
from tests.waiting import wait_until

import swell
from swell.cli import _platform
from swell.domain import SwellError
from swell.engines.nursery import Nursery

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture
def planes(tmp_path: Path, postgres_url: str, nursery: Nursery) -> Iterator[list[Plane]]:
    """Two control planes of one home; jobs start in a fraction of a second."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    both = [Plane(tmp_path / "home", postgres_url, "--slots", "2") for _ in range(2)]
    for plane in both:
        plane.start()
    yield both
    for plane in both:
        plane.send(signal.SIGCONT)
        plane.end(signal.SIGKILL)


def test_another_control_plane_takes_over_from_a_frozen_and_from_a_killed_one(
    planes: list[Plane], tmp_path: Path
) -> None:
    home, hurry = tmp_path / "home", tmp_path / "hurry"
    for plane in planes:
        plane.wait()
    wait_until(lambda: any(plane.leads for plane in planes), 60, "a leader")
    first, second = sorted(planes, key=lambda plane: not plane.leads)
    token = (home / "tokens" / "admin").read_text().strip()
    with swell.Client(second.url, token, retry_s=120.0) as client:  # the standby's address is as good
        args = ["--epochs", "20", "--sample-ms", "50", "--hurry", str(hurry)]
        job = client.submit(TOY, name="toy", args=args, max_workers=1, idempotency_key="one")
        workers = wait_until(lambda: pids(home, job.job_id), 60, "the job to train")

        first.send(signal.SIGSTOP)
        wait_until(lambda: second.leads, 60, "the standby to lead after a freeze")
        assert client.submit(TOY, name="toy", args=args, max_workers=1, idempotency_key="one") == client.job(
            job
        )
        first.send(signal.SIGCONT)
        wait_until(
            lambda: (h := first.health()) and (h["role"], h["leader"]) == ("standby", second.url),
            60,
            "the first to stand by, and to know who leads",
        )
        assert (home / "up.lock").exists() and _platform.running_pid(home) == second.process.pid  # type: ignore[union-attr]
        with pytest.raises(SwellError, match="running"):
            _platform.only_one(home)  # as a control plane without --ha

        second.end(signal.SIGKILL)
        wait_until(lambda: first.leads, 60, "the former leader to lead again")
    with swell.Client(home=home, role="admin", retry_s=60.0) as client:  # the home knows who leads
        assert pids(home, job.job_id) == workers, "the job trained on in the same process"
        hurry.touch()
        assert client.wait(job, timeout_s=120).phase == "finished"
        assert len(client.jobs()) == 1
        kinds = [event.kind for event in client.events(since=0, follow=False) if event.job_id == job.job_id]
        assert kinds.count("submitted") == kinds.count("allocated") == kinds.count("finished") == 1
    assert _platform.others_run(home)
    assert len(_platform.stop_planes(home, None)) == 1
    assert not _platform.others_run(home)
