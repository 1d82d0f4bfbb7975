"""The launcher's end of the zygote, the prepared process that forks workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from swell.train.agent import children
from swell.train.agent.run_config import same_hashes

GRACE_S = 5.0


def end(process: children.Child, patience_s: float = 1.0) -> None:
    """Wait a little for a process to end by itself, then kill it."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(GRACE_S)


class ZygoteProcess:
    """The launcher's end of a zygote."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._sock, theirs = socket.socketpair()
        self.process = children.start(
            "swell.train.start.zygote",
            [str(theirs.fileno())],
            log,
            keep=[theirs.fileno()],
            env=same_hashes(os.environ),
        )
        theirs.close()
        self._buffer = b""
        self.alive = True
        self.spoke = False
        """True once the zygote has started a worker."""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def order(self, order: dict[str, Any]) -> None:
        """Ask the zygote to fork a worker."""
        with contextlib.suppress(OSError):  # the zygote is gone: its end will be noticed
            self._sock.sendall(json.dumps(order).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """The zygote's messages since the last call."""
        if not self.alive:
            return []
        try:
            data = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.alive = bool(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self.spoke = self.spoke or bool(lines)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the zygote; its workers live on."""
        self.alive = False
        self._sock.close()
        end(self.process)
