"""Warm spares: on every node one prepared process that forks workers of any job in milliseconds.

A Ray actor that takes no resources keeps the process. The actor outlives a restart of the control plane, and
ends by itself when no control plane has asked for it for a while. Holders on the node find the process under
a path that both sides compute, in a directory that only this user can enter.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swell.engines.environment import for_jobs
from swell.engines.files import own_folder
from swell.engines.processes import MARK, MARK_BYTES, memory_bytes
from swell.train.agent.run_config import same_hashes

LEASE_S = 60.0
"""How long a prepared process is kept while no control plane asks for it."""


def folder() -> Path:
    """The directory of this user's sockets."""
    return own_folder("swell-warm")


def key(limit_bytes: int) -> str:
    """A digest that is equal for platforms that can share a prepared process."""
    facts = f"{os.getuid()} {version('swell')} {sys.executable} {limit_bytes}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def socket_path(key: str, node_id: str) -> Path:
    """The socket on which the prepared process of a platform listens on a node."""
    name = hashlib.sha256(f"{key} {node_id}".encode()).hexdigest()[:24]
    return folder() / f"{name}.sock"


def prune() -> None:
    """Remove sockets that no process listens on any more."""
    for path in folder().glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


class Warm:
    """Keeps one prepared process, as a Ray actor on its node."""

    def __init__(self, key: str, node_id: str, limit_bytes: int) -> None:
        self._path = socket_path(key, node_id)
        self._limit = limit_bytes
        self._over = False
        self._asked_s = time.monotonic()
        prune()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "swell.train.start.zygote", "--listen", str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**same_hashes(os.environ), **for_jobs(os.environ), MARK: "-" * MARK_BYTES},
        )

        threading.Thread(target=self._watch_lease, name="swell-lease", daemon=True).start()

    def _watch_lease(self) -> None:
        while time.monotonic() - self._asked_s < LEASE_S:
            time.sleep(1.0)
        self._end()
        os._exit(0)

    def _end(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def state(self) -> dict[str, Any]:
        """Whether the process is ready, and its memory; ends the process if that is over the limit."""
        self._asked_s = time.monotonic()
        held = memory_bytes(self._process.pid)
        if held > self._limit and not self._over:
            self._over = True
            self._end()
        alive = self._process.poll() is None
        return {"ready": alive and not self._over and self._path.exists(), "bytes": held, "over": self._over}
