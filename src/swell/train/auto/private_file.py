"""What an unmodified script holds in place of a file or a listing, on workers other than the leader."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swell.train.auto import system

if TYPE_CHECKING:
    from swell.train.auto.files import Files


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
        begun = system.exists(self._path)
        self._files.journal.note(self._path)
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
