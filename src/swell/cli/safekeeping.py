"""`swell backup`, `swell restore` and `swell gc`: what is kept, and what need not be."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import sqlite3
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import click

from swell.cli._common import BYTES, DURATION, connect, home_option, json_option, print_json, say_moment
from swell.cli._platform import STORE_ID, only_one, prepare
from swell.control.model import Phase
from swell.control.store import Store
from swell.control.store import connect as open_store
from swell.domain import InputError, SwellError
from swell.engines.accounts import hand_over
from swell.train.agent.regular import Met, folder, open_regular, remove_tree, walk

RESTORE_EPILOG = """\b
Example:
  swell restore swell-backup.tar --home /srv/swell
"""


@click.command(epilog="\b\nExample:\n  swell backup swell-backup.tar\n")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--without-checkpoints", is_flag=True, help="Leave out the checkpoints of jobs that are not over."
)
@json_option
@home_option
def backup(file: Path, without_checkpoints: bool, as_json: bool, home: str | None) -> None:
    """Write store, tokens and checkpoints of unfinished jobs into FILE, also while swell runs.

    The file is readable by its owner only: it holds tokens, and the environments of jobs.
    """
    from swell.api.home import home_dir

    done = save(home_dir(home), file, checkpoints=not without_checkpoints)
    if as_json:
        print_json({"file": str(file), "jobs": done.jobs, "bytes": done.bytes, "left_out": done.left_out})
        return
    click.echo(f"{file}: the store, the tokens and {len(done.jobs)} unfinished jobs, {done.bytes} bytes.")
    _say_left_out(done.left_out, "is not in it")
    click.echo("'swell restore' brings it back, here or on another machine.")


@click.command(epilog=RESTORE_EPILOG)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--paused", is_flag=True, help="Pause all unfinished jobs, for a person to resume.")
@click.option("--new-tokens", is_flag=True, help="Accept none of the backup's tokens; make new ones.")
@click.option("--force", is_flag=True, help="Replace the store that is there; it is kept beside the new one.")
@json_option
@home_option
def restore(file: Path, paused: bool, new_tokens: bool, force: bool, as_json: bool, home: str | None) -> None:
    """Bring a backup back into a home in which no control plane and no job runs.

    Everything is as it was at the moment of the backup: jobs that ended since then run again (unless
    --paused), jobs submitted since then are not known, and tokens revoked since then are good again (unless
    --new-tokens).
    """
    from swell.api.home import home_dir

    done = bring_back(home_dir(home), file, paused=paused, new_tokens=new_tokens, force=force)
    if as_json:
        print_json(
            {
                "home": str(done.home),
                "jobs": done.jobs,
                "made_s": done.made_s,
                "set_aside": done.set_aside,
                "left_out": done.left_out,
            }
        )
        return
    _say(done, paused, new_tokens)


def _say_left_out(left_out: dict[str, str], what: str) -> None:
    """Name the jobs whose checkpoints a backup does not have whole."""
    from swell.cli._common import clean

    for job, reason in left_out.items():
        click.echo(clean(f"swell: what job {job} has saved {what}: {reason}"), err=True)


def _say(done: Restored, paused: bool, new_tokens: bool) -> None:
    click.echo(f"{done.home} is as it was at {say_moment(done.made_s)}.")
    if done.jobs:
        after = "are paused: 'swell resume' lets one go on" if paused else "go on with the next 'swell up'"
        click.echo(f"Unfinished jobs that {after}: {', '.join(done.jobs)}")
    _say_left_out(done.left_out, "was not restored whole")
    if done.set_aside:
        click.echo(f"The store that was there is kept as {done.set_aside}.")
    old = (
        "Only the new tokens in tokens/ are good."
        if new_tokens
        else "Tokens revoked since then are good again."
    )
    click.echo(f"Jobs submitted since then are not known. {old}")
    click.echo("\nNext:\n  swell up -d\n  swell token list\n")


@click.command(epilog="\b\nExample:\n  swell gc --dry-run\n  swell gc --keep 7d\n")
@click.option("--keep", "keep_s", type=DURATION, help="Keep jobs for so long after their end.")
@click.option(
    "--keep-size", "keep_bytes", type=BYTES, help="Keep at most so much of ended jobs' directories."
)
@click.option("--dry-run", "dry", is_flag=True, help="Only say what would be deleted.")
@json_option
@home_option
def gc(keep_s: float | None, keep_bytes: int | None, dry: bool, as_json: bool, home: str | None) -> None:
    """Delete what need not be kept of jobs that are over. Swell does the same by itself once an hour.

    Records, events and directories go after 30 days, all checkpoints of a job but its newest after one day,
    unless `swell up` was told otherwise. Nothing that runs or waits is touched.
    """
    with connect(home, admin=True) as client:
        done = client.collect(keep_s=keep_s, keep_bytes=keep_bytes, dry=dry)
    if as_json:
        print_json(done.model_dump(mode="json"))
        return
    verb = "would be" if dry else "were"
    click.echo(
        f"{len(done.forgotten)} jobs {verb} forgotten, {len(done.thinned)} {verb} left with their newest"
        f" checkpoint, {done.freed_bytes / 2**20:.1f} MiB {verb} freed."
    )


# Backups: one tar file with the store, the tokens, and the checkpoints of jobs that are not over.
#
# manifest.json version, moment, id of the store, jobs store.db a copy of the SQLite store, complete at one
# moment store.id, tokens/* jobs/<job>/checkpoints of jobs that are not over
#
# What is under `checkpoints` is the work of the job, which may have put anything there. Plain files and
# folders are taken, by descriptor; of a file with holes only what it holds. Anything else costs that job
# its checkpoints in this backup, and nobody else anything. Every backup is read back before it gets its
# name.


VERSION = 1
_STORE = "store.db"
_UNFINISHED = (".writing-", "damaged-")
"""How checkpoints begin that are being written or removed, or that cannot be used."""
MOST_DEPTH = 32
"""Folders of checkpoints are nested at most so deeply."""
MOST_PATH = 1024
"""Longest path of a file below a job's checkpoints, in bytes, so that it stays below PATH_MAX in any home."""
MOST_ENTRIES = 100_000
"""A job has at most so many files and folders in its checkpoints."""
MOST_FILE_BYTES = 4 << 40
MOST_PIECES = 10_000
"""A file with holes is in at most so many pieces."""
_CHUNK = 1 << 20
_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the disk that the backup is written to: no job is to blame for them."""


class BadCheckpoints(SwellError):
    """A job's checkpoints cannot be taken into a backup; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class SavedBackup:
    """A backup that was written."""

    jobs: list[str]
    """Jobs that were not over."""
    bytes: int
    left_out: dict[str, str]
    """Jobs whose checkpoints are not in it, and why."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A backup that was brought back."""

    home: Path
    jobs: list[str]
    made_s: float
    set_aside: str
    left_out: dict[str, str]
    """Jobs of whose checkpoints something was not restored, and why."""


