"""What fits the memory, remembered beyond the process that found out.

A forward pass in the script's own code that runs out of memory ends the script, and with it the worker. So
before a batch larger than all before is handed out, a note in the job's directory says so; it is taken back
when that batch's gradients are there. A worker that dies of an out-of-memory error with its note standing is
started again, and whoever starts from then on computes smaller pieces.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Room:
    """One worker's notes."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._note = _note(directory, worker)
        self._ran = 0
        self._trying = 0

    def trying(self, samples: int) -> None:
        """A batch of that many samples is about to be computed."""
        if samples > self._ran:
            self._trying = samples
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_text(str(samples))

    def settled(self) -> None:
        """It was computed, or did not fit and the runtime saw to it."""
        if self._trying:
            self._ran, self._trying = self._trying, 0
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)


def failed(directory: Path) -> int | None:
    """The smallest batch that did not fit in this run of the job; the next may be on other devices."""
    with contextlib.suppress(OSError, ValueError):
        launch, samples = (directory / "memory" / "failed").read_text().split(":")
        return int(samples) if launch == _launch() else None
    return None


def give_up(directory: Path, worker: str) -> int | None:
    """The batch this worker was trying did not fit: remember. None if it was trying none that can be cut."""
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
