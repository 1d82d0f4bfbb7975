"""Files of an unmodified script that several workers run: only the leader changes them.

- What other workers write goes into a private folder of theirs. They read it back from there, so that a
  script that saves its best model and loads it at the end works on every worker.
- A newcomer runs the script from its beginning while the job has long since written checkpoints and logs. It
  must see the files as they were when the job began, or a script that resumes from its own checkpoint would
  begin somewhere else. So the leader keeps a journal of the files it creates, and a copy of those it replaces
  or removes that the script has read before (the checkpoint it resumed from, which `save_total_limit` ends).
- A newcomer that has come to the job's position forgets what it has written on the way there of files that
  the leader has too: from then on it sees the leader's.
- If a leader dies, the next one goes on with its files: in the middle of those that the script keeps open,
  such as a log (`private_file`), and with those that it has written or added to since the last step, because
  the leader may have died before it did.

Covered is what goes through Python: `open`, `os`, `shutil`, `torch.save`, safetensors and tokenizers. Files
that a C library writes by itself (cv2, h5py) are written by every worker.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import secrets
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

open_file = io.open
open_descriptor = os.open
stat, mkdir, listdir = os.stat, os.mkdir, os.listdir
link, scandir, replace, remove = os.link, os.scandir, os.replace, os.remove
copyfile, rmtree = shutil.copyfile, shutil.rmtree


def open_log(path: os.PathLike[str]) -> io.FileIO:
    """A file that lines are added to, at once and not through a buffer."""
    return io.FileIO(path, "a")


def exists(path: str) -> bool:
    """Whether there is such a file or folder."""
    try:
        stat(path)
    except (OSError, ValueError):
        return False
    return True


def makedirs(path: str) -> None:
    """As `os.makedirs`, but by the system's own calls."""
    try:
        mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        makedirs(os.path.dirname(path))  # noqa: PTH120
        with contextlib.suppress(FileExistsError):
            mkdir(path)


def keep_all(path: str, place: str) -> None:
    """Keep a file or a folder that is removed next: by further links, without copying, where that works."""

    def keep(source: str, target: str) -> None:
        try:
            link(source, target)
        except OSError:
            copyfile(source, target)

    if os.path.isdir(path):  # noqa: PTH112
        shutil.copytree(path, place, copy_function=keep)
    else:
        keep(path, place)


# ---------------------------------------------------------------------- the journal
# The journal of the files that a job of an unmodified script has changed, with copies of what was there.
#
# The leader writes it; a newcomer, which runs the script from its beginning, sees the files through it as
# they were when the job began.


_MOST_READ = 10_000
"""So many files that were read are remembered; a script that reads more has a data set made of files."""


