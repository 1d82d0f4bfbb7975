"""A job's output: one file that keeps the newest part, however much is printed.

Offsets into the file never change, because followers go on from the offset where they were. So the file is
not rotated: once it holds more than `MOST_BYTES`, the disk space of its oldest part is given back (a *hole*),
and readers skip the hole. On file systems that cannot do that, output beyond the limit is dropped, and a line
says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from swell.train.agent.regular import open_regular

FILE = "output.log"
MOST_BYTES = 64 << 20
"""How much of a job's output is kept on disk."""
PIECE_BYTES = 1 << 20
"""Disk space is given back in pieces of this size."""
LONGEST_LINE = 16 << 10
"""A longer line is shown in pieces."""
SHOWN_AFTER_TURNS = 5
"""An unfinished line, such as a progress bar, is shown after so many turns without a change."""
_LAST_PIECES = 64
"""How many pieces of a worker's output are still shown when the job ends."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def read(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """Output from an offset, `limit` bytes at most, and the offset to go on from; OSError without output."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if offset >= size:
            return b"", offset
        offset = os.lseek(file.fileno(), offset, os.SEEK_DATA)
        file.seek(offset)
        data = file.read(limit)
    return data, offset + len(data)


def give_back(descriptor: int, begin: int, end: int) -> bool:
    """Free the disk space of a part of a file, without changing any offset; False if that is not possible."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin) == 0)


class OutputFile:
    """The writing end. A full disk costs output, never the job."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._most = most_bytes
        self._size = os.fstat(self._descriptor).st_size
        self._freed = 0
        self._full = False

    def say(self, line: str) -> None:
        """Add a line."""
        if self._full:
            return
        data = (line + "\n").encode(errors="replace")
        try:
            self._size += os.write(self._descriptor, data)
        except OSError:
            return
        if self._size - self._freed > self._most + PIECE_BYTES:
            self._free()

    def _free(self) -> None:
        end = (self._size - self._most) // PIECE_BYTES * PIECE_BYTES
        if give_back(self._descriptor, self._freed, end):
            self._freed = end
            return
        self._full = True
        note = f"swell: more than {self._most} bytes were printed; the rest is not kept\n"
        with contextlib.suppress(OSError):
            os.write(self._descriptor, note.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Tail:
    """Follows a worker's own log: complete lines, and long or old unfinished ones in pieces."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb+")
        self._rest = b""
        self._rest_turns = 0
        self._freed = 0

    def lines(self, most_bytes: int = PIECE_BYTES, *, all_of_it: bool = False) -> list[str]:
        """What came since the last call, at most `most_bytes` of it; each byte is read once."""
        data = self._file.read(most_bytes)
        self._free()
        if not data and not self._rest:
            return []
        *complete, rest = (self._rest + data).split(b"\n")
        self._rest_turns = self._rest_turns + 1 if rest == self._rest else 0
        if rest and (all_of_it or self._rest_turns >= SHOWN_AFTER_TURNS or len(rest) > LONGEST_LINE):
            complete.append(rest)
            rest, self._rest_turns = b"", 0
        self._rest = rest
        pieces = (
            line[i : i + LONGEST_LINE] for line in complete for i in range(0, len(line) or 1, LONGEST_LINE)
        )
        return [piece.decode(errors="replace").rstrip() for piece in pieces]

    def _free(self) -> None:
        """Give back the space of what has been copied, except its newest piece."""
        end = (self._file.tell() - PIECE_BYTES) // PIECE_BYTES * PIECE_BYTES
        if end > self._freed and give_back(self._file.fileno(), self._freed, end):
            self._freed = end

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Outputs:
    """Follows the logs of all workers of a job."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._tails: dict[str, Tail] = {}
        self._newest: deque[str] = deque(maxlen=500)
        self._last: dict[str, str] = {}

    def new_lines(
        self, only: str | None = None, *, all_of_it: bool = False
    ) -> Iterator[tuple[str, list[str]]]:
        """By worker, or of one `only`: what came since the last call, bounded, and more at the end."""
        for path in sorted(self._logs.glob(f"{only or 'w*'}.log")):
            if path.stem not in self._tails:
                self._tails[path.stem] = Tail(path)
            for _ in range(_LAST_PIECES if all_of_it else 1):
                lines = self._tails[path.stem].lines(all_of_it=all_of_it)
                if not lines:
                    break
                self._newest.extend(lines)
                self._last[path.stem] = next(filter(None, reversed(lines)), self._last.get(path.stem, ""))
                yield path.stem, lines

    def had(self, text: str) -> bool:
        """Whether one of the lines that came last has this text in it."""
        return any(text in line for line in self._newest)

    def last(self, worker: str) -> str | None:
        """The last line that a worker printed, blank ones aside; None if it printed nothing."""
        return self._last.get(worker)

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
