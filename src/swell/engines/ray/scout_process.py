"""The `scout` as its site sees it: a process that is started, heard, and replaced if it falls silent."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

AGAIN_S = 1.0
"""Least time between two starts of a scout."""
SILENT_S = 5.0
"""A scout that says nothing for this long hangs because Ray is gone, and is replaced."""
UP_S = 40.0
"""How long a new scout may take to say anything."""

Bundles = list[dict[str, int]]


class ScoutProcess:
    """The present scout, if there is one, and the last that was heard of it."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._expected: subprocess.Popen[bytes] | None = None
        """The scout that `wait_first` waits for, once it has been started."""
        self._started_s = float("-inf")
        self.heard_s = float("-inf")
        """When a scout last said anything."""
        self._first = threading.Event()
        """Set once a scout has said anything, or has ended."""
        self._line: dict[str, Any] | None = None
        """The newest line that was not taken yet."""
        self._trouble = ""
        """Why the scout cannot see the cluster; empty if it can."""
        self._bundles: Bundles | None = None
        """What Ray's own autoscaler is asked to have room for; None if it is not asked for anything."""
        self.heard: Callable[[], None] = lambda: None
        """Called, from a thread of its own, when a scout has said something."""

    @property
    def runs(self) -> bool:
        """Whether there is a scout."""
        return self._process is not None and self._process.poll() is None

    def start(self, asked: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start a scout with this argument (see `scout`) and environment, and listen to it."""
        self._started_s = time.monotonic()
        words = json.dumps({**asked, "bundles": self._bundles})
        with self._log_file.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.ray.scout", words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=env,
            )
        self._expected = self._process
        threading.Thread(target=self._listen, args=(self._process,), name="swell-scout", daemon=True).start()

    def is_due(self, now_s: float) -> bool:
        """Whether another scout is to be started now. Kills one that has been silent for too long."""
        age_s = now_s - self._started_s
        heard = self.heard_s > self._started_s
        silent = now_s - self.heard_s > SILENT_S if heard else age_s > UP_S
        if self._process is None:
            return True
        if silent:
            self._process.kill()
        return self._process.poll() is not None and age_s > AGAIN_S

    def end_silent(self, now_s: float) -> None:
        """End a scout that has fallen silent, and forget its last line: it is not how the cluster is now."""
        if self._process is not None and now_s - self.heard_s > SILENT_S and self._first.is_set():
            self._process.kill()
            self._process.wait(5.0)
            self._line = None

    def expect_first(self) -> None:
        """Forget this scout: `wait_first` waits for the next one, and does not see the end of this one."""
        self._expected = None
        self._first.clear()

    def wait_first(self, timeout_s: float) -> str:
        """Wait until the scout has said anything; returns why it cannot see the cluster, empty if it can."""
        if self._first.wait(timeout_s):
            return self._trouble
        return self._trouble or f"Ray did not list its nodes within {timeout_s:g} s; see {self._log_file}"

    def take_line(self) -> dict[str, Any] | None:
        """The newest line of the scout, once; None if there is no newer one."""
        line, self._line = self._line, None
        return line

    def request(self, bundles: Bundles) -> None:
        """Have Ray's own autoscaler asked for room for these resources, until it is asked for others."""
        self._bundles = bundles
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a scout that has ended: the next one asks
                process.stdin.write(json.dumps({"bundles": bundles}).encode() + b"\n")
                process.stdin.flush()

    def stop(self) -> None:
        """End the scout, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            self._hear(raw)
        process.wait()
        if process is self._expected and not self._first.is_set():
            self._trouble = f"swell's Ray watcher stopped unexpectedly; see {self._log_file}"
            self._first.set()

    def _hear(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
        except ValueError:
            return
        if "error" in line:
            self._trouble = str(line["error"])
        else:
            self._line, self._trouble = line, ""
        self.heard_s = time.monotonic()
        self._first.set()
        self.heard()