def save(home: Path, file: Path, *, checkpoints: bool = True) -> SavedBackup:
    """Write a backup of a home, whether its control plane runs or not."""
    if not (home / _STORE).exists():
        raise SwellError(
            f"there is no {home / _STORE}: back a Postgres store up with pg_dump, or name another --home"
        )
    with tempfile.TemporaryDirectory(dir=home, prefix=".backup-") as scratch:
        copy = Path(scratch, _STORE)
        _copy_store(home / _STORE, copy)
        store = Store(open_store(str(copy)))
        jobs = sorted(record.job_id for record in store.jobs(over=False, limit=1_000_000))
        manifest = {"version": VERSION, "made_s": time.time(), "store_id": store.identity, "jobs": jobs}
        store.close()
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "r+b") as raw:
                archive = _Archive(raw)
                archive.add_text("manifest.json", json.dumps(manifest, indent=1))
                archive.add_file(_STORE, copy)
                archive.add_text(STORE_ID, str(manifest["store_id"]) + "\n")
                _add_tokens(archive, home / "tokens")
                bad = _add_jobs(archive, home / "jobs", jobs if checkpoints else [])
                archive.close()
                _read_back(raw, archive.written)
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    _sync_folder(file.parent)
    return SavedBackup(jobs, file.stat().st_size, bad)


