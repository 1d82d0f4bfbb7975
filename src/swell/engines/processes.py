"""What /proc says of processes: who descends from whom, who belongs to which job, how much memory they hold.

Everything a job starts inherits an environment variable with the job's directory. It is found by that mark
even when its parents are gone or it made a session of its own, so nothing of a job can be left behind unseen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "SWELL_LOCAL_JOB"
"""Environment variable that all processes of a job carry."""


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def parent(pid: int) -> int | None:
    """The parent of a process; None if it is gone."""
    try:
        # The command may hold spaces and brackets; the fields after the last bracket do not.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def descendants(pid: int) -> list[int]:
    """All processes below one, however deep."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        above = parent(one)
        if above is not None:
            children.setdefault(above, []).append(one)
    found, open_ = [], [pid]
    while open_:
        for child in children.get(open_.pop(), []):
            found.append(child)
            open_.append(child)
    return found


def memory_bytes(pid: int) -> int:
    """Memory a process holds for itself (resident, without what it shares); 0 if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def lock_holder(path: Path) -> int | None:
    """The process that holds this lock file and wrote its id into it; None if nobody does."""
    try:
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0) or None
    except (OSError, ValueError):
        pass
    return None


def mark(directory: Path) -> str:
    """What processes of the job in `directory` carry."""
    return str(directory.resolve())


def processes_of(directory: Path) -> list[int]:
    """Every living process of the job in `directory`, whoever its parent is; never the caller."""
    wanted, found = f"{MARK}={mark(directory)}".encode(), []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def sweep(directory: Path, wait_s: float = 0.0) -> bool:
    """Kill whatever is left of a job; True once nothing is, as far as was waited for."""
    deadline = time.monotonic() + wait_s
    while left := processes_of(directory):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
