"""Backup, restore, tokens for a locked-out operator, and the doctor, without processes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner, Result
from tests.control.conftest import make_record
from tests.waiting import wait_until

from swell.api.auth import TokenBook, ensure_tokens
from swell.api.refusals import NotAuthenticated
from swell.cli import doctor, main, safekeeping
from swell.cli._platform import check_store, only_one, prepare
from swell.control.model import Phase
from swell.control.store import Store, connect
from swell.engines.ray import places


def swell(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: object) -> Any:
    done = swell(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a job that runs, one that is over, and the usual tokens."""
    home = tmp_path / "home"
    prepare(home)
    store = Store(connect(str(home / "store.db")))
    check_store(home, store)
    ensure_tokens(TokenBook(store), home)
    store.accept(
        make_record("run-1", Phase.RUNNING, wanted=(0,), request={"env": {"KEY": "secret"}}), None, []
    )
    store.accept(make_record("over-1", Phase.FINISHED), None, [])
    for job in ("run-1", "over-1"):
        folder = home / "jobs" / job / "checkpoints" / "step-000000000001"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(job)
    store.close()
    return home


def test_a_backup_brings_store_tokens_and_jobs_back_on_a_new_home(home: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "swell.tar", tmp_path / "new"
    with only_one(home):  # as while a control plane runs
        assert answer("backup", file, "--home", home)["jobs"] == ["run-1"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert answer("restore", file, "--home", new)["jobs"] == ["run-1"]
    store = Store(connect(str(new / "store.db")))
    check_store(new, store)
    assert store.job("run-1") is not None and store.job("over-1") is not None
    secret = (new / "tokens" / "admin").read_text().strip()
    assert secret == (home / "tokens" / "admin").read_text().strip()
    assert TokenBook(store).authenticate(f"Bearer {secret}").user == "admin"
    assert (
        new / "jobs" / "run-1" / "checkpoints" / "step-000000000001" / "state.json"
    ).read_text() == "run-1"
    assert not (new / "jobs" / "over-1").exists(), "what is over needs no checkpoint"
    for path in (new / "store.db", new / "tokens" / "admin", new / "store.id"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.close()


def checkpoints_of(home: Path, job: str) -> Path:
    return home / "jobs" / job / "checkpoints"


def hostile(home: Path, what: str, nest: Callable[[Path, int], None]) -> None:
    """What a job may leave under its checkpoints, as its owner's code pleases."""
    bad = checkpoints_of(home, "run-1") / "step-000000000002"
    bad.mkdir()
    match what:
        case "link":
            (bad / "link").symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(bad / "pipe")
        case "checkpoints are a link":
            shutil.rmtree(bad.parent)
            bad.parent.symlink_to(checkpoints_of(home, "run-2"))
        case "a checkpoint is a link":
            bad.rmdir()
            bad.symlink_to(checkpoints_of(home, "run-2") / "step-000000000001")
        case "nested beyond PATH_MAX":
            nest(bad, 30)  # less than MOST_DEPTH: its path alone is too long
        case "long names":
            deep = bad
            for _ in range(6):
                deep = deep / ("x" * 200)
                deep.mkdir()
        case "a petabyte of nothing":
            with (bad / "data").open("wb") as file:
                file.truncate(5 << 40)


@pytest.fixture
def two(home: Path) -> Path:
    """A home with a second job that is not over."""
    store = Store(connect(str(home / "store.db")))
    store.accept(make_record("run-2", Phase.RUNNING, wanted=(1,)), None, [])
    store.close()
    folder = checkpoints_of(home, "run-2") / "step-000000000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("run-2")
    return home


@pytest.mark.parametrize(
    "what",
    [
        "link",
        "pipe",
        "checkpoints are a link",
        "a checkpoint is a link",
        "nested beyond PATH_MAX",
        "long names",
        "a petabyte of nothing",
    ],
)
def test_a_job_spoils_no_backup_but_its_own_checkpoints(
    two: Path, tmp_path: Path, what: str, nest: Callable[[Path, int], None]
) -> None:
    hostile(two, what, nest)
    file, new = tmp_path / "swell.tar", tmp_path / "new"
    done = swell("backup", file, "--home", two)
    assert done.exit_code == 0, done.output
    assert "run-1" in done.stderr and "is not in it" in done.stderr and "run-2" not in done.stderr
    assert file.stat().st_size < 1 << 20
    assert answer("restore", file, "--home", new)["jobs"] == ["run-1", "run-2"]
    kept = checkpoints_of(new, "run-2") / "step-000000000001" / "state.json"
    assert kept.read_text() == "run-2"
    assert not (new / "jobs" / "run-1").exists()
    assert not list(two.glob(".backup-*")) and not list(tmp_path.glob(".swell.tar.*"))


def test_files_with_holes_and_several_names_cost_what_they_hold(two: Path, tmp_path: Path) -> None:
    step = checkpoints_of(two, "run-1") / "step-000000000001"
    with (step / "holes").open("wb") as holes:
        holes.seek(1 << 30)
        holes.write(b"middle")
        holes.truncate(3 << 30)
    with (step / "nothing").open("wb") as nothing:
        nothing.truncate(1 << 30)
    (step / "large").write_bytes(os.urandom(1 << 20))
    for i in range(50):
        os.link(step / "large", step / f"name-{i}")
    os.link(step / "large", step.parent / "beside")  # what any program keeps there is taken too
    (step.parent / ".writing-step-000000000002-7").mkdir()
    file, new = tmp_path / "swell.tar", tmp_path / "new"
    assert answer("backup", file, "--home", two)["left_out"] == {}
    assert file.stat().st_size < 3 << 20
    assert answer("restore", file, "--home", new)["left_out"] == {}
    back = checkpoints_of(new, "run-1")
    again = back / step.name
    assert sorted(path.name for path in back.iterdir()) == ["beside", step.name]
    assert (again / "holes").stat().st_size == 3 << 30 and (again / "nothing").stat().st_size == 1 << 30
    assert (again / "holes").stat().st_blocks < 1000
    with (again / "holes").open("rb") as holes:
        holes.seek((1 << 30) - 3)
        assert holes.read(12) == b"\0\0\0middle\0\0\0"
    for name in ("large", "name-0", "name-49", "../beside"):
        assert (again / name).read_bytes() == (step / "large").read_bytes()


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out_whole(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoints_of(two, "run-1") / "step-000000000001"
    for i in range(20):
        (first / f"data-{i}").write_text("x")
    second = first.with_name("step-000000000002")
    shutil.copytree(first, second)
    real = safekeeping.open_regular

    def prune(path: str | Path, within: int | None = None) -> BinaryIO:
        if first.exists() and str(path) == "data-7":
            shutil.rmtree(first)
        return real(path, within)

    monkeypatch.setattr(safekeeping, "open_regular", prune)
    file, new = tmp_path / "swell.tar", tmp_path / "new"
    assert answer("backup", file, "--home", two)["left_out"] == {}
    answer("restore", file, "--home", new)
    assert [path.name for path in checkpoints_of(new, "run-1").iterdir()] == [second.name]
    assert len(list((checkpoints_of(new, "run-1") / second.name).iterdir())) == 21


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_a_backup_that_cannot_be_read_back_is_none(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    real = os.fsync

    def damaging(descriptor: int) -> None:  # a disk that loses what it was given
        real(descriptor)
        if ".swell.tar." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            size = os.fstat(descriptor).st_size
            os.pwrite(descriptor, b"#" * 600, int(size * at))

    checkpoint = checkpoints_of(two, "run-1") / "step-000000000001" / "data"
    checkpoint.write_bytes(os.urandom(4 << 20))
    monkeypatch.setattr(os, "fsync", damaging)
    done = swell("backup", tmp_path / "swell.tar", "--home", two)
    assert done.exit_code == 1 and "nothing was kept" in done.output
    assert not list(tmp_path.glob("*swell.tar*"))


def test_a_backup_with_links_from_an_older_version_restores_all_else(two: Path, tmp_path: Path) -> None:
    file, old, new = tmp_path / "swell.tar", tmp_path / "old.tar", tmp_path / "new"
    answer("backup", file, "--home", two)
    shutil.copy(file, old)
    with tarfile.open(old, "a") as tar:
        link = tarfile.TarInfo("jobs/run-1/checkpoints/step-000000000001/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    left_out = answer("restore", old, "--home", new)["left_out"]
    assert list(left_out) == ["run-1"] and "link" in left_out["run-1"]
    for job in ("run-1", "run-2"):
        assert (checkpoints_of(new, job) / "step-000000000001" / "state.json").read_text() == job
    assert not (checkpoints_of(new, "run-1") / "step-000000000001" / "link").is_symlink()


def test_a_restore_follows_no_link_of_a_job(two: Path, tmp_path: Path) -> None:
    file = tmp_path / "swell.tar"
    answer("backup", file, "--home", two)
    shutil.rmtree(checkpoints_of(two, "run-1"))
    checkpoints_of(two, "run-1").symlink_to(checkpoints_of(two, "over-1"))
    answer("restore", file, "--home", two, "--force")
    mine = checkpoints_of(two, "run-1")
    assert not mine.is_symlink() and (mine / "step-000000000001" / "state.json").read_text() == "run-1"
    assert (checkpoints_of(two, "over-1") / "step-000000000001" / "state.json").read_text() == "over-1"


def test_a_restore_can_pause_jobs_and_replace_tokens(home: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "swell.tar", tmp_path / "new"
    answer("backup", file, "--home", home)
    before = (home / "tokens" / "admin").read_text().strip()
    done = swell("restore", file, "--home", new, "--paused", "--new-tokens")
    assert done.exit_code == 0 and "'swell resume'" in done.output
    store = Store(connect(str(new / "store.db")))
    record = store.job("run-1")
    assert record is not None and record.phase is Phase.PAUSED and record.wanted == ()
    book = TokenBook(store)
    with pytest.raises(NotAuthenticated):
        book.authenticate(f"Bearer {before}")
    now = (new / "tokens" / "admin").read_text().strip()
    assert book.authenticate(f"Bearer {now}").user == "admin"
    store.close()


def test_a_restore_replaces_nothing_unless_forced_and_refuses_what_is_no_backup(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "swell.tar"
    answer("backup", file, "--home", home)
    refused = swell("restore", file, "--home", home)
    assert refused.exit_code == 1 and "--force" in refused.output
    with only_one(home):
        assert "is running" in swell("restore", file, "--home", home, "--force").output
    aside = answer("restore", file, "--home", home, "--force")["set_aside"]
    assert (home / aside).exists()
    (tmp_path / "bad.tar").write_text("no tar")
    bad = swell("restore", tmp_path / "bad.tar", "--home", tmp_path / "other")
    assert bad.exit_code == 2 and "not a backup" in bad.output
    assert not (tmp_path / "other" / "store.db").exists()


def test_a_locked_out_operator_gets_a_new_token(home: Path) -> None:
    before = (home / "tokens" / "admin").read_text().strip()
    (home / "tokens" / "admin").unlink()
    with only_one(home):
        assert swell("token", "reset", "--home", home).exit_code == 1, "not while a control plane runs"
    assert answer("token", "reset", "--home", home) == [str(home / "tokens" / "admin")]
    now = (home / "tokens" / "admin").read_text().strip()
    store = Store(connect(str(home / "store.db")))
    book = TokenBook(store)
    assert book.authenticate(f"Bearer {now}").user == "admin"
    with pytest.raises(NotAuthenticated):
        book.authenticate(f"Bearer {before}")
    assert [token.user for token in book.list()].count("admin") == 1
    store.close()


def states(home: Path) -> dict[str, str]:
    return {
        one["about"]: one["state"] for one in json.loads(swell("doctor", "--home", home, "--json").stdout)
    }


def test_the_doctor_finds_what_is_wrong(home: Path) -> None:
    well = states(home)
    assert (well["home"], well["store"], well["tokens"]) == ("ok", "ok", "ok")
    assert "records" not in well
    (home / "tokens" / "admin").chmod(0o644)
    (home / "store.db").chmod(0o644)
    with sqlite3.connect(home / "store.db") as database:
        database.execute("UPDATE jobs SET record = 'x' WHERE job_id = 'run-1'")
    ill = states(home)
    assert (ill["tokens"], ill["store"], ill["records"]) == ("bad", "odd", "bad")
    (home / "store.id").write_text("another\n")
    assert states(home)["store"] == "bad"
    (home / "store.db").write_bytes(b"no database at all" * 100)
    done = swell("doctor", "--home", home)
    assert done.exit_code == 1 and "swell restore" in done.output


def test_the_stores_password_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, started = "postgresql://ann:secret@host/swell", list[tuple[list[str], str]]()

    class Child:
        pid, returncode = 1, 1

        def __init__(self, words: list[str], env: dict[str, str], **_: object) -> None:
            started.append((words, env["SWELL_STORE"]))

        def poll(self) -> int:
            return 1

    monkeypatch.setattr("swell.cli._platform.subprocess.Popen", Child)
    assert swell("up", "-d", "--store", url, "--home", tmp_path / "home").exit_code == 1
    ((words, store),) = started
    assert store == url and not any("secret" in word for word in words)


@pytest.mark.parametrize(("use_tls", "state"), [("0", "odd"), ("1", "ok")])
def test_the_doctor_says_that_rays_token_goes_in_clear_between_hosts(
    home: Path, monkeypatch: pytest.MonkeyPatch, use_tls: str, state: str
) -> None:
    plane = subprocess.Popen(["sleep", "60"], env={"RAY_USE_TLS": use_tls, "PATH": os.environ["PATH"]})
    try:
        monkeypatch.setattr("swell.cli._platform.running_pid", lambda home: plane.pid)
        hosts = ("10.0.0.5", "10.0.0.6")
        nodes = [places.Place(name=n, host=n, slots=1, gpu_type="cpu", address=n, up=True) for n in hosts]
        (home / places.PLACES).write_text(json.dumps({"places": places.dump(nodes)}))
        wait_until(lambda: Path(f"/proc/{plane.pid}/comm").read_text() == "sleep\n", 30, "the process")
        (found,) = [one for one in doctor.examine(home, None) if one.about == "Ray"]
        assert found.state == state and ("in clear" in found.note) == (state == "odd")
        (home / places.PLACES).write_text(json.dumps({"places": places.dump(nodes[:1])}))
        assert not doctor.ray_in_clear(home), "one host"
    finally:
        plane.kill()
        plane.wait()
