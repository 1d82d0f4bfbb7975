"""The process that feeds a job's experiment trackers, as its launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from swell.train.agent.outputs import Tail
from swell.train.agent.prepared import end

_LAST_S = 20.0
"""How long the trackers may take to send what they have once the job is over."""
_HURRY_S = 5.0
"""The same if the job was stopped by a signal: who does that does not wait for long."""
_STARTS = 3
"""How often a process that failed is started again."""


class Tracker:
    """Starts the process, starts it again if it fails, and shows what it says to the user."""

    def __init__(self, path: Path, env: Mapping[str, str]) -> None:
        self._path, self._env = path, env
        self._failures = 0
        self.process = self._start()
        self._tail = Tail(path / "logs" / "tracking.log")

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._path / "logs" / "tracking.log").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "swell.train.track.process", str(self._path)],
                env={**os.environ, **self._env},  # the job's variables may hold the trackers' keys
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def ended(self, code: int, *, again: bool) -> None:
        """The process ended: start it again if it failed and there is still something to track."""
        self.process.returncode = code
        self._failures += 1
        if again and code != 0 and self._failures <= _STARTS:
            self.process = self._start()

    def said(self) -> list[str]:
        """What it has to say to the user; libraries' chatter stays in its log."""
        return [line for line in self._tail.lines() if line.startswith("swell: ")]

    def close(self, *, hurry: bool) -> None:
        """Let it send what it has, then end it."""
        self._tail.close()
        if self.process.returncode is None:
            if hurry:
                self.process.send_signal(signal.SIGTERM)
            end(self.process, _HURRY_S if hurry else _LAST_S)