class _Archive:
    """The tar file that is being written, and what was written into it."""

    def __init__(self, raw: BinaryIO) -> None:
        self.written: dict[str, str] = {}
        """By name: a digest of each member's content."""
        self._raw = raw
        self._tar = tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed below

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is added inside is in the archive whole, or, on an exception, not at all."""
        at, names = self._tar.offset, len(self.written)
        try:
            yield
        except BaseException:
            self._raw.seek(at)
            self._raw.truncate()
            self._tar.offset = at
            for name in list(self.written)[names:]:
                del self.written[name]
            raise

    def add_text(self, name: str, text: str) -> None:
        """Add a small file of the platform's own."""
        self._add(_member(name), io.BytesIO(text.encode()), [(0, len(text.encode()))])

    def add_file(self, name: str, path: Path) -> None:
        """Add a file of the platform's own."""
        with path.open("rb") as source:
            self._add(_member(name), source, [(0, os.fstat(source.fileno()).st_size)])

    def add_folder(self, name: str) -> None:
        """Add a folder; those above a file need not be added."""
        info = _member(name, tarfile.DIRTYPE, 0o700)
        self._tar.addfile(info)
        self.written[name] = ""

    def add_link(self, name: str, to: str) -> None:
        """Add another name of a file that is in the archive already."""
        info = _member(name, tarfile.LNKTYPE)
        info.linkname = to
        self._tar.addfile(info)
        self.written[name] = to

    def add_plain(self, name: str, source: BinaryIO) -> None:
        """Add a plain file of a job, as it is now: of a file with holes, what it holds."""
        facts = os.fstat(source.fileno())
        info = _member(name, mode=stat.S_IMODE(facts.st_mode) & 0o700 | 0o600)
        info.mtime = int(facts.st_mtime)
        pieces = _pieces(source.fileno(), facts.st_size)
        held = sum(size for _, size in pieces)
        if held < facts.st_size:
            pieces = pieces or [(0, 0)]
            # The form that tarfile and GNU tar call sparse 0.1: the pieces, one behind the other.
            info.pax_headers = {
                "GNU.sparse.size": str(facts.st_size),
                "GNU.sparse.numblocks": str(len(pieces)),
                "GNU.sparse.map": ",".join(f"{at},{size}" for at, size in pieces),
            }
        self._add(info, source, pieces)

    def _add(self, info: tarfile.TarInfo, source: BinaryIO, pieces: Sequence[tuple[int, int]]) -> None:
        info.size = sum(size for _, size in pieces)
        digest = hashlib.sha256()
        self._tar.addfile(info, _Pieces(source, pieces, digest))
        self.written[info.name] = digest.hexdigest()

    def close(self) -> None:
        """Complete the archive, on disk."""
        self._tar.close()
        self._raw.flush()
        os.fsync(self._raw.fileno())


