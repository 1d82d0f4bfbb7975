"""Submissions of many threads on both databases: none lost, none doubled, all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swell.control.errors import StoreUnavailable
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store
from swell.domain import Cluster, EventKind, InputError
from swell.engines.null import NullEngine


@pytest.fixture
def plane(open_store: Callable[[], Store], tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane whose jobs never end."""
    (tmp_path / "train.py").write_text("")
    engine = NullEngine(Cluster.parse("1x4"), duration_s=1e6)
    running = ControlPlane(open_store(), engine, home=tmp_path, policy="afs-l")
    running.start()
    yield running
    running.stop()


def _request(plane: ControlPlane, **more: object) -> JobRequest:
    return JobRequest(name="a", script="train.py", workdir=str(plane.home), **more)  # type: ignore[arg-type]


def test_crowds_with_shared_keys_make_one_job_for_each_key(plane: ControlPlane) -> None:
    ids: dict[str, set[str]] = {f"k{i}": set() for i in range(12)}
    refused = []

    def ask() -> None:
        for key, found in ids.items():
            found.add(plane.jobs.submit(_request(plane), "ann", key).job_id)
            try:
                plane.jobs.submit(_request(plane, min_workers=99), "ann", f"bad-{key}")
            except InputError as error:
                refused.append(error.field)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(len(found) == 1 for found in ids.values())
    assert refused == ["min_workers"] * 144
    kept = [record.job_id for record in plane.jobs.find(limit=1000)]
    assert sorted(kept) == sorted(job_id for found in ids.values() for job_id in found)
    events = plane.events(limit=10_000)
    submitted = [event.job_id for _, event in events if event.kind is EventKind.SUBMITTED]
    assert sorted(map(str, submitted)) == sorted(kept), "what happened and what is there differ"


def test_a_crowd_whose_commit_fails_leaves_nothing_behind(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, calls = plane.store.accept, []

    def third_fails(*args: object) -> list[int]:
        calls.append(args)
        if len(calls) % 3 == 0:
            raise StoreUnavailable("the disk is full")
        return accept(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(plane.store, "accept", third_fails)
    answered, failed = [], []

    def ask() -> None:
        try:
            answered.append(plane.jobs.submit(_request(plane), "ann").job_id)
        except StoreUnavailable:
            failed.append(1)

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed
    assert len(answered) + len(failed) == 30
    monkeypatch.undo()
    in_store = [record.job_id for record in plane.store.jobs(limit=1000)]
    assert sorted(in_store) == sorted(answered), "a job that was refused is there, or an accepted one is not"
    assert sorted(record.job_id for record in plane.jobs.find()) == sorted(answered)


def test_pages_of_jobs_go_on_where_the_last_one_ended(plane: ControlPlane) -> None:
    ids = [plane.jobs.submit(_request(plane), "ann" if i % 2 else "bob").job_id for i in range(9)]
    for job_id in ids[::3]:
        plane.jobs.cancel(job_id)
    seen: list[str] = []
    page = plane.jobs.find(limit=2)
    while page:
        seen += [record.job_id for record in page]
        page = plane.jobs.find(limit=2, before=page[-1])
    assert seen == ids[::-1]
    cancelled = plane.jobs.find(phase=Phase.CANCELLED, limit=2)
    assert [r.job_id for r in cancelled] == ids[::3][::-1][:2]
    assert [r.job_id for r in plane.jobs.find("ann", limit=100)] == ids[1::2][::-1]
