"""Stores on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.store import Store, connect


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
