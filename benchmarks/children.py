"""A command with a time limit that leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_END_S = 20.0
"""How long a command that is over its time may take to clean up."""


class Limited:
    """A running command whose output goes to `log`, and which is ended after `limit_s` seconds."""

    def __init__(self, command: list[str], log: Path, limit_s: float) -> None:
        self._log, self._limit_s = log, limit_s
        self._until_s = time.monotonic() + limit_s
        with log.open("wb") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)

    def over(self) -> bool:
        """Whether it has ended; if its time is over, it is ended first."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() < self._until_s:
            return False
        self.end()
        return True

    def problem(self) -> str | None:
        """What went wrong, once it is over; None if nothing did."""
        code = self._process.returncode
        if code == 0:
            return None
        if time.monotonic() >= self._until_s:
            return f"it took longer than {self._limit_s:.0f} s; see {self._log}"
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"exit code {code} ({last[0][:200] if last else 'it said nothing'}); see {self._log}"

    def end(self) -> None:
        """End it and all that it started, if it still runs."""
        if self._process.poll() is None:
            end(self._process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end; then end it, and all that it started."""
    started = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for pid, began in {**started, **descendants(process.pid)}.items():
        if _stat(pid)[1] == began:  # not another process that has the number by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def descendants(pid: int) -> dict[int, str]:
    """All processes that this one started, directly or not: when each began, by process id."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for number in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        parent, began = _stat(number)
        parents.setdefault(parent, []).append((number, began))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        for child, began in parents.get(left.pop(), []):
            found[child] = began
            left.append(child)
    return found


def _stat(pid: int) -> tuple[int, str]:
    """A process's parent, and when it began; (0, "") if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]
