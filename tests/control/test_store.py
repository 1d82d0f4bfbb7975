"""The store, on SQLite and on a real Postgres: nothing accepted is lost, nothing half written is seen."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.conftest import make_record

from swell.control.errors import Conflict, StoreUnavailable
from swell.control.model import Estimate, JobRequest, Phase, Promise
from swell.control.store import MIGRATIONS, Store, connect, record_from_json, record_to_json
from swell.domain import Event, EventKind, InputError

Open = Callable[[], Store]


def event(kind: EventKind, job_id: str = "a-1", time_s: float = 1.0) -> Event:
    return Event(time_s, kind, job_id=job_id, data={"x": [1, 2]})


def test_a_job_and_its_events_survive_a_restart(open_store: Open) -> None:
    promise = Promise(admitted=True, guaranteed_s=9.0, estimate=Estimate(finish_s=8.0, source="history"))
    record = make_record(promise=promise, wanted=(1, 3), request={"args": ("--lr", "1"), "env": {"A": "b"}})
    seqs = open_store().accept(record, "key", [event(EventKind.SUBMITTED), event(EventKind.ADMITTED)])
    again = open_store()
    assert again.job("a-1") == record
    assert again.by_key("ann", "key") == record
    assert again.by_key("bob", "key") is None
    assert [(seq, e.kind) for seq, e in again.events()] == list(
        zip(seqs, [EventKind.SUBMITTED, EventKind.ADMITTED], strict=True)
    )
    assert seqs == sorted(seqs) and again.last_seq() == seqs[-1]


def test_a_second_job_of_the_same_id_or_key_is_refused_whole(open_store: Open) -> None:
    store = open_store()
    store.accept(make_record("a-1"), "key", [event(EventKind.SUBMITTED)])
    for record, key in ((make_record("a-1"), None), (make_record("a-2"), "key")):
        with pytest.raises(Conflict):
            store.accept(record, key, [event(EventKind.SUBMITTED)])
    assert len(store.jobs()) == 1
    assert len(store.events()) == 1


def test_jobs_without_a_key_do_not_collide(open_store: Open) -> None:
    store = open_store()
    store.accept(make_record("a-1"), None, [])
    store.accept(make_record("a-2"), None, [])
    assert {r.job_id for r in store.jobs()} == {"a-1", "a-2"}


def test_a_change_and_its_events_are_written_together_or_not_at_all(open_store: Open) -> None:
    store = open_store()
    store.accept(make_record(), None, [])
    broken = Event(1.0, EventKind.FINISHED, job_id="a-1", data={"bad": object()})
    with pytest.raises(TypeError):
        store.save([replace(make_record(), phase=Phase.FINISHED)], [event(EventKind.PROGRESS), broken])
    store = open_store()
    assert store.job("a-1") == make_record()
    assert store.events() == []


def test_filters_and_order(open_store: Open) -> None:
    store = open_store()
    for i, (owner, phase) in enumerate(
        [("ann", Phase.RUNNING), ("bob", Phase.FINISHED), ("ann", Phase.CANCELLED)]
    ):
        store.accept(make_record(f"a-{i}", phase, owner=owner, submitted_s=float(i)), None, [])
    assert [r.job_id for r in store.jobs()] == ["a-2", "a-1", "a-0"]
    assert [r.job_id for r in store.jobs(over=False)] == ["a-0"]
    assert [r.job_id for r in store.jobs(over=True, owner="ann")] == ["a-2"]
    assert [r.job_id for r in store.jobs(limit=1)] == ["a-2"]
    store.save([], [event(EventKind.PROGRESS, "a-0"), event(EventKind.PROGRESS, "a-1")])
    assert [e.job_id for _, e in store.events(job_id="a-1")] == ["a-1"]


def test_history_tokens_and_settings_are_replaced_not_doubled(open_store: Open) -> None:
    store = open_store()
    for n in (1, 2):
        store.remember("f", 1.0, {"n": n})
        store.set_setting("policy", f"p{n}")
        store.add_token("digest", "ann", "user", float(n))
    store = open_store()
    assert store.recall("f") == {"n": 2} and store.recall("g") is None
    assert store.setting("policy") == "p2" and store.setting("none") is None
    assert store.token("digest") == ("ann", "user", 2.0)
    store.drop_token("digest")
    assert store.token("digest") is None


def test_a_store_of_a_newer_version_is_left_alone(open_store: Open) -> None:
    store = open_store()
    store._database.execute("UPDATE schema_version SET version = ?", (len(MIGRATIONS) + 1,))
    with pytest.raises(StoreUnavailable, match="newer swell"):
        open_store()


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="postgresql://"):
        connect("mysql://x")


def test_a_read_only_store_says_so_and_is_unharmed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store(connect(str(path)))
    store.accept(make_record(), None, [event(EventKind.SUBMITTED)])
    store._database.execute("PRAGMA query_only=ON")
    with pytest.raises(StoreUnavailable, match="nothing was changed"):
        store.save([make_record(phase=Phase.FINISHED)], [event(EventKind.FINISHED)])
    store._database.execute("PRAGMA query_only=OFF")
    assert store.job("a-1") == make_record()
    store.save([make_record(phase=Phase.FINISHED)])
    store.close()


def test_a_full_disk_says_so_and_corrupts_nothing(tmp_path: Path) -> None:
    """A child process may write files of at most 200 kB: as on a full disk, writes fail part-way."""
    path = tmp_path / "store.db"
    store = Store(connect(str(path)))
    store.accept(make_record(), None, [])
    store.close()
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from swell.control.store import connect
from swell.control.store import Store
from swell.control.errors import StoreUnavailable
from swell.domain import Event, EventKind
store = Store(connect({str(path)!r}))
written = 0
try:
    for i in range(500):
        store.save([], [Event(1.0, EventKind.PROGRESS, job_id="a-1", data={{"x": "y" * 2000}})])
        written += 1
except StoreUnavailable as error:
    print(written, str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert "nothing was changed" in done.stdout, done.stderr
    written = int(done.stdout.split()[0])
    store = Store(connect(str(path)))
    assert len(store.events(limit=10_000)) == written, "all that was acknowledged, and nothing else"
    store.close()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable, match="cannot open the store"):
        connect(str(tmp_path / "file" / "store.db"))


def test_the_store_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Store(connect(str(tmp_path / "store.db"))).close()
    assert (tmp_path / "store.db").stat().st_mode & 0o077 == 0


OLD_RECORD = (
    '{"job_id":"digits-0a1b2c3d4e","owner":"ann","request":{"name":"digits","script":"/w/t.py",'
    '"args":["--epochs","3"],"workdir":"/w","env":{"A":"b"},"auto":true,"deadline_s":1900000000.5,'
    '"min_workers":1,"max_workers":4,"workers":2,"memory_bytes":1048576,"checkpoint_s":30.0,"max_restarts":3},'
    '"submitted_s":1800000000.0,"phase":"running","promise":{"admitted":true,"pending":false,'
    '"guaranteed_s":1900000000.5,"estimate":{"finish_s":null,"earliest_s":null,"latest_s":null,"source":"none"},'
    '"earliest_deadline_s":null,"reason":""},"wanted":[0,1],"started_s":null,"ended_s":null,"done":0.0,'
    '"of":null,"batch_size":null,"resizes":0,"pause_s":0.0,"restarts":0,"exit_code":null,"reason":""}'
)
"""A row as it was written before requests had `pip`."""


def test_rows_of_older_and_newer_versions_are_read_and_written_as_they_were() -> None:
    record = record_from_json(OLD_RECORD)
    assert record.request == JobRequest(
        name="digits",
        script="/w/t.py",
        args=("--epochs", "3"),
        workdir="/w",
        env={"A": "b"},
        auto=True,
        deadline_s=1900000000.5,
        max_workers=4,
        workers=2,
        memory_bytes=1 << 20,
        checkpoint_s=30.0,
    )
    written = json.loads(record_to_json(record))
    assert written["request"].pop("pip") == []
    assert written["request"].pop("time_limit_s") is None
    assert written["request"].pop("weight") == 1.0
    assert written["request"].pop("command") is False
    assert written["request"].pop("track") == []
    assert written["request"].pop("workers_per_replica") == 1
    assert written["request"].pop("priority") == "normal"
    assert written["promise"].pop("gpu_type") is None
    old = json.loads(OLD_RECORD)
    assert {name: written[name] for name in old} == old
    newer = OLD_RECORD.replace('"workers":2', '"workers":2,"invented_later":[1]')
    assert record_from_json(newer) == record
