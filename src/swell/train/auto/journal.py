"""The journal of the files that a job of an unmodified script has changed, with copies of what was there.

The leader writes it; a newcomer, which runs the script from its beginning, sees the files through it as they
were when the job began.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swell.train.auto import system

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
            system.rmtree(self._keep)

    def note_read(self, path: str) -> None:
        """The leader is about to read a file."""
        if len(self._read) < _MOST_READ:
            self._read.add(path)

    def note(self, path: str) -> None:
        """The leader is about to write a file: keep what newcomers must see in its place."""
        self._load()
        if path in self._noted:
            return
        if not system.exists(path):
            self._write_down(path, None)
        elif path not in self._read or os.path.isdir(path):  # noqa: PTH112
            self._noted[path] = path
        else:
            self._write_down(path, self._place_for(path), system.copyfile)

    def note_removal(self, path: str) -> None:
        """The leader is about to remove a file or folder: keep it if the script has read of it."""
        self._load()
        if self._noted.get(path, path) != path:
            return  # the job has made it itself, or it is kept already
        if any(read == path or read.startswith(path + os.sep) for read in self._read):
            self._write_down(path, self._place_for(path), system.keep_all)

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
                system.makedirs(os.path.dirname(kept))  # noqa: PTH120
                keep(path, kept)
            self._append(json.dumps([path, kept]).encode() + b"\n")
        self._noted[path] = kept

    def _append(self, line: bytes) -> None:
        """Add a whole line to the file, or nothing."""
        if self._log is None:
            system.makedirs(str(self._keep))
            self._log = system.open_log(self._file)
        written, end = self._log.write(line), self._log.tell()
        if written != len(line):  # the disk is full
            self._log.truncate(end - written)
        elif end == self._bytes + written:
            self._bytes = end

    def _load(self) -> None:
        with contextlib.suppress(OSError):
            if system.stat(self._file).st_size > self._bytes:
                with system.open_file(self._file, "rb") as file:
                    file.seek(self._bytes)
                    lines = file.read().splitlines(keepends=True)
                complete = [line for line in lines if line.endswith(b"\n")]  # another worker may be writing
                self._noted |= dict(map(json.loads, complete))
                self._bytes += sum(map(len, complete))
