"""The nursery: a prepared process that forks the supervisors of jobs, so that jobs start in 0.6 s, not 3.7.

    python -m swell.engines.nursery [SOCKET]

It takes its orders from its standard input, one end of a pair of sockets; the engine that started it has the
other. So no job can reach it or put itself in its place: a job of the same account could otherwise have
processes forked outside its wall. It lives as long as that connection; supervisors outlive it.
An engine whose environment has SWELL_NURSERY, the path of a SOCKET, uses the nursery that listens there and
starts none, which is for tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from swell.engines.order import LOG, folder_of
from swell.engines.processes import MARK, MARK_BYTES, for_jobs
from swell.train.agent import children
from swell.train.agent.polling import readable
from swell.train.agent.regular import open_for_append
from swell.train.agent.run_config import same_hashes
from swell.train.start import zygote

_READY_S = 20.0
"""How long jobs wait for a nursery that is being prepared, before they start without it."""
_ANSWER_S = 3.0
_RENEW_S = 10.0
"""Least time between two starts of a nursery that dies again and again."""
_MOST_ORDER = 4 << 20
_READY = b"ready\n"
SHARED = "SWELL_NURSERY"


def open_log(path: Path) -> BinaryIO:
    """Open a log of the platform, for its own account only; tests give /dev/null."""
    return path.open("ab") if path == Path(os.devnull) else open_for_append(path)


class Nursery:
    """The engine's end."""

    def __init__(self, log: Path, *, path: Path | None = None) -> None:
        """`path`: where other engines of this account may use it too, which is for tests."""
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._ready = False
        self._log, self._path = log, path
        self._started_s = time.monotonic()
        shared = os.environ.get(SHARED)
        self._shared = None if shared is None else Path(shared)
        if self._shared is None:
            self._start()

    def _start(self) -> None:
        self._started_s, self._ready = time.monotonic(), False
        words = [sys.executable, "-m", "swell.engines.nursery"]
        self._line, its_end = socket.socketpair()
        with its_end, open_log(self._log) as out:
            self._process = subprocess.Popen(
                words if self._path is None else [*words, str(self._path)],
                stdin=its_end.fileno(),
                stdout=out,
                stderr=out,
                start_new_session=True,
                # In /proc every fork shows this environment, so it must hold no more than a job may see.
                env={**same_hashes(os.environ), **for_jobs(os.environ), MARK: "-" * MARK_BYTES},
                cwd="/",  # Python imports from its working directory, and jobs may write where this one is
            )

    def renew(self) -> None:
        """Start the nursery again if it has ended."""
        if self._process is None or self._process.poll() is None:
            return
        if time.monotonic() - self._started_s > _RENEW_S:
            self._hang_up()
            with contextlib.suppress(OSError):  # no memory, no processes: tried again
                self._start()

    @property
    def ready(self) -> bool:
        """Whether it forks at once."""
        if self._shared is not None:
            return self._shared.exists()
        if self._line is not None and not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._line.recv(len(_READY), socket.MSG_DONTWAIT) == _READY
        return self._ready

    @property
    def in_preparation(self) -> bool:
        """Whether it is worth waiting for."""
        dead = self._process is not None and self._process.poll() is not None
        late = time.monotonic() - self._started_s > _READY_S
        return not (dead or late or self.ready)

    def supervisor(self, directory: Path, env: Mapping[str, str]) -> children.Forked | None:
        """Fork the supervisor of the job in this directory; None if the nursery does not answer."""
        order = json.dumps({"directory": str(directory.resolve()), "env": dict(env)}).encode() + b"\n"
        try:
            if self._shared is not None:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(self._shared))
                    return children.Forked(_answer(sock, order))
            if self._line is None or not self.ready:
                return None
            return children.Forked(_answer(self._line, order))
        except TimeoutError:
            if self._process is not None:
                self._process.kill()  # it hangs, or was stopped: another one is started
            self._hang_up()
            return None
        except (OSError, ValueError):
            return None

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """End the nursery, if it is this engine's own."""
        self._hang_up()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


def _answer(line: socket.socket, order: bytes) -> int:
    """The process that the nursery forked for this order."""
    line.settimeout(_ANSWER_S)
    line.sendall(order)
    return int(line.recv(32))  # so few bytes arrive together


def serve(engine: socket.socket, listener: socket.socket | None = None) -> None:
    """Fork a supervisor for each order of the engine, until it hangs up; and of those that connect to
    `listener`."""
    engine.sendall(_READY)
    orders = engine.makefile("rb")
    while True:
        ready = readable([engine, *([] if listener is None else [listener])])
        if engine in ready and not _take_order(engine, orders):
            return
        if listener is not None and listener in ready:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_S)
                _take_order(connection, connection.makefile("rb"))


def _take_order(line: socket.socket, orders: BinaryIO) -> bool:
    """Carry out one order; False if there is none any more."""
    text = orders.readline(_MOST_ORDER)
    if not text:
        return False
    order = json.loads(text)
    line.sendall(f"{_fork(Path(order['directory']), order['env']).pid}\n".encode())
    return True


def _fork(directory: Path, env: dict[str, str]) -> children.Forked:
    log = folder_of(directory) / LOG
    return children.fork("swell.engines.supervisor", [str(directory)], log, env=env, shown=[MARK])


def main() -> None:
    """Prepare, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks the nursery for exit codes
    zygote.prepare()
    import swell.engines.supervisor
    import swell.train.agent.coordinator  # noqa: F401 - both are loaded here and not in each fork

    serve(socket.socket(fileno=0), zygote.listen(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
