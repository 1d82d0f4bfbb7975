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
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from swell.train.auto import system
from swell.train.auto.journal import Journal
from swell.train.auto.private_file import Entries, PrivateFile

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
                if place not in opened and system.exists(place.removeprefix(self._own)):
                    system.remove(place)
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
            if not system.exists(path):
                self.journal.note(path)
                system.makedirs(path)
            return
        with system.open_file(self.private(path), "rb") as file:
            mine = file.read()
        there = b""
        if system.exists(path):
            with system.open_file(path, "rb") as file:
                there = file.read()
        self._make_parents(path)
        self.journal.note(path)
        if begin is not None:  # lines at the end of a file: the last leader may have added some of them
            lines = mine[begin:]
            known = next(n for n in range(len(lines), -1, -1) if there.endswith(lines[:n]))
            with system.open_file(path, "ab") as file:
                file.write(lines[known:])
        elif mine != there:
            new = f"{path}.swell-new"
            with system.open_file(new, "wb") as file:
                file.write(mine)
            system.replace(new, path)

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
            self._make_parents(path)
            self.journal.note(path)
            stream = system.open_file(file, mode, *args, **options)
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
        if bare.startswith("r") and not system.exists(self.private(path)):
            system.copyfile(self.where(path), self.private(path, make=True))
        if not self.behind:
            place = self.private(path)
            begun = system.stat(place).st_size if bare == "a" and system.exists(place) else 0
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
                if removes:
                    self._latest.pop(path, None)
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
            system.mkdir(target, *args, **options)
            return
        system.makedirs(self.private(path))
        if not self.behind:
            self._latest[path] = None
            for _ in range(_LOOKS):  # what is no Python may write there next: the leader is making it too
                if system.exists(path):
                    break
                time.sleep(_LOOK_S)

    def _make_parents(self, path: str) -> None:
        """Make the folders of a file that this worker has made privately, before it led."""
        folder = os.path.dirname(path)  # noqa: PTH120
        if not system.exists(folder) and system.exists(self.private(folder)):
            self.journal.note(folder)
            system.makedirs(folder)

    def listdir(self, target: Any = ".") -> list[Any]:
        """`os.listdir`, for a newcomer as it was when the job began."""
        if not self._hides(target):
            return system.listdir(self._folder(target))
        names = [entry.name for entry in self._entries(target)]
        return [os.fsencode(name) for name in names] if isinstance(target, bytes) else names

    def scandir(self, target: Any = ".") -> Any:
        """`os.scandir`, which `glob`, `os.walk` and `pathlib` use, in the same way."""
        if not self._hides(target) or isinstance(target, bytes):
            return system.scandir(self._folder(target))
        return Entries(self._entries(target))

    def _folder(self, target: Any) -> Any:
        """Where to list a folder: in this worker's own one if nobody else has made it."""
        path = None if self.leads() else self.path(target)
        if path is None or isinstance(target, bytes) or system.exists(path):
            return target
        return self.private(path) if system.exists(self.private(path)) else target

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
            system.rmtree(self._own)


def _raw(stream: Any) -> Any:
    """The file below a stream's buffers."""
    buffer = getattr(stream, "buffer", stream)
    return getattr(buffer, "raw", buffer)
