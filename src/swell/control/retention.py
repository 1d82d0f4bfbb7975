"""What is kept of jobs that are over, for how long and how much: records, events, directories, checkpoints.

`plan` is pure: which jobs to forget and which to thin. `Retention` carries a plan out. A job that is not
over, or whose supervisor lives, is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swell.control.store import Store
from swell.engines.order import folder_of
from swell.engines.supervisor import is_locked

log = logging.getLogger(__name__)

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is kept of jobs that are over."""

    for_s: float | None = 30 * DAY_S
    """Records, events and directories are kept for this long after a job's end; None for ever."""
    most_bytes: int | None = None
    """The directories of jobs that are over use at most so much; the oldest go first. None for no limit."""
    thin_after_s: float | None = DAY_S
    """So long after a job's end all its checkpoints but the newest are deleted; None for never."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over."""

    job_id: str
    ended_s: float
    bytes: int
    checkpoints: int
    """How many complete checkpoints its directory has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about jobs that are over."""

    forget: tuple[str, ...]
    thin: tuple[str, ...]


@dataclass(slots=True)
class Done:
    """What was done, or would be."""

    forgotten: list[str] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)
    freed_bytes: int = 0


def plan(ended: Sequence[Ended], keep: Keep, now_s: float) -> Plan:
    """Which jobs to forget, because of their age or because of their size, and which to thin."""
    forget, thin, used = list[str](), list[str](), 0
    for job in sorted(ended, key=lambda job: job.ended_s, reverse=True):  # the newest are kept first
        age_s = now_s - job.ended_s
        too_old = keep.for_s is not None and age_s > keep.for_s
        too_much = keep.most_bytes is not None and used + job.bytes > keep.most_bytes
        if too_old or (too_much and job.bytes):
            forget.append(job.job_id)
            continue
        used += job.bytes
        if keep.thin_after_s is not None and age_s > keep.thin_after_s and job.checkpoints > 1:
            thin.append(job.job_id)
    return Plan(tuple(forget), tuple(thin))


class Retention:
    """Deletes what need not be kept any more."""

    def __init__(self, store: Store, home: Path, keep: Keep) -> None:
        self.keep = keep
        self._store = store
        self._jobs = home / "jobs"

    def run(
        self,
        now_s: float,
        keep: Keep | None = None,
        *,
        dry: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> Done:
        """Forget and thin; with `dry` only say what would be done. `beat` is called for every job."""
        ended = {job.job_id: job for job in self._ended()}
        todo, done = plan(list(ended.values()), keep or self.keep, now_s), Done()
        for job_id in todo.forget:
            beat()
            if dry or self._forget(job_id):
                done.forgotten.append(job_id)
                done.freed_bytes += ended[job_id].bytes
        for job_id in todo.thin:
            beat()
            freed = self._thin(job_id, dry)
            done.thinned.append(job_id)
            done.freed_bytes += freed
        if done.forgotten or done.thinned:
            log.info(
                "%d jobs forgotten, %d thinned, %d bytes freed",
                len(done.forgotten),
                len(done.thinned),
                done.freed_bytes,
            )
        return done

    def _ended(self) -> list[Ended]:
        found = []
        for record in self._store.jobs(over=True, limit=1_000_000):
            directory = self._jobs / record.job_id
            ended_s = record.ended_s if record.ended_s is not None else record.submitted_s
            size, checkpoints = size_bytes(directory), len(_checkpoints(directory))
            found.append(Ended(record.job_id, ended_s, size, checkpoints))
        return found

    def _forget(self, job_id: str) -> bool:
        directory = self._jobs / job_id
        if is_locked(directory):
            return False  # its processes are still ending
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            log.warning("%s cannot be deleted: its job is not forgotten", directory)
            return False
        shutil.rmtree(folder_of(directory), ignore_errors=True)
        self._store.forget(job_id)
        return True

    def _thin(self, job_id: str, dry: bool) -> int:
        directory = self._jobs / job_id
        if is_locked(directory):
            return 0
        freed = 0
        for path in _checkpoints(directory)[:-1]:
            freed += size_bytes(path)
            if not dry:
                shutil.rmtree(path, ignore_errors=True)
        return freed


def _checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints of a job, oldest first."""
    return sorted(path for path in (directory / "checkpoints").glob("step-*") if path.is_dir())


def size_bytes(directory: Path) -> int:
    """The disk space that a directory uses. Links are not followed."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118 - there are many
    return total
