"""A PostgreSQL server of one's own, in a temporary folder, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

BIN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class NoPostgres(Exception):
    """There is no PostgreSQL here, or it does not start; the message says why."""


class PostgresServer:
    """Runs inside `with`. Reached over a socket in its folder, with `tcp` over the loopback too."""

    def __init__(self, *, tcp: bool = False) -> None:
        if not BIN or shutil.which("setpriv") is None:
            raise NoPostgres("no PostgreSQL server here: apt-get install postgresql")
        # Not below pytest's own folder, which only its owner may enter: the server refuses to run as root.
        self.home = Path(tempfile.mkdtemp(prefix="swell-pg-"))
        self.port = _free_port() if tcp else 5432
        self._listen = "127.0.0.1" if tcp else ""
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            self._as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            os.chown(self.home, 65534, 65534)
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For connections over the socket in its folder."""
        return f"postgresql:///postgres?host={self.home}&port={self.port}&user=swell"

    def __enter__(self) -> PostgresServer:
        make = [str(BIN[-1] / "initdb"), "-D", str(self.home / "db"), "-U", "swell", "-A", "trust", "-N"]
        done = subprocess.run([*self._as_user, *make], capture_output=True, text=True, timeout=300, cwd="/")
        if done.returncode:
            shutil.rmtree(self.home, ignore_errors=True)
            raise NoPostgres(f"initdb failed here: {done.stderr[-300:]}")
        words = ["-D", str(self.home / "db"), "-k", str(self.home), "-h", self._listen, "-p", str(self.port)]
        with (self.home / "server.log").open("wb") as log:
            run = [*self._as_user, str(BIN[-1] / "postgres"), *words, "-F"]
            self._server = subprocess.Popen(run, stdout=log, stderr=log, cwd="/")
        ready = [str(BIN[-1] / "pg_isready"), "-h", str(self.home), "-p", str(self.port), "-U", "swell"]
        give_up_s = time.monotonic() + 120.0
        while subprocess.run(ready, capture_output=True).returncode:
            if time.monotonic() > give_up_s or self._server.poll() is not None:
                raise NoPostgres((self.home / "server.log").read_text()[-300:])
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.send_signal(2)  # SIGINT: do not wait for connections
        self._server.wait(timeout=60)
        shutil.rmtree(self.home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
