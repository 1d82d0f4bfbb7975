"""Watches a platform from outside: what its event log says, and what /proc says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from swell.domain import Event, EventKind
from swell.engines.processes import MARK, is_worker, parent

_TAKES = (EventKind.ALLOCATED, EventKind.RESIZED)
_GIVES = (
    EventKind.PREEMPTED,
    EventKind.FINISHED,
    EventKind.FAILED,
    EventKind.CANCELLED,
    EventKind.REJECTED,
)


def most_slots_held(events: Sequence[Event], capacity: int) -> int:
    """The most slots held at once by the event log's account; AssertionError if one was held twice."""
    held: dict[str, tuple[int, ...]] = {}
    most = 0
    for time_s, together in groupby(events, key=lambda event: event.time_s):
        for event in together:  # the changes of one decision take effect together
            if event.kind in _TAKES:
                held[str(event.job_id)] = tuple(event.data["gpus"])
            elif event.kind in _GIVES:
                held.pop(str(event.job_id), None)
        slots = [slot for placement in held.values() for slot in placement]
        if len(slots) != len(set(slots)):
            raise AssertionError(f"a slot has two jobs at {time_s}: {held}; {_before(events, time_s)}")
        assert all(0 <= slot < capacity for slot in slots), f"a slot that is not there at {time_s}: {held}"
        most = max(most, len(slots))
    return most


def _before(events: Sequence[Event], time_s: float, span_s: float = 5.0) -> str:
    """What happened to slots just before a moment, in a line."""
    kinds = {*_TAKES, *_GIVES, EventKind.WORKER_LOST}
    near = [e for e in events if time_s - span_s <= e.time_s <= time_s and e.kind in kinds]
    told = [f"{time_s - e.time_s:.2f} s before: {e.job_id} {e.kind} {e.data.get('gpus', '')}" for e in near]
    return "; ".join(told)


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _jobs(home: Path, pids: Iterable[int]) -> dict[str, int]:
    """How many of these processes each job under `home` has."""
    start = f"{MARK}={home.resolve()}/jobs/".encode()
    count: dict[str, int] = {}
    for pid in pids:
        for entry in _read(pid, "environ").split(b"\0"):
            if entry.startswith(start):
                job_id = entry.removeprefix(start).decode()
                count[job_id] = count.get(job_id, 0) + 1
    return count


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def workers(home: Path) -> dict[str, int]:
    """Worker processes of each job under `home` that live now: forked or cold."""
    return _jobs(home, filter(is_worker, _pids()))


def supervisors(home: Path) -> dict[str, int]:
    """Supervisor processes of each job that hold its lock or are on their way to it."""
    found = {
        pid
        for pid in _pids()
        if b"swell.engines.supervisor" in _read(pid, "cmdline") or _read(pid, "comm") == b"swell-superviso\n"
    }
    return _jobs(home, (pid for pid in found if parent(pid) not in found))  # a fork keeps the name at first


class ProcessWatch:
    """Looks at /proc several times a second for as long as it is entered."""

    def __init__(self, home: Path, every_s: float = 0.15) -> None:
        self.home = home
        self.most_workers = 0
        self.looks = 0
        self.seen: list[dict[str, int]] = []
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProcessWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            now = workers(self.home)
            self.looks += 1
            if sum(now.values()) > self.most_workers:
                self.most_workers = sum(now.values())
                self.seen.append(now)


def overlapping_runs(lines: Iterable[str]) -> int:
    """How often two leaders of one job trained at the same time, by the lines the toy prints."""
    spans: dict[str, tuple[float, float]] = {}
    for line in lines:
        if "| step " in line and " pid " in line:
            words = line.split()
            at, pid = float(words[4]), words[6]
            first, _ = spans.get(pid, (at, at))
            spans[pid] = (first, at)
    ordered = sorted(spans.values())
    return sum(ordered[i][1] > ordered[i + 1][0] for i in range(len(ordered) - 1))
