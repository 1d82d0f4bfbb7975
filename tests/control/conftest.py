"""Stores on both databases; a Postgres server of the tests' own, on a socket in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swell.control.database import connect
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.store import Store

PG = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def make_record(job_id: str = "a-1", phase: Phase = Phase.QUEUED, **more: object) -> JobRecord:
    """A job as the control plane would keep it."""
    request = JobRequest(name="a", script="train.py", **more.pop("request", {}))  # type: ignore[arg-type]
    values: dict[str, object] = {
        "job_id": job_id,
        "owner": "ann",
        "request": request,
        "submitted_s": 100.0,
        "phase": phase,
        "promise": Promise(admitted=True, estimate=Estimate(finish_s=None)),
    }
    return JobRecord(**(values | more))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real Postgres server for this session."""
    if not PG or shutil.which("setpriv") is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    pytest.importorskip("psycopg")
    # Not below pytest's own folder, which only its owner may enter: the server refuses to run as root.
    home = Path(tempfile.mkdtemp(prefix="swell-pg-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        os.chown(home, 65534, 65534)
    run = [*as_user, str(PG[-1] / "initdb"), "-D", str(home / "db"), "-U", "swell", "-A", "trust", "-N"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd="/")
    if done.returncode:
        pytest.skip(f"initdb failed here: {done.stderr[-300:]}")
    log = (home / "server.log").open("wb")
    server = subprocess.Popen(
        [*as_user, str(PG[-1] / "postgres"), "-D", str(home / "db"), "-k", str(home), "-h", "", "-F"],
        stdout=log,
        stderr=log,
        cwd="/",
    )
    try:
        ready = [str(PG[-1] / "pg_isready"), "-h", str(home), "-U", "swell", "-t", "30"]
        for _ in range(100):
            if subprocess.run(ready, capture_output=True).returncode == 0:
                break
        yield f"postgresql:///postgres?host={home}&user=swell"
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same store again and again, as a restarted control plane would."""
    opened: list[Store] = []
    if request.param == "sqlite":
        url = str(tmp_path / "store.db")
    else:
        url = request.getfixturevalue("postgres_url")
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

    def open_() -> Store:
        for store in opened:
            store.close()
        opened[:] = [Store(connect(url))]
        return opened[0]

    yield open_
    for store in opened:
        store.close()
