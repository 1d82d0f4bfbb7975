"""What is kept of jobs that are over, for how long and how much: records, events, directories, checkpoints.
And what is kept of events of no job, and of the history.

`plan` is pure: which jobs to forget and which to thin; so is `needless`: which events of no job nobody reads
any more. `Retention` carries both out. A job that is not over, or whose supervisor lives, is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swell.control.errors import StoreUnavailable
from swell.control.store import Store
from swell.domain import Event, EventKind
from swell.engines.order import folder_of
from swell.engines.supervisor import is_locked
from swell.train.agent.regular import folder, remove_tree, used_bytes

log = logging.getLogger(__name__)

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is kept of jobs that are over."""

    for_s: float | None = 30 * DAY_S
    """Records, events and directories are kept for this long after a job's end, and events of no job for this
    long; None for ever."""
    most_bytes: int | None = None
    """The directories of jobs that are over use at most so much; the oldest go first. None for no limit."""
    thin_after_s: float | None = DAY_S
    """So long after a job's end all its checkpoints but the newest are deleted; None for never."""
    history_s: float | None = 365 * DAY_S
    """What jobs of a kind taught is kept for this long after the last of them ran; None for ever."""
    most_kinds: int = 20_000
    """The history has at most so many kinds: those that ran last."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over."""

    job_id: str
    ended_s: float
    bytes: int
    checkpoints: int
    """How many complete checkpoints its directory has."""


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What to do about jobs that are over."""

    forget: tuple[str, ...]
    thin: tuple[str, ...]


@dataclass(slots=True)
class Retained:
    """What was done, or would be."""

    forgotten: list[str] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)
    freed_bytes: int = 0


def plan(ended: Sequence[Ended], keep: Keep, now_s: float) -> RetentionPlan:
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
    return RetentionPlan(tuple(forget), tuple(thin))


def needless(old: Sequence[tuple[int, Event]]) -> list[int]:
    """Of old events of no job, oldest first: the numbers of those that nobody reads any more.

    The first time that a node joined stays, because slots are numbered in that order, and so does the last
    time that it came or went. Of a reservation stay how it was last declared, and what it has held since it
    last began to hold slots: readers add up how many slots came and went.
    """
    nodes, declared, held = dict[str, list[int]](), dict[str, int](), dict[str, list[int]]()
    for seq, event in old:
        name = str(event.node or event.data.get("reservation") or "")
        match event.kind:
            case EventKind.NODE_JOINED | EventKind.NODE_LOST:
                first = nodes.get(name, [seq])[:1]
                nodes[name] = first if first == [seq] else [*first, seq]
            case EventKind.RESERVED:
                declared[name] = seq
            case EventKind.UNRESERVED:
                declared.pop(name, None)
            case EventKind.HELD:
                held.setdefault(name, []).append(seq)
                if not event.data.get("before"):
                    held[name] = [seq]
                if not event.data.get("gpus"):
                    held[name] = []
    kept = {seq for seqs in (*nodes.values(), *held.values()) for seq in seqs} | set(declared.values())
    return [seq for seq, _ in old if seq not in kept]


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
    ) -> Retained:
        """Forget and thin; with `dry` only say what would be done. `beat` is called for every job."""
        ended = {job.job_id: job for job in self._ended(beat)}
        keep = keep or self.keep
        todo, done = plan(list(ended.values()), keep, now_s), Retained()
        for job_id in todo.forget:
            with _sparing_others(job_id):
                if dry or self._forget(job_id, beat):
                    done.forgotten.append(job_id)
                    done.freed_bytes += ended[job_id].bytes
        for job_id in todo.thin:
            with _sparing_others(job_id):
                done.freed_bytes += self._thin(job_id, dry, beat)
                done.thinned.append(job_id)
        if done.forgotten or done.thinned:
            log.info(
                "%d jobs forgotten, %d thinned, %d bytes freed",
                len(done.forgotten),
                len(done.thinned),
                done.freed_bytes,
            )
        if not dry:
            self._prune(keep, now_s, beat)
        return done

    def _prune(self, keep: Keep, now_s: float, beat: Callable[[], None]) -> None:
        """Delete old events of no job, and what kinds of jobs taught that have not run for long."""
        if keep.for_s is not None:
            old = self._store.events_of_no_job(now_s - keep.for_s)
            beat()
            self._store.drop_events(needless(old))
        beat()
        before_s = -math.inf if keep.history_s is None else now_s - keep.history_s
        self._store.prune_history(before_s, keep.most_kinds)

    def _ended(self, beat: Callable[[], None]) -> list[Ended]:
        found = []
        for record in self._store.jobs(over=True, limit=1_000_000):
            beat()
            ended_s = record.ended_s if record.ended_s is not None else record.submitted_s
            size, checkpoints = 0, 0
            with _sparing_others(record.job_id):
                size = used_bytes(self._jobs / record.job_id, beat=beat)
                checkpoints = len(self._checkpoints(record.job_id))
            found.append(Ended(record.job_id, ended_s, size, checkpoints))
        return found

    def _forget(self, job_id: str, beat: Callable[[], None]) -> bool:
        directory = self._jobs / job_id
        if is_locked(directory):
            return False  # its processes are still ending
        remove_tree(directory, beat=beat)
        remove_tree(folder_of(directory))
        self._store.forget(job_id)
        return True

    def _thin(self, job_id: str, dry: bool, beat: Callable[[], None]) -> int:
        if is_locked(self._jobs / job_id):
            return 0
        freed = 0
        with folder(self._jobs, job_id, "checkpoints") as checkpoints:
            for name in _complete(checkpoints)[:-1]:
                freed += used_bytes(name, checkpoints, beat)
                if not dry:
                    remove_tree(name, checkpoints, beat)
        return freed

    def _checkpoints(self, job_id: str) -> list[str]:
        """The names of a job's complete checkpoints, oldest first; none if the job left something else."""
        with contextlib.suppress(OSError), folder(self._jobs, job_id, "checkpoints") as checkpoints:
            return _complete(checkpoints)
        return []


def _complete(checkpoints: int) -> list[str]:
    with os.scandir(checkpoints) as entries:
        found = [one for one in entries if one.name.startswith("step-")]
        return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))


@contextlib.contextmanager
def _sparing_others(job_id: str) -> Iterator[None]:
    """Log what fails about one job, whose directory is its own work; the other jobs' turn comes next."""
    try:
        yield
    except StoreUnavailable:
        raise
    except Exception as error:
        log.warning("what is left of job %s cannot be tidied up: %r", job_id, error)
