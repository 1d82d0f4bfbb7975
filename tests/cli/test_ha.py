"""Several control planes of one home: their locks and folders, and what cannot have a standby."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from swell.api.home import ServerFile
from swell.cli import _platform, doctor
from swell.cli._platform import Settings, check_store, only_one, running_pid
from swell.control.store import Store, connect
from swell.domain import InputError, SwellError


def test_each_control_plane_has_a_folder_and_together_they_keep_others_out(tmp_path: Path) -> None:
    host = socket.gethostname()
    first, locks = _platform.enter_beside_others(tmp_path)
    second, more = _platform.enter_beside_others(tmp_path)
    assert [first.name, second.name] == [host, f"{host}_2"]
    assert running_pid(tmp_path) == os.getpid() and _platform.others_run(tmp_path)
    with pytest.raises(SwellError, match="several need --ha"):
        only_one(tmp_path)
    (tmp_path / "planes" / f"{host}9").mkdir()  # another machine's, on a shared file system
    with only_one(tmp_path / "planes" / f"{host}9"):
        assert _platform.plane_folders(tmp_path) == [first, second]
    with pytest.raises(InputError, match=f"there are: {host}, {host}_2"):
        _platform.stop_planes(tmp_path, "nobody")
    for lock in (*locks, *more):
        lock.close()
    assert (
        running_pid(tmp_path) is None
        and not _platform.others_run(tmp_path)
        and _platform.plane_folders(tmp_path) == []
    )
    with only_one(tmp_path), pytest.raises(SwellError, match="several need --ha"):
        _platform.enter_beside_others(tmp_path)


def test_the_folder_of_the_leader_comes_first(tmp_path: Path) -> None:
    _, locks = _platform.enter_beside_others(tmp_path)
    second, more = _platform.enter_beside_others(tmp_path)
    (second / "up.lock").write_text("1")  # as if another process held it
    ServerFile("http://b", 1).write(tmp_path)
    assert running_pid(tmp_path) == 1 and _platform.plane_folders(tmp_path)[0] == second
    for lock in (*locks, *more):
        lock.close()


@pytest.mark.parametrize("store", [None, "store.db", "sqlite:///store.db"])
def test_sqlite_has_no_standby(tmp_path: Path, store: str | None) -> None:
    with pytest.raises(InputError, match="SQLite has one writer") as refused:
        _platform.check_shared(Settings(home=tmp_path, store=store, ha=True, slots=1))
    assert refused.value.field == "store"


def test_the_doctor_looks_at_postgres_and_names_the_leader(tmp_path: Path, postgres_url: str) -> None:
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    assert doctor._postgres(tmp_path, postgres_url).state == "bad", "there is no store yet"
    store = Store(connect(postgres_url))
    check_store(tmp_path, store)
    found = doctor._postgres(tmp_path, postgres_url)
    assert found.state == "ok" and found.note == "Postgres, 0 jobs; a control plane leads"
    (tmp_path / "store.id").write_text("another")
    assert "not this home's store" in doctor._postgres(tmp_path, postgres_url).note
    store.close()
