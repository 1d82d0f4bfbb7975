"""Which batch does not fit the memory, remembered after the process that found out has ended.

If a forward pass in the script's own code runs out of memory, the script ends, and with it the worker. So
before a worker hands out a batch larger than all before, it writes a note in the job's directory, and it
removes the note once the batch's gradients are computed. A worker that dies of an out-of-memory error while
its note exists is started again, and all workers that start from then on compute smaller pieces.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Room:
    """One worker's note about the batch that it tries."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._note = _note(directory, worker)
        self._ran = 0
        self._trying = 0

    def trying(self, samples: int) -> None:
        """Write the note, if a batch of this size has not been computed yet."""
        if samples > self._ran:
            self._trying = samples
            with contextlib.suppress(OSError):  # a full disk must not end the job
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_text(str(samples))

    def settled(self) -> None:
        """Remove the note: the batch was computed, or did not fit and the runtime has handled that."""
        if self._trying:
            self._ran, self._trying = self._trying, 0
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)


def failed(directory: Path) -> int | None:
    """The smallest batch that did not fit in this run of the job (another run may have other devices)."""
    with contextlib.suppress(OSError, ValueError):
        launch, samples = (directory / "memory" / "failed").read_text().split(":")
        return int(samples) if launch == _launch() else None
    return None


def give_up(directory: Path, worker: str) -> int | None:
    """Remember that the batch in this worker's note did not fit; None if there is none that can be cut."""
    note = _note(directory, worker)
    try:
        samples = int(note.read_text())
    except (OSError, ValueError):
        return None
    if samples <= 1:
        return None
    smallest = min(samples, failed(directory) or samples)
    note.write_text(f"{_launch()}:{smallest}")
    note.replace(directory / "memory" / "failed")
    return samples


def _launch() -> str:
    return os.environ.get("SWELL_LAUNCH", "")


def _note(directory: Path, worker: str) -> Path:
    return directory / "memory" / f"{worker}.trying"