class _Pieces:
    """Reads the pieces of a file as if they were one, and computes the digest of what was read."""

    def __init__(self, source: BinaryIO, pieces: Sequence[tuple[int, int]], digest: Any) -> None:
        self._source, self._digest = source, digest
        self._left = list(reversed(pieces))

    def read(self, size: int = 0, /) -> bytes:
        """Exactly `size` bytes; BadCheckpoints if the file has become shorter."""
        parts = list[bytes]()
        while size > 0:
            at, length = self._left.pop()
            self._source.seek(at)
            data = self._source.read(min(size, length))
            if not data and length:
                raise BadCheckpoints("it became shorter while it was read: try again")
            if len(data) < length:
                self._left.append((at + len(data), length - len(data)))
            self._digest.update(data)
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def _pieces(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where a file holds something: offsets and lengths."""
    if size > MOST_FILE_BYTES:
        raise BadCheckpoints(f"it has {size} bytes, allowed are {MOST_FILE_BYTES}")
    found, at = list[tuple[int, int]](), 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            end = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # nothing but a hole from here on
        if begin < end:
            found.append((begin, end - begin))
        at = max(end, at + 1)
        if len(found) > MOST_PIECES:
            raise BadCheckpoints(f"it is in more than {MOST_PIECES} pieces, with holes between them")
    return found


def _member(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o600) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, mode, int(time.time())
    return info


def _add_tokens(archive: _Archive, tokens: Path) -> None:
    for token in sorted(tokens.glob("*")):
        with open_regular(token) as source:
            archive.add_plain(f"tokens/{token.name}", source)


def _add_jobs(archive: _Archive, directory: Path, jobs: Sequence[str]) -> dict[str, str]:
    """Add the checkpoints of these jobs; returns the jobs whose checkpoints had to be left out, and why."""
    left_out = {}
    for job in jobs:
        try:
            with archive.all_or_nothing(), folder(directory, job, "checkpoints") as checkpoints:
                _add_checkpoints(archive, f"jobs/{job}/checkpoints", checkpoints)
        except FileNotFoundError:
            continue  # the job has saved nothing yet
        except (BadCheckpoints, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OWN_DISK:
                raise
            left_out[job] = _reason(error, "checkpoints")
    return left_out


def _add_checkpoints(archive: _Archive, name: str, checkpoints: int) -> None:
    """Add a job's checkpoints, without those that the job is writing, and those it deletes meanwhile."""
    entries, inodes = [0], dict[tuple[int, int], str]()
    with os.scandir(checkpoints) as found:
        tops = sorted(one.name for one in found if not one.name.startswith(_UNFINISHED))
    for top in tops:
        known = dict(inodes)
        try:
            with archive.all_or_nothing():
                facts = os.stat(top, dir_fd=checkpoints, follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    with folder(checkpoints, top) as below:
                        for met in walk(below, most_depth=MOST_DEPTH):
                            _add_met(archive, name, f"{top}/{met.path}", met, entries, inodes)
                    archive.add_folder(f"{name}/{top}")
                else:
                    met = Met(checkpoints, (), top, facts)
                    _add_met(archive, name, top, met, entries, inodes)
        except FileNotFoundError:
            inodes = known  # this checkpoint was deleted meanwhile: there are newer ones
        except (BadCheckpoints, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OWN_DISK:
                raise
            raise BadCheckpoints(_reason(error, top)) from error


def _reason(error: Exception, path: str) -> str:
    """Why something at this path cannot be taken in."""
    if isinstance(error, OSError):
        return f"{_shown(path)}: {error.strerror or error}"
    return str(error)


def _add_met(
    archive: _Archive, name: str, path: str, met: Met, entries: list[int], inodes: dict[tuple[int, int], str]
) -> None:
    """Add one file or folder of a job's checkpoints; BadCheckpoints if it is anything else."""
    entries[0] += 1
    if entries[0] > MOST_ENTRIES:
        raise BadCheckpoints(f"there are more than {MOST_ENTRIES} files and folders")
    if len(os.fsencode(path)) > MOST_PATH:
        raise BadCheckpoints(f"{_shown(path)}: its path is longer than {MOST_PATH} bytes")
    member = f"{name}/{path}"
    if met.is_folder:
        archive.add_folder(member)
        return
    if not stat.S_ISREG(met.facts.st_mode):
        what = "a link" if stat.S_ISLNK(met.facts.st_mode) else "neither a file nor a folder"
        raise BadCheckpoints(f"{_shown(path)} is {what}")
    with open_regular(met.name, met.folder) as source:
        facts = os.fstat(source.fileno())
        identity = (facts.st_dev, facts.st_ino)
        try:
            if identity in inodes:
                archive.add_link(member, inodes[identity])
                return
            archive.add_plain(member, source)
        except BadCheckpoints as error:
            raise BadCheckpoints(f"{_shown(path)}: {error}") from error
        if facts.st_nlink > 1:
            inodes[identity] = member


def _shown(path: str) -> str:
    """A path that a job has chosen, as people are shown it."""
    text = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 100 else f"{text[:50]}...{text[-47:]}"


def _read_back(raw: BinaryIO, written: dict[str, str]) -> None:
    """Read a complete archive from the disk as a restore would; SwellError unless all of it is there."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
    raw.seek(0)
    left, wrong = dict(written), ""
    try:
        with tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                if _unusable(member) or left.pop(member.name, None) != _content(tar, raw, member):
                    wrong = f"{_shown(member.name)} is not as it was written"
                    break
    except (tarfile.TarError, OSError, ValueError) as error:
        wrong = str(error)
    if wrong or left:
        wrong = wrong or f"{_shown(next(iter(left)))} is missing"
        raise SwellError(
            f"the backup cannot be read back ({wrong}), so nothing was kept of it: check the disk, or name a"
            " file on another one"
        )


def _content(tar: tarfile.TarFile, raw: BinaryIO, member: tarfile.TarInfo) -> str:
    """The digest of a member's stored bytes; of a link, where it leads; nothing of a folder."""
    if member.islnk():
        return member.linkname
    if member.isdir():
        return ""
    digest = hashlib.sha256()
    sparse: Sequence[tuple[int, int]] | None = getattr(member, "sparse", None)
    left = member.size if sparse is None else sum(length for _, length in sparse)
    raw.seek(member.offset_data)
    while left and (data := raw.read(min(_CHUNK, left))):
        digest.update(data)
        left -= len(data)
    return digest.hexdigest()


def _unusable(member: tarfile.TarInfo) -> str:
    """Why a restore leaves out a member of an archive; empty for plain files and folders inside the home."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts:
        return "it leads out of the home"
    if member.islnk():
        to = member.linkname.split("/")
        return "" if to[:3] == parts[:3] and ".." not in to else "it is a link"
    return "" if member.isreg() or member.isdir() else "it is neither a file nor a folder"


def _sync_folder(path: Path) -> None:
    with folder(path) as descriptor:
        os.fsync(descriptor)


def _copy_store(source: Path, target: Path) -> None:
    """Copy a store that may be written to meanwhile: SQLite sees to it that the copy is of one moment."""
    try:
        with sqlite3.connect(source, timeout=30.0) as live, sqlite3.connect(target) as copy:
            live.backup(copy)
            (state,) = copy.execute("PRAGMA quick_check").fetchone()
        target.chmod(0o600)
    except sqlite3.Error as error:
        raise SwellError(
            f"{source} cannot be read: {error}; back up as the user who runs 'swell up'"
        ) from error
    if state != "ok":
        raise SwellError(f"{source} is damaged ({state}), and no backup was written: restore an older one")


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
        with tempfile.TemporaryDirectory(dir=home, prefix=".restore-") as scratch:
            manifest, left_out = _unpack(file, Path(scratch))
            set_aside = _set_aside(home)
            _move_in(Path(scratch), home)
        store = Store(open_store(str(home / _STORE)))
        try:
            if paused:
                _pause(store)
            if new_tokens:
                reset_tokens(store, home, everybody=True)
        finally:
            store.close()
    return Restored(home, list(manifest["jobs"]), float(manifest["made_s"]), set_aside, left_out)


def _unpack(file: Path, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Unpack a backup; refuses what is none, whole, before anything in the home is touched.

    Returns its manifest, and by job what was left out: older versions took links and pipes of jobs in.
    """
    left_out = dict[str, str]()
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                why = _unusable(member)
                if why and member.name.startswith("jobs/"):
                    left_out.setdefault(member.name.split("/")[1], f"{_shown(member.name)}: {why}")
                elif why:
                    raise tarfile.TarError(f"{_shown(member.name)}: {why}")
                else:
                    tar.extract(member, scratch, filter="data")
        manifest = json.loads((scratch / "manifest.json").read_text())
        version = manifest["version"]
        with sqlite3.connect(scratch / _STORE) as store:
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
    return dict(manifest), left_out


def _set_aside(home: Path) -> str:
    """Rename the store that is there, with its journal; returns its new name."""
    if not (home / _STORE).exists():
        return ""
    name = f"store-before-{time.strftime('%Y%m%d-%H%M%S')}.db"
    for suffix in ("-wal", "-shm", ""):
        if (home / f"{_STORE}{suffix}").exists():
            (home / f"{_STORE}{suffix}").rename(home / f"{name}{suffix}")
    return name


def _move_in(scratch: Path, home: Path) -> None:
    for name in (_STORE, STORE_ID):
        (scratch / name).replace(home / name)
        (home / name).chmod(0o600)
    (home / "tokens").mkdir(mode=0o700, exist_ok=True)
    for token in (scratch / "tokens").glob("*"):
        token.replace(home / "tokens" / token.name)
        (home / "tokens" / token.name).chmod(0o600)
    for checkpoints in (scratch / "jobs").glob("*/checkpoints"):
        job = home / "jobs" / checkpoints.parent.name
        job.mkdir(parents=True, exist_ok=True, mode=0o700)
        with folder(job.parent, job.name) as here, folder(checkpoints.parent) as there:
            remove_tree("checkpoints", here)
            _give_to_owner(checkpoints, here)
            os.rename("checkpoints", "checkpoints", src_dir_fd=there, dst_dir_fd=here)


def _give_to_owner(checkpoints: Path, job: int) -> None:
    """Give restored checkpoints to the account that the job's directory belongs to."""
    owner, me = os.fstat(job), os.geteuid()
    if me == 0 and owner.st_uid != me:
        with folder(checkpoints) as top:
            for met in walk(top):
                hand_over(met, me, owner.st_uid, owner.st_gid)
            os.fchown(top, owner.st_uid, owner.st_gid)


def _pause(store: Store) -> None:
    records = [
        replace(record, phase=Phase.PAUSED, wanted=(), held=(), reason="paused because a backup was restored")
        for record in store.jobs(over=False, limit=1_000_000)
    ]
    store.save(records)


def reset_tokens(store: Store, home: Path, *, everybody: bool) -> list[Path]:
    """Replace the administrator's token, or all tokens, by new ones in the home's token files."""
    from swell.api.auth import AUDIT_FILE, AuditLog, Role, TokenBook, default_user, ensure_tokens, new_secret
    from swell.api.home import token_file, write_private

    AuditLog(home / AUDIT_FILE).write(user=default_user(), method="token reset", everybody=everybody)
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
