"""The audit log: who asked for what change, and who was refused. One JSON object per line, in audit.log.

Requests that only read are not in it, unless they were refused. Refusals are limited to a few per second:
whoever knocks without a token must not fill the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "audit.log"
MOST_BYTES = 64 << 20
"""When the file is this large it becomes audit.log.1, in place of an older one."""
REFUSALS_PER_S = 10.0
_LONGEST = 300


class AuditLog:
    """Appends to the file. A full disk costs lines, never requests; `dropped` counts them."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most = most_bytes
        self._left, self._at_s = REFUSALS_PER_S, time.monotonic()
        self.dropped = 0

    def request(self, scope: Mapping[str, Any], status: int) -> None:
        """Write a line about a request that was answered, if it belongs in the log."""
        refused = status in (401, 403)
        if scope["method"] in ("GET", "HEAD", "OPTIONS") and not refused:
            return
        if refused and not self._may_refuse():
            self.dropped += 1
            return
        state = scope.get("state") or {}
        principal = state.get("principal")
        self.write(
            user=None if principal is None else principal.user,
            role=None if principal is None else principal.role.value,
            address=(scope.get("client") or [None])[0],
            method=scope["method"],
            path=scope["path"][:_LONGEST],
            status=status,
            **({"job_id": state["job_id"]} if "job_id" in state else {}),
        )

    def write(self, **entry: Any) -> None:
        """Append an entry with the present moment."""
        line = json.dumps({"time_s": round(time.time(), 3)} | entry) + "\n"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, line.encode())
                full = os.fstat(descriptor).st_size > self._most
            finally:
                os.close(descriptor)
        except OSError:
            self.dropped += 1
            return
        if full:
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _may_refuse(self) -> bool:
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._at_s) * REFUSALS_PER_S, REFUSALS_PER_S)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