class Journal:
    """What the job has changed in the file system, shared by its workers through a folder."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._read: set[str] = set()
        self._noted: dict[str, str | None] = {}
        """Path -> where the file that the job found there is now; None if there was none."""
        self._file = keep / "journal.jsonl"
        self._bytes = 0
        """How much of the file is known to this worker, because it has read or written it."""
        self._log: io.FileIO | None = None
        """The file, open for this worker's own lines; None until it writes one."""

    def begin_anew(self) -> None:
        """Forget the journal of an earlier run: this job begins without a checkpoint."""
        if self._log is not None:
            self._log.close()
        self._log, self._bytes = None, 0
        with contextlib.suppress(OSError):
            rmtree(self._keep)

    def note_read(self, path: str) -> None:
        """The leader is about to read a file."""
        if len(self._read) < _MOST_READ:
            self._read.add(path)

    def note(self, path: str) -> None:
        """The leader is about to write a file: keep what newcomers must see in its place."""
        self._load()
        if path in self._noted:
            return
        if not exists(path):
            self._write_down(path, None)
        elif path not in self._read or os.path.isdir(path):  # noqa: PTH112
            self._noted[path] = path
        else:
            self._write_down(path, self._place_for(path), copyfile)

    def note_removal(self, path: str) -> None:
        """The leader is about to remove a file or folder: keep it if the script has read of it."""
        self._load()
        if self._noted.get(path, path) != path:
            return  # the job has made it itself, or it is kept already
        if any(read == path or read.startswith(path + os.sep) for read in self._read):
            self._write_down(path, self._place_for(path), keep_all)

    def as_found(self, path: str) -> str:
        """Where the file is that was there when the job began, or '' if there was none."""
        self._load()
        upper = path
        while upper not in self._noted and upper != os.sep:
            upper = os.path.dirname(upper)  # noqa: PTH120
        kept = self._noted.get(upper, upper)
        return "" if kept is None else kept + path[len(upper) :]

    def kept_in(self, folder: str) -> Iterator[tuple[str, str]]:
        """Of the files that the job found in this folder and that are kept elsewhere: name and place."""
        for path, kept in self._noted.items():
            above, name = os.path.split(path)
            if above == folder and kept and kept != path:
                yield name, kept

    def _place_for(self, path: str) -> str:
        name = secrets.token_hex(8)  # not the process id: a later leader may have the same
        return str(self._keep / name / os.path.basename(path))  # noqa: PTH119

    def _write_down(self, path: str, kept: str | None, keep: Callable[[str, str], Any] | None = None) -> None:
        with contextlib.suppress(OSError, shutil.Error):  # a full disk must not end the job
            if keep is not None and kept is not None:
                makedirs(os.path.dirname(kept))  # noqa: PTH120
                keep(path, kept)
            self._append(json.dumps([path, kept]).encode() + b"\n")
        self._noted[path] = kept

    def _append(self, line: bytes) -> None:
        """Add a whole line to the file, or nothing."""
        if self._log is None:
            makedirs(str(self._keep))
            self._log = open_log(self._file)
        written, end = self._log.write(line), self._log.tell()
        if written != len(line):  # the disk is full
            self._log.truncate(end - written)
        elif end == self._bytes + written:
            self._bytes = end

    def _load(self) -> None:
        with contextlib.suppress(OSError):
            if stat(self._file).st_size > self._bytes:
                with open_file(self._file, "rb") as file:
                    file.seek(self._bytes)
                    lines = file.read().splitlines(keepends=True)
                complete = [line for line in lines if line.endswith(b"\n")]  # another worker may be writing
                self._noted |= dict(map(json.loads, complete))
                self._bytes += sum(map(len, complete))


# ---------------------------------------------------------------------- files of a worker that does not lead
# What an unmodified script holds in place of a file or a listing, on workers other than the leader.


_COMPARED = 4096
"""So many bytes must be the same before this worker goes on in the middle of what the last leader wrote."""


class PrivateFile(io.FileIO):
    """A file that a worker other than the leader writes: a private one, until that worker leads.

    Members write the same into a file that they keep open. So this worker knows which of its own bytes the
    leader's file ends with, and goes on with the next one: what the leader had not written yet is not lost,
    and nothing is written twice.
    """

    def __init__(self, files: Files, path: str, mode: str) -> None:
        self._files = files
        self._path = path
        self._real: int | None = None
        self._in_order = True
        """True as long as everything was written one after the other, as to a log."""
        self._begin: tuple[int, int] | None = None
        """A place of the leader's file and the same place in this one; None if that is not known."""
        super().__init__(files.private(path, make=True), mode)
        if mode == "w" and not files.behind:
            self._begin = 0, 0

    def write(self, data: Any) -> int:
        """Write to the private file, or at the end of the real one if this worker leads now."""
        if self._real is not None:
            return os.write(self._real, data)
        if not self._in_order or not self._files.leads():
            return super().write(data)
        if self._begin is None:
            self._real = self._open_real()
            return os.write(self._real, data)
        written = super().write(data)
        self.go_on(bytes(data))
        return written

    def seek(self, *args: Any) -> int:
        """Move the position; such a file stays private."""
        self._in_order = False
        return super().seek(*args)

    def close(self) -> None:
        """Close both files."""
        if not self.closed and self._in_order and self._files.leads():
            self.go_on(b"")
        if self._real is not None:
            os.close(self._real)
            self._real, self._in_order = None, False
        super().close()

    # ------------------------------------------------------------------ the same place in both files

    def position(self) -> int | None:
        """How long the leader's file is once it has all that was written into this one; None if unknown."""
        if self._real is not None:
            return os.fstat(self._real).st_size
        if self._begin is None or not self._in_order:
            return None
        return self._begin[0] + os.fstat(self.fileno()).st_size - self._begin[1]

    def align(self, theirs: int) -> None:
        """The leader's file is so long where this worker's script has come to."""
        self._begin = theirs, os.fstat(self.fileno()).st_size

    def go_on(self, latest: bytes) -> None:
        """This worker leads: write into the real file what the last leader had not written.

        `latest`: what was just written to the private file; it alone is added if the files do not fit.
        """
        if self._begin is None or self._real is not None:
            return
        theirs, mine = self._begin
        size = stat(self._path).st_size if exists(self._path) else 0
        try:
            own = Path(self._files.private(self._path)).read_bytes()[mine:]
        except OSError:  # the script has moved or removed it
            own, size = latest, -1
        known = size - theirs
        if known > len(own):
            return  # the last leader had come further; this worker computes that again
        self._real = self._open_real()
        compared = min(max(known, 0), _COMPARED)
        fits = known >= 0
        if compared and fits:
            with open_file(self._path, "rb") as file:
                file.seek(size - compared)
                fits = file.read() == own[known - compared : known]
        os.write(self._real, own[known:] if fits else latest)

    def _open_real(self) -> int:
        begun = exists(self._path)
        makedirs(os.path.dirname(self._path))  # noqa: PTH120
        self._files.journal.note(self._path)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if not begun and self._begin is None:  # a name of this process alone: its beginning is private
            os.write(descriptor, Path(self._files.private(self._path)).read_bytes())
        return descriptor


