"""Files of an unmodified script that several workers run: only the leader changes them.

- What other workers write goes into a private folder of theirs. They read it back from there, so that a
  script that saves its best model and loads it at the end works on every worker.
- A newcomer runs the script from its beginning while the job has long since written checkpoints and logs. It
  must see the files as they were when the job began, or a script that resumes from its own checkpoint would
  begin somewhere else. So the leader keeps a journal of the files it creates, and a copy of those it replaces
  or removes that the script has read before (the checkpoint it resumed from, which `save_total_limit` ends).
- A file that another worker holds open, such as a log, is continued where the leader left it if that worker
  becomes the leader.

Covered is what goes through Python: `open`, `os`, `shutil`, `torch.save`, safetensors and tokenizers. Files
that a C library writes by itself (cv2, h5py) are written by every worker.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_MOST_READ = 10_000
"""So many files that were read are remembered; a script that reads more has a data set made of files."""
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_TEMPORARY = 0o700
"""The mode of folders that `tempfile` makes."""

_open = io.open
_stat, _mkdir, _listdir = os.stat, os.mkdir, os.listdir
_link, _scandir = os.link, os.scandir
_copyfile, _rmtree = shutil.copyfile, shutil.rmtree


class PrivateFile(io.FileIO):
    """A file that a worker other than the leader writes: a private one, until that worker leads."""

    def __init__(self, files: Files, path: str, mode: str) -> None:
        self._files = files
        self._path = path
        self._real: int | None = None
        self._in_order = True
        """True as long as everything was written one after the other, as to a log."""
        super().__init__(files.private(path, make=True), mode)

    def write(self, data: Any) -> int:
        """Write to the private file, or at the end of the real one if this worker leads now."""
        if self._real is None and self._in_order and self._files.leads():
            self._real = self._promote()
        if self._real is not None:
            return os.write(self._real, data)
        return super().write(data)

    def seek(self, *args: Any) -> int:
        """Move the position; such a file stays private."""
        self._in_order = False
        return super().seek(*args)

    def close(self) -> None:
        """Close both files."""
        if self._real is not None:
            os.close(self._real)
            self._real, self._in_order = None, False
        super().close()

    def _promote(self) -> int:
        begun = _exists(self._path)
        self._files.note(self._path)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if not begun:  # a name of this process alone: its beginning is in the private file
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
        self._keep = keep
        self._besides = tuple(f"{os.path.realpath(p)}{os.sep}" for p in [*besides, own, keep]) + _SYSTEM
        self._read: set[str] = set()
        self._noted: dict[str, str | None] = {}
        self._journal = keep / "journal.jsonl"
        self._journal_bytes = 0

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
            _makedirs(os.path.dirname(place))  # noqa: PTH120
        return place

    def where(self, path: str) -> str:
        """Where this worker reads that file."""
        private = self.private(path)
        if _exists(private):
            return private
        if self._behind():
            return self._as_found(path) or private  # a file that the job created is not there yet
        return path

    def _as_found(self, path: str) -> str:
        """Where the file is that was there when the job began, or '' if there was none."""
        self._load()
        upper = path
        while upper not in self._noted and upper != os.sep:
            upper = os.path.dirname(upper)  # noqa: PTH120
        kept = self._noted.get(upper, upper)
        return "" if kept is None else kept + path[len(upper) :]

    # ------------------------------------------------------------------ the journal

    def begin_anew(self) -> None:
        """Forget the journal of an earlier run: this job begins without a checkpoint."""
        with contextlib.suppress(OSError):
            _rmtree(self._keep)

    def note(self, path: str) -> None:
        """The leader is about to write a file: keep what newcomers must see in its place."""
        self._load()
        if path in self._noted:
            return
        if not _exists(path):
            self._write_down(path, None)
        elif path not in self._read or os.path.isdir(path):  # noqa: PTH112
            self._noted[path] = path
        else:
            self._write_down(path, self._place_for(path), _copyfile)

    def note_removal(self, path: str) -> None:
        """The leader is about to remove a file or folder: keep it if the script has read of it."""
        self._load()
        if self._noted.get(path, path) != path:
            return  # the job has made it itself, or it is kept already
        if any(read == path or read.startswith(path + os.sep) for read in self._read):
            self._write_down(path, self._place_for(path), _keep_all)

    def _place_for(self, path: str) -> str:
        name = f"{os.getpid()}-{len(self._noted)}"  # a later leader must not use it again
        return str(self._keep / name / os.path.basename(path))  # noqa: PTH119

    def _write_down(self, path: str, kept: str | None, keep: Callable[[str, str], Any] | None = None) -> None:
        with contextlib.suppress(OSError, shutil.Error):  # a full disk must not end the job
            _makedirs(os.path.dirname(kept) if kept else str(self._keep))  # noqa: PTH120
            if keep is not None and kept is not None:
                keep(path, kept)
            with _open(self._journal, "a") as file:
                file.write(json.dumps([path, kept]) + "\n")
        self._noted[path] = kept

    def _load(self) -> None:
        with contextlib.suppress(OSError):
            size = _stat(self._journal).st_size
            if size != self._journal_bytes:
                with _open(self._journal) as file:
                    lines = file.read().splitlines()
                self._noted |= dict(map(json.loads, lines))
                self._journal_bytes = size

    # ------------------------------------------------------------------ what the script calls

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """`open`."""
        path = self.path(file)
        if path is None or options.get("opener") is not None:
            return _open(file, mode, *args, **options)
        if not set(mode) & set("wax+"):
            return _open(self.source(file), mode, *args, **options)
        if self.leads():
            self.note(path)
            return _open(file, mode, *args, **options)
        return self._open_private(path, mode, *args, **options)

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
        if bare.startswith("r") and not _exists(self.private(path)):
            _copyfile(self.where(path), self.private(path, make=True))
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
            if len(self._read) < _MOST_READ:
                self._read.add(path)
            return file
        place = self.where(path)
        return file if place == path else place

    def destination(self, target: Any) -> Any:
        """Where to save: `target` for the leader and for streams, else the private file."""
        path = self.path(target)
        if path is None:
            return target
        if self.leads():
            self.note(path)
            return target
        return self.private(path, make=True)

    def move(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.replace`, `os.rename` and `os.link`."""

        def call(source: Any, target: Any, *args: Any, **options: Any) -> None:
            origin, path = self.path(source), self.path(target)
            if path is None or origin is None or self.leads():
                if path is not None and self.leads():
                    self.note(path)
                original(source, target, *args, **options)
                return
            private, goal = self.private(origin), self.private(path, make=True)
            if _exists(private):
                original(private, goal)
            elif os.path.isfile(origin):  # noqa: PTH113
                _copyfile(origin, goal)

        return call

    def remove(self, original: Callable[..., Any], *, removes: bool = True) -> Callable[..., Any]:
        """`os.remove`, `os.rmdir`, `shutil.rmtree`: others than the leader remove only what is theirs."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = None if options.get("dir_fd") is not None else self.path(target)
            if path is not None and not self.leads():
                private = self.private(path)
                return original(private, *args, **options) if _exists(private) else None
            if path is not None and removes:
                self.note_removal(path)
            return original(target, *args, **options)

        return call

    def change(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.chmod` and `os.utime`."""
        return self.remove(original, removes=False)

    def look(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os.stat` and `os.access`."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = None if options.get("dir_fd") is not None else self.path(target)
            if path is None or self.leads():
                return original(target, *args, **options)
            place = self.where(path)
            return original(target if place == path else place, *args, **options)

        return call

    def mkdir(self, target: Any, *args: Any, **options: Any) -> None:
        """`os.mkdir`: a folder that an earlier worker made is no error for a later one.

        Every member makes folders, because any of them may lead next. A newcomer makes private ones: it
        counts fewer steps while it catches up, so its folders have names that the job never uses.
        """
        path = self.path(target)
        if path is not None and args == (_TEMPORARY,):  # its name and its files are this worker's alone
            self._besides += (path,)
            path = None
        if path is not None and self._behind():
            _makedirs(self.private(path))
            return
        if path is not None:  # whoever is first: also another member than the leader
            self.note(path)
        try:
            _mkdir(target, *args, **options)
        except FileExistsError:
            if path is None or self.leads():
                raise

    def listdir(self, target: Any = ".") -> list[Any]:
        """`os.listdir`, for a newcomer as it was when the job began."""
        if not self._hides(target):
            return _listdir(target)
        names = [entry.name for entry in self._entries(target)]
        return [os.fsencode(name) for name in names] if isinstance(target, bytes) else names

    def scandir(self, target: Any = ".") -> Any:
        """`os.scandir`, which `glob`, `os.walk` and `pathlib` use, in the same way."""
        if not self._hides(target) or isinstance(target, bytes):
            return _scandir(target)
        return Entries(self._entries(target))

    def _hides(self, target: Any) -> bool:
        return not self.leads() and self._behind() and self.path(target) is not None

    def _entries(self, target: Any) -> list[os.DirEntry[str]]:
        folder = os.path.abspath(os.fsdecode(target))  # noqa: PTH100
        place, private = self._as_found(folder), self.private(folder)
        found: list[os.DirEntry[str]] = []
        made = _exists(private)
        if made:
            with _scandir(private) as entries:
                found += entries
        shown = {entry.name for entry in found}
        if not made or _exists(place):
            with _scandir(os.fsdecode(target) if place == folder else place or private) as entries:
                there = [e for e in entries if self._as_found(os.path.join(folder, e.name))]  # noqa: PTH118
            found += [entry for entry in there if entry.name not in shown]
        shown = {entry.name for entry in found}
        for path, kept in self._noted.items():
            above, name = os.path.split(path)
            if above == folder and name not in shown and kept and kept != path:
                with contextlib.suppress(OSError), _scandir(os.path.dirname(kept)) as entries:  # noqa: PTH120
                    found += entries
        return found

    # ------------------------------------------------------------------ in place of the originals

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context the script's calls come here."""
        save = torch.save

        def save_torch(value: Any, target: Any, *args: Any, **options: Any) -> None:
            save(value, self.destination(target), *args, **options)

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
            _rmtree(self._own)


def _keep_all(path: str, place: str) -> None:
    """Keep a file or a folder that is removed next: by further links, without copying, where that works."""

    def keep(source: str, target: str) -> None:
        try:
            _link(source, target)
        except OSError:
            _copyfile(source, target)

    if os.path.isdir(path):  # noqa: PTH112
        shutil.copytree(path, place, copy_function=keep)
    else:
        keep(path, place)


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except (OSError, ValueError):
        return False
    return True


def _makedirs(path: str) -> None:
    """As `os.makedirs`, but by the system's own calls."""
    try:
        _mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        _makedirs(os.path.dirname(path))  # noqa: PTH120
        with contextlib.suppress(FileExistsError):
            _mkdir(path)
