"""The nursery: a prepared process that forks the supervisors of jobs, so that jobs start in 0.6 s, not 3.7.

    python -m swell.engines.nursery SOCKET [PROCESS]

It lives as long as its standard input is open: as long as the engine that started it. Supervisors outlive it.
It forks for its engine alone, known by its process id: a job of the same account that found the socket could
otherwise have processes forked outside its wall. (A secret would not do: a fork has the nursery's memory.)
An engine whose environment has SWELL_NURSERY, the path of such a socket, uses that nursery and starts none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from swell.engines import accounts
from swell.engines.environment import for_jobs
from swell.engines.processes import MARK, MARK_BYTES
from swell.train.agent import children
from swell.train.agent.polling import readable
from swell.train.agent.regular import open_for_append
from swell.train.start import zygote

_READY_S = 20.0
"""How long jobs wait for a nursery that is being prepared, before they start without it."""
_ANSWER_S = 3.0
_RENEW_S = 10.0
"""Least time between two starts of a nursery that dies again and again."""
_MOST_ORDER = 4 << 20
SHARED = "SWELL_NURSERY"


def open_log(path: Path) -> BinaryIO:
    """Open a log of the platform, for its own account only; tests give /dev/null."""
    return path.open("ab") if path == Path(os.devnull) else open_for_append(path)


class Nursery:
    """The engine's end."""

    def __init__(self, log: Path, *, for_all: bool = False) -> None:
        """`for_all`: other engines of this account may use it too, which is for tests."""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._log, self._for_all = log, for_all
        self._started_s = time.monotonic()
        shared = os.environ.get(SHARED)
        if shared:
            self.path = Path(shared)
            return
        self._folder = Path(tempfile.mkdtemp(prefix="swell-nursery-"))  # a home's path may be too long
        self.path = self._folder / "sock"
        self._start()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        self.path.unlink(missing_ok=True)
        words = [sys.executable, "-m", "swell.engines.nursery", str(self.path)]
        with open_log(self._log) as out:
            self._process = subprocess.Popen(
                words if self._for_all else [*words, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
                # In /proc every fork shows this environment, so it must hold no more than a job may see.
                env={**for_jobs(os.environ), MARK: "-" * MARK_BYTES},
            )

    def renew(self) -> None:
        """Start the nursery again if it has ended."""
        if self._process is None or self._process.poll() is None:
            return
        if time.monotonic() - self._started_s > _RENEW_S:
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(OSError):  # no memory, no processes: tried again
                self._start()

    @property
    def in_preparation(self) -> bool:
        """Whether it is worth waiting for."""
        dead = self._process is not None and self._process.poll() is not None
        late = time.monotonic() - self._started_s > _READY_S
        return not (dead or late or self.path.exists())

    def supervisor(
        self, directory: Path, env: Mapping[str, str], account: str | None = None
    ) -> children.Forked | None:
        """Fork the supervisor of the job in this directory; None if the nursery does not answer.

        `account`: the account that the job runs as, if it is not this process's.
        """
        order = {"directory": str(directory), "env": dict(env), "account": account}
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(_ANSWER_S)
                sock.connect(str(self.path))
                if self._process is not None and _peer(sock) != self._process.pid:
                    return None  # a job of this account put a socket of its own there
                sock.sendall(json.dumps(order).encode() + b"\n")
                return children.Forked(int(sock.makefile("rb").readline()))
        except TimeoutError:
            if self._process is not None:
                self._process.kill()  # it hangs, or was stopped: another one is started
            return None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """End the nursery, if it is this engine's own."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def serve(listener: socket.socket, engine: int | None = None) -> None:
    """Fork a supervisor for each connection of the process `engine`, until standard input ends."""
    while True:
        ready = readable([0, listener.fileno()])
        if 0 in ready and not os.read(0, 64):
            return
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if engine is not None and _peer(connection) != engine:
                    continue
                connection.settimeout(_ANSWER_S)
                order = json.loads(connection.makefile("rb").readline(_MOST_ORDER))
                forked = _fork(Path(order["directory"]), order["env"], order.get("account"))
                connection.sendall(f"{forked.pid}\n".encode())


def _peer(connection: socket.socket) -> int:
    """The id of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", raw)[0])


def _fork(directory: Path, env: dict[str, str], account: str | None) -> children.Forked:
    arguments, log = [str(directory)], directory / "supervisor.log"
    become = None if account is None else accounts.find(account).become
    return children.fork("swell.engines.supervisor", arguments, log, env=env, shown=[MARK], become=become)


def main() -> None:
    """Prepare, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks the nursery for exit codes
    zygote.prepare()
    import swell.engines.supervisor
    import swell.train.agent.coordinator  # noqa: F401 - both are loaded here and not in each fork

    serve(zygote.listen(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)


if __name__ == "__main__":
    main()