class Entries:
    """What `os.scandir` returns: an iterator that can be closed."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


# ---------------------------------------------------------------------- what the script opens and writes


_SYSTEM = ("/dev/", "/proc/", "/sys/")
_OF_COMPILER = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_", "TRITON_CACHE_DIR": "~/.triton/"}
"""By the variable that names another one: the folders of `torch.compile`, which all processes share.
Compilers write there too, and those are not in Python."""
_LOOKS, _LOOK_S = 10, 0.005
_TEMPORARY = 0o700
"""The mode of folders that `tempfile` makes."""


class Files:
    """Redirects what the script does to files, by this worker's role."""

    def __init__(
        self,
        own: Path,
        keep: Path,
        besides: list[Path],
        leads: Callable[[], bool],
        behind: Callable[[], bool],
    ) -> None:
        """`own`: this worker's folder; `keep`: the job's; files in `besides` are swell's own business."""
        self.leads = leads
        self._behind = behind
        self._own = str(own)
        self.journal = Journal(keep)
        self._streams: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """The files that the script keeps open to write them."""
        self._latest: dict[str, int | None] = {}
        """What this worker has written privately since the last step: from which byte on, or None if all."""
        self._led = False
        self._besides = tuple(f"{os.path.realpath(p)}{os.sep}" for p in [*besides, own, keep]) + _SYSTEM
        self._besides += tuple(
            os.path.realpath(given) + os.sep
            if (given := os.environ.get(name))
            else str(Path(usual).expanduser()) + os.sep * usual.endswith("/")
            for name, usual in _OF_COMPILER.items()
        )

    @property
    def behind(self) -> bool:
        """Whether this worker's script has not come to the job's position."""
        return self._behind()

    # ------------------------------------------------------------------ coming to the position, and leading

    def positions(self) -> dict[str, int]:
        """How long the files are that the script keeps open, once they have all that it has written."""
        found = {}
        for path, stream in list(self._streams.items()):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                raw = _raw(stream)
                end = raw.position() if isinstance(raw, PrivateFile) else os.fstat(raw.fileno()).st_size
                if end is not None:
                    found[path] = end
        return found

    def arrive(self, positions: dict[str, int]) -> None:
        """The script has come to where another worker's is, whose open files were so long there."""
        opened = {self.private(path) for path, stream in self._streams.items() if not stream.closed}
        for folder, _, names in os.walk(self._own):
            for name in names:
                place = os.path.join(folder, name)  # noqa: PTH118
                if place not in opened and exists(place.removeprefix(self._own)):
                    remove(place)
        self._latest.clear()
        for path, theirs in positions.items():
            stream = self._streams.get(path)
            with contextlib.suppress(OSError, ValueError):
                if stream is not None and isinstance(_raw(stream), PrivateFile):
                    stream.flush()
                    _raw(stream).align(theirs)

    def stepped(self) -> None:
        """The optimizer has stepped: a leader that is alive has written what comes before that."""
        led, self._led = self._led, self.leads()
        if self._led and not led:
            self._take_lead()
        self._latest.clear()

    def _take_lead(self) -> None:
        """The leader is gone: write what it may have died before."""
        for stream in list(self._streams.values()):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                if isinstance(_raw(stream), PrivateFile):
                    _raw(stream).go_on(b"")
        opened = {path for path, stream in self._streams.items() if not stream.closed}
        for path, begin in self._latest.items():
            if path not in opened:
                with contextlib.suppress(OSError):
                    self._write_latest(path, begin)

    def _write_latest(self, path: str, begin: int | None) -> None:
        if os.path.isdir(self.private(path)):  # noqa: PTH112
            if not exists(path):
                self.journal.note(path)
                makedirs(path)
            return
        with open_file(self.private(path), "rb") as file:
            mine = file.read()
        there = b""
        if exists(path):
            with open_file(path, "rb") as file:
                there = file.read()
        self._make_parents(path)
        self.journal.note(path)
        if begin is not None:  # lines at the end of a file: the last leader may have added some of them
            lines = mine[begin:]
            known = next(n for n in range(len(lines), -1, -1) if there.endswith(lines[:n]))
            with open_file(path, "ab") as file:
                file.write(lines[known:])
        elif mine != there:
            new = f"{path}.swell-new"
            with open_file(new, "wb") as file:
                file.write(mine)
            replace(new, path)

    # ------------------------------------------------------------------ where a file is

    def path(self, file: Any) -> str | None:
        """The absolute path of a file that is the script's, or None for anything else."""
        if not isinstance(file, str | bytes | os.PathLike):
            return None
        path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100 - the hot path of every open
        return None if path.startswith(self._besides) else path

    def private(self, path: str, *, make: bool = False) -> str:
        """Where this worker's own version of a file is."""
        place = os.path.join(self._own, path.lstrip(os.sep))  # noqa: PTH118
        if make:
            makedirs(os.path.dirname(place))  # noqa: PTH120
        return place

    def where(self, path: str) -> str:
        """Where this worker reads that file."""
        private = self.private(path)
        if exists(private):
            return private
        if self._behind():
            return self.journal.as_found(path) or private  # a file that the job created is not there yet
        return path

    # ------------------------------------------------------------------ what the script calls

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """`open`."""
        path = self.path(file)
        if path is None or options.get("opener") is not None:
            return open_file(file, mode, *args, **options)
        if not set(mode) & set("wax+"):
            return open_file(self.source(file), mode, *args, **options)
        if self.leads():
            self._make_parents(path)
            self.journal.note(path)
            stream = open_file(file, mode, *args, **options)
        else:
            stream = self._open_private(path, mode, *args, **options)
        self._streams[path] = stream
        return stream

    def _open_private(
        self,
        path: str,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **_: Any,
    ) -> Any:
        bare = mode.replace("b", "").replace("t", "").replace("x", "w")
        if bare.startswith("r") and not exists(self.private(path)):
            copyfile(self.where(path), self.private(path, make=True))
        if not self.behind:
            place = self.private(path)
            begun = stat(place).st_size if bare == "a" and exists(place) else 0
            self._latest.setdefault(path, begun if bare == "a" else None)
        raw = PrivateFile(self, path, bare)
        if "b" in mode and buffering == 0:
            return raw
        buffer: Any = io.BufferedRandom(raw) if "+" in bare else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    def source(self, file: Any) -> Any:
        """Where to read: `file` itself, or this worker's version of it."""
        path = self.path(file)
        if path is None:
            return file
        if self.leads():
            self.journal.note_read(path)
            return file
        place = self.where(path)
        return file if place == path else place

    def destination(self, target: Any) -> Any:
        """Where to save: `target` for the leader and for streams, else the private file."""
        path = self.path(target)
        if path is None:
            return target
        if self.leads():
            self._make_parents(path)
            self.journal.note(path)
            return target
        if not self.behind:
            self._latest[path] = None
        return self.private(path, make=True)

    def move(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.replace`, `os.rename` and `os.link`."""

        def call(source: Any, target: Any, *args: Any, **options: Any) -> None:
            origin, path = self.path(source), self.path(target)
            if path is None or origin is None or self.leads():
                if path is not None and self.leads():
                    self.journal.note(path)
                original(source, target, *args, **options)
                return
            private, goal = self.private(origin), self.private(path, make=True)
            if not self.behind:
                self._latest.pop(origin, None)
                self._latest[path] = None
            if exists(private):
                original(private, goal)
            elif os.path.isfile(origin):  # noqa: PTH113
                copyfile(origin, goal)

        return call

    def remove(self, original: Callable[..., Any], *, removes: bool = True) -> Callable[..., Any]:
        """`os.remove`, `os.rmdir`, `shutil.rmtree`: others than the leader remove only what is theirs."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = None if options.get("dir_fd") is not None else self.path(target)
            if path is not None and not self.leads():
                private = self.private(path)
                if removes:
                    self._latest.pop(path, None)
                return original(private, *args, **options) if exists(private) else None
            if path is not None and removes:
                self.journal.note_removal(path)
            return original(target, *args, **options)

        return call

    def change(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.chmod` and `os.utime`."""
        return self.remove(original, removes=False)

    def look(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.stat` and `os.access`."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = None if self.leads() or options.get("dir_fd") is not None else self.path(target)
            if path is None:
                return original(target, *args, **options)
            place = self.where(path)
            return original(target if place == path else place, *args, **options)

        return call

    def mkdir(self, target: Any, *args: Any, **options: Any) -> None:
        """`os.mkdir`: others than the leader make private folders.

        A name may have a time or a process in it, so that only the leader's folder is wanted.
        """
        path = self.path(target)
        if path is not None and args == (_TEMPORARY,):  # its name and its files are this worker's alone
            self._besides += (path,)
            path = None
        if path is None or self.leads():
            if path is not None:
                self._make_parents(path)
                self.journal.note(path)
            mkdir(target, *args, **options)
            return
        makedirs(self.private(path))
        if not self.behind:
            self._latest[path] = None
            for _ in range(_LOOKS):  # what is no Python may write there next: the leader is making it too
                if exists(path):
                    break
                time.sleep(_LOOK_S)

    def _make_parents(self, path: str) -> None:
        """Make the folders of a file that this worker has made privately, before it led."""
        folder = os.path.dirname(path)  # noqa: PTH120
        if not exists(folder) and exists(self.private(folder)):
            self.journal.note(folder)
            makedirs(folder)

    def listdir(self, target: Any = ".") -> list[Any]:
        """`os.listdir`, for a newcomer as it was when the job began."""
        if not self._hides(target):
            return listdir(self._folder(target))
        names = [entry.name for entry in self._entries(target)]
        return [os.fsencode(name) for name in names] if isinstance(target, bytes) else names

    def scandir(self, target: Any = ".") -> Any:
        """`os.scandir`, which `glob`, `os.walk` and `pathlib` use, in the same way."""
        if not self._hides(target) or isinstance(target, bytes):
            return scandir(self._folder(target))
        return Entries(self._entries(target))

    def _folder(self, target: Any) -> Any:
        """Where to list a folder: in this worker's own one if nobody else has made it."""
        path = None if self.leads() else self.path(target)
        if path is None or isinstance(target, bytes) or exists(path):
            return target
        return self.private(path) if exists(self.private(path)) else target

    def _hides(self, target: Any) -> bool:
        return not self.leads() and self._behind() and self.path(target) is not None

    def _entries(self, target: Any) -> list[os.DirEntry[str]]:
        folder = os.path.abspath(os.fsdecode(target))  # noqa: PTH100
        place, private = self.journal.as_found(folder), self.private(folder)
        found: list[os.DirEntry[str]] = []
        made = exists(private)
        if made:
            with scandir(private) as entries:
                found += entries
        shown = {entry.name for entry in found}
        if not made or exists(place):
            with scandir(os.fsdecode(target) if place == folder else place or private) as entries:
                there = [e for e in entries if self.journal.as_found(os.path.join(folder, e.name))]  # noqa: PTH118
            found += [entry for entry in there if entry.name not in shown]
        shown = {entry.name for entry in found}
        for name, kept in self.journal.kept_in(folder):
            if name not in shown:
                with (
                    contextlib.suppress(OSError),
                    scandir(os.path.dirname(kept)) as entries,  # noqa: PTH120
                ):
                    found += entries
        return found

    # ------------------------------------------------------------------ in place of the originals

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context the script's calls come here."""
        save = torch.save

        def save_torch(obj: Any, f: Any, *args: Any, **options: Any) -> None:  # scripts use these names
            save(obj, self.destination(f), *args, **options)

        with contextlib.ExitStack() as undo:
            for owner, name, new in [
                (builtins, "open", self.open),
                (io, "open", self.open),
                *((os, name, self.move(getattr(os, name))) for name in ("replace", "rename", "link")),
                *((os, name, self.remove(getattr(os, name))) for name in ("remove", "unlink", "rmdir")),
                *((os, name, self.change(getattr(os, name))) for name in ("chmod", "utime")),
                *((os, name, self.look(getattr(os, name))) for name in ("stat", "lstat", "access")),
                (os, "mkdir", self.mkdir),
                (os, "listdir", self.listdir),
                (os, "scandir", self.scandir),
                (shutil, "rmtree", self.remove(shutil.rmtree)),
                (torch, "save", save_torch),
            ]:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
            yield
        with contextlib.suppress(OSError):
            rmtree(self._own)


def _raw(stream: Any) -> Any:
    """The file below a stream's buffers."""
    buffer = getattr(stream, "buffer", stream)
    return getattr(buffer, "raw", buffer)


# ---------------------------------------------------------------------- what the script prints
# Output of an unmodified script: only the leader's is shown, and people are told what its numbers cover.


_MARK = struct.Struct("<qq")


class Writer(Protocol):
    """What a stream needs to know of this worker."""

    @property
    def steps(self) -> int:
        """How many steps the job has made."""

    @property
    def behind(self) -> bool:
        """Whether this worker's script has not come to the job's position."""

    def leads(self) -> bool:
        """Whether this worker's output counts."""


class LeaderOnly:
    """A stream that writes on the leader and drops on other workers.

    The leader notes in a file how much it has written since the job's last step. The others keep what they
    drop until the next step. So a new leader writes what the last one died before, and nothing twice; nor
    does a job that goes on from a checkpoint.
    """

    def __init__(self, stream: TextIO, worker: Writer, mark: Path) -> None:
        self._stream = stream
        self._worker = worker
        self._path = mark
        self._file: int | None = None
        self._mark = (-1, 0)
        """The last step after which a leader has written, and how many characters of what came then."""
        self._leading = False
        """True if this worker writes, and knows the mark."""
        self._step = 0
        self._count = 0
        """How many characters the script has given since that step of the job."""
        self._kept = ""

    def write(self, text: str) -> int:
        """Write or drop."""
        worker = self._worker
        if worker.steps != self._step:
            self._step, self._count, self._kept = worker.steps, 0, ""
        if worker.leads():
            if not self._leading:
                self._lead()
            self._emit(text)
        elif not worker.behind:
            self._leading = False
            self._kept += text
            self._count += len(text)
        return len(text)

    def stepped(self) -> None:
        """The job has made a step: a leader that is alive has written what comes before that."""
        if self._kept and not self._leading and self._worker.leads():
            self._lead()
        self._kept = ""

    def begin_anew(self) -> None:
        """Forget what an earlier run of the job has written."""
        with contextlib.suppress(OSError):
            remove(self._path)

    def _lead(self) -> None:
        """Write what the last leader died before."""
        self._leading = True
        with contextlib.suppress(OSError):
            if self._file is None:
                makedirs(str(self._path.parent))
                self._file = open_descriptor(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            raw = os.pread(self._file, _MARK.size, 0)
            self._mark = _MARK.unpack(raw) if len(raw) == _MARK.size else (-1, 0)
        kept, self._kept = self._kept, ""
        self._count -= len(kept)
        if kept:
            self._emit(kept)

    def _emit(self, text: str) -> None:
        step, written = self._mark
        self._count += len(text)
        if step > self._step or (step == self._step and written >= self._count):
            return
        news = self._count - written if step == self._step else len(text)
        self._stream.write(text[-news:] if news < len(text) else text)
        self._mark = self._step, self._count
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the job
                os.pwrite(self._file, _MARK.pack(*self._mark), 0)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
