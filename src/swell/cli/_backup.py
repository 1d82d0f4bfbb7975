"""Backups: one tar file with the store, the tokens, and the checkpoints of jobs that are not over.

manifest.json            version, moment, id of the store, jobs
store.db                 a copy of the SQLite store, complete at one moment
store.id, tokens/*
jobs/<job>/checkpoints   of jobs that are not over
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swell.cli._platform import STORE_ID, only_one, prepare
from swell.control.database import connect
from swell.control.model import Phase
from swell.control.store import Store
from swell.domain import InputError, SwellError

VERSION = 1
_STORE = "store.db"


@dataclass(frozen=True, slots=True)
class Saved:
    """A backup that was written."""

    jobs: list[str]
    """Jobs that were not over."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A backup that was brought back."""

    home: Path
    jobs: list[str]
    made_s: float
    set_aside: str


def save(home: Path, file: Path, *, checkpoints: bool = True) -> Saved:
    """Write a backup of a home, whether its control plane runs or not."""
    if not (home / _STORE).exists():
        raise SwellError(
            f"there is no {home / _STORE}: back a Postgres store up with pg_dump, or name another --home"
        )
    with tempfile.TemporaryDirectory(dir=home, prefix=".backup-") as folder:
        copy = Path(folder, _STORE)
        _copy_store(home / _STORE, copy)
        store = Store(connect(str(copy)))
        jobs = sorted(record.job_id for record in store.jobs(over=False, limit=1_000_000))
        manifest = {"version": VERSION, "made_s": time.time(), "store_id": store.identity, "jobs": jobs}
        store.close()
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
                _add_text(tar, "manifest.json", json.dumps(manifest, indent=1))
                tar.add(copy, _STORE)
                _add_text(tar, STORE_ID, str(manifest["store_id"]) + "\n")
                for token in sorted((home / "tokens").glob("*")):
                    tar.add(token, f"tokens/{token.name}")
                for job in jobs if checkpoints else []:
                    _add_checkpoints(tar, home, job)
                raw.flush()
                os.fsync(raw.fileno())
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return Saved(jobs, file.stat().st_size)


def _copy_store(source: Path, target: Path) -> None:
    """Copy a store that may be written to meanwhile: SQLite sees to it that the copy is of one moment."""
    try:
        with sqlite3.connect(source, timeout=30.0) as live, sqlite3.connect(target) as copy:
            live.backup(copy)
        target.chmod(0o600)
    except sqlite3.Error as error:
        raise SwellError(
            f"{source} cannot be read: {error}; back up as the user who runs 'swell up'"
        ) from error


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(text.encode()), 0o600, int(time.time())
    tar.addfile(info, io.BytesIO(text.encode()))


def _add_checkpoints(tar: tarfile.TarFile, home: Path, job: str) -> None:
    """Add a job's complete checkpoints, without those that are deleted meanwhile."""
    for path in sorted((home / "jobs" / job / "checkpoints").glob("step-*")):
        try:
            tar.add(path, f"jobs/{job}/checkpoints/{path.name}")
        except FileNotFoundError:
            continue


def bring_back(home: Path, file: Path, *, paused: bool, new_tokens: bool, force: bool) -> Restored:
    """Make a home what it was when the backup was written."""
    from swell.cli._platform import jobs_alive

    prepare(home)
    with only_one(home):
        if alive := jobs_alive(home):
            names = ", ".join(path.name for path in alive[:5])
            raise SwellError(f"jobs run in {home} ({names}): 'swell down' stops them first")
        if (home / _STORE).exists() and not force:
            raise SwellError(f"{home} has a store already: name another --home, or give --force")
        with tempfile.TemporaryDirectory(dir=home, prefix=".restore-") as folder:
            manifest = _unpack(file, Path(folder))
            set_aside = _set_aside(home)
            _move_in(Path(folder), home)
        store = Store(connect(str(home / _STORE)))
        try:
            if paused:
                _pause(store)
            if new_tokens:
                reset_tokens(store, home, everybody=True)
        finally:
            store.close()
    return Restored(home, list(manifest["jobs"]), float(manifest["made_s"]), set_aside)


def _unpack(file: Path, folder: Path) -> dict[str, Any]:
    """Unpack a backup; refuses what is none, whole, before anything in the home is touched."""
    try:
        with tarfile.open(file) as tar:
            tar.extractall(folder, filter="data")
        manifest = json.loads((folder / "manifest.json").read_text())
        version = manifest["version"]
        with sqlite3.connect(folder / _STORE) as store:
            (state,) = store.execute("PRAGMA quick_check").fetchone()
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError, sqlite3.Error) as error:
        raise InputError(
            f"file: {file} is not a backup of swell ({error}); 'swell backup FILE' writes one", field="file"
        ) from error
    if version != VERSION:
        raise InputError(
            f"file: {file} has version {version}, this swell reads {VERSION};"
            " restore it with the swell that wrote it",
            field="file",
        )
    if state != "ok":
        raise InputError(
            f"file: the store in {file} is damaged ({state}); take an older backup", field="file"
        )
    return dict(manifest)


def _set_aside(home: Path) -> str:
    """Rename the store that is there, with its journal; returns its new name."""
    if not (home / _STORE).exists():
        return ""
    name = f"store-before-{time.strftime('%Y%m%d-%H%M%S')}.db"
    for suffix in ("-wal", "-shm", ""):
        if (home / f"{_STORE}{suffix}").exists():
            (home / f"{_STORE}{suffix}").rename(home / f"{name}{suffix}")
    return name


def _move_in(folder: Path, home: Path) -> None:
    for name in (_STORE, STORE_ID):
        (folder / name).replace(home / name)
        (home / name).chmod(0o600)
    (home / "tokens").mkdir(mode=0o700, exist_ok=True)
    for token in (folder / "tokens").glob("*"):
        token.replace(home / "tokens" / token.name)
        (home / "tokens" / token.name).chmod(0o600)
    for checkpoints in (folder / "jobs").glob("*/checkpoints"):
        target = home / "jobs" / checkpoints.parent.name / "checkpoints"
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(target, ignore_errors=True)
        checkpoints.rename(target)


def _pause(store: Store) -> None:
    records = [
        replace(record, phase=Phase.PAUSED, wanted=(), held=(), reason="paused because a backup was restored")
        for record in store.jobs(over=False, limit=1_000_000)
    ]
    store.save(records)


def reset_tokens(store: Store, home: Path, *, everybody: bool) -> list[Path]:
    """Replace the administrator's token, or all tokens, by new ones in the home's token files."""
    from swell.api.audit import FILE, AuditLog
    from swell.api.auth import Role, TokenBook, default_user, ensure_tokens, new_secret
    from swell.api.home import token_file, write_private

    AuditLog(home / FILE).write(user=default_user(), method="token reset", everybody=everybody)
    book = TokenBook(store)
    for token in book.list():
        if everybody or token.user == "admin":
            book.revoke(token.token_id)
    if everybody:
        for role in Role:
            token_file(home, role).unlink(missing_ok=True)
        return ensure_tokens(book, home)
    path = token_file(home, Role.ADMIN)
    secret, _ = book.create("admin", Role.ADMIN, secret=new_secret())
    write_private(path, secret + "\n")
    return [path]
