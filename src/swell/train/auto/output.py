"""Output of an unmodified script: only the leader's is shown, and people are told what its numbers cover."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from swell.train.auto import system

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
            system.remove(self._path)

    def _lead(self) -> None:
        """Write what the last leader died before."""
        self._leading = True
        with contextlib.suppress(OSError):
            if self._file is None:
                system.makedirs(str(self._path.parent))
                self._file = system.open_descriptor(self._path, os.O_RDWR | os.O_CREAT, 0o600)
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
