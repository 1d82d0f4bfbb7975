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
        size = system.stat(self._path).st_size if system.exists(self._path) else 0
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
            with system.open_file(self._path, "rb") as file:
                file.seek(size - compared)
                fits = file.read() == own[known - compared : known]
        os.write(self._real, own[known:] if fits else latest)

    def _open_real(self) -> int:
        begun = system.exists(self._path)
        system.makedirs(os.path.dirname(self._path))  # noqa: PTH120
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
