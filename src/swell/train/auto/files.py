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
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from swell.train.auto import system
from swell.train.auto.journal import Journal
from swell.train.auto.private_file import Entries, PrivateFile

_SYSTEM = ("/dev/", "/proc/", "/sys/")
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
        self._besides = tuple(f"{os.path.realpath(p)}{os.sep}" for p in [*besides, own, keep]) + _SYSTEM

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
            system.makedirs(os.path.dirname(place))  # noqa: PTH120
        return place

    def where(self, path: str) -> str:
        """Where this worker reads that file."""
        private = self.private(path)
        if system.exists(private):
            return private
        if self._behind():
            return self.journal.as_found(path) or private  # a file that the job created is not there yet
        return path

    # ------------------------------------------------------------------ what the script calls

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """`open`."""
        path = self.path(file)
        if path is None or options.get("opener") is not None:
            return system.open_file(file, mode, *args, **options)
        if not set(mode) & set("wax+"):
            return system.open_file(self.source(file), mode, *args, **options)
        if self.leads():
            self.journal.note(path)
            return system.open_file(file, mode, *args, **options)
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
        if bare.startswith("r") and not system.exists(self.private(path)):
            system.copyfile(self.where(path), self.private(path, make=True))
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
            self.journal.note(path)
            return target
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
            if system.exists(private):
                original(private, goal)
            elif os.path.isfile(origin):  # noqa: PTH113
                system.copyfile(origin, goal)

        return call

    def remove(self, original: Callable[..., Any], *, removes: bool = True) -> Callable[..., Any]:
        """`os.remove`, `os.rmdir`, `shutil.rmtree`: others than the leader remove only what is theirs."""

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = None if options.get("dir_fd") is not None else self.path(target)
            if path is not None and not self.leads():
                private = self.private(path)
                return original(private, *args, **options) if system.exists(private) else None
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
        """`os.mkdir`: a folder that an earlier worker made is no error for a later one.

        Every member makes folders, because any of them may lead next. A newcomer makes private ones: it
        counts fewer steps while it catches up, so its folders have names that the job never uses.
        """
        path = self.path(target)
        if path is not None and args == (_TEMPORARY,):  # its name and its files are this worker's alone
            self._besides += (path,)
            path = None
        if path is not None and self._behind():
            system.makedirs(self.private(path))
            return
        if path is not None:  # whoever is first: also another member than the leader
            self.journal.note(path)
        try:
            system.mkdir(target, *args, **options)
        except FileExistsError:
            if path is None or self.leads():
                raise

    def listdir(self, target: Any = ".") -> list[Any]:
        """`os.listdir`, for a newcomer as it was when the job began."""
        if not self._hides(target):
            return system.listdir(target)
        names = [entry.name for entry in self._entries(target)]
        return [os.fsencode(name) for name in names] if isinstance(target, bytes) else names

    def scandir(self, target: Any = ".") -> Any:
        """`os.scandir`, which `glob`, `os.walk` and `pathlib` use, in the same way."""
        if not self._hides(target) or isinstance(target, bytes):
            return system.scandir(target)
        return Entries(self._entries(target))

    def _hides(self, target: Any) -> bool:
        return not self.leads() and self._behind() and self.path(target) is not None

    def _entries(self, target: Any) -> list[os.DirEntry[str]]:
        folder = os.path.abspath(os.fsdecode(target))  # noqa: PTH100
        place, private = self.journal.as_found(folder), self.private(folder)
        found: list[os.DirEntry[str]] = []
        made = system.exists(private)
        if made:
            with system.scandir(private) as entries:
                found += entries
        shown = {entry.name for entry in found}
        if not made or system.exists(place):
            with system.scandir(os.fsdecode(target) if place == folder else place or private) as entries:
                there = [e for e in entries if self.journal.as_found(os.path.join(folder, e.name))]  # noqa: PTH118
            found += [entry for entry in there if entry.name not in shown]
        shown = {entry.name for entry in found}
        for name, kept in self.journal.kept_in(folder):
            if name not in shown:
                with (
                    contextlib.suppress(OSError),
                    system.scandir(os.path.dirname(kept)) as entries,  # noqa: PTH120
                ):
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
            system.rmtree(self._own)
