"""A Ray of our own, for who has none: a head on the loopback that outlives the control plane.

It is one process (`ray start --head --block`) in a session of its own, which ends what it started. It
holds a lock under the home while it lives; that lock says which process it is, and only that process is
ever signalled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from swell.domain import SwellError
from swell.engines.files import write_json
from swell.engines.processes import lock_holder
from swell.engines.ray.connection import LOOPBACK, answers

LOCK = "ray.lock"
FILE = "ray.json"
TOKEN = "ray.token"
LOG = "ray.log"
STARTED_S = 45.0
STOPPED_S = 20.0
CLEAN_S = 5.0
SETTINGS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""A lost node is acted on in seconds; by default Ray takes up to a minute. And nothing is started in advance
for every job: holders need processes with the job's own files, so others would only be in their way."""


def environment(home: Path) -> dict[str, str]:
    """What a process needs to speak to our own Ray."""
    return {LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / TOKEN)}


def running(home: Path) -> int | None:
    """The process that is our head; None if there is none."""
    return lock_holder(home / LOCK)


def address(home: Path) -> str:
    """Where our head is, or will be."""
    return str(json.loads((home / FILE).read_text())["address"])


def begin(home: Path) -> None:
    """Start a head, unless one is there; it takes some seconds to be of use."""
    if running(home) is not None:
        return
    _make_token(home)
    with (home / LOG).open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "swell.engines.ray.head", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def ensure(home: Path) -> str:
    """Have a head that can be spoken to; its address."""
    begin(home)
    give_up_s = time.monotonic() + STARTED_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = address(home)
            host, _, port = found.rpartition(":")
            if running(home) is not None and answers(host, int(port), 0.5):
                return found
        time.sleep(0.1)
    raise SwellError(f"Ray did not come up within {STARTED_S:g} s; {home / LOG} may say why")


def stop(home: Path) -> bool:
    """End our head and what it started; False if there was none."""
    pid = running(home)
    if pid is None:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The descriptor is of whoever has the id now; with the lock still held that is our head.
        if running(home) != pid:
            return False
        give_up_s = time.monotonic() + STOPPED_S
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        while running(home) == pid:
            if time.monotonic() > give_up_s:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # its reaper ends what it started
            time.sleep(0.05)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
    _clean_up(home)
    return True


def _clean_up(home: Path) -> None:
    """Remove what a head that is no more left in the temporary directory."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        scratch = Path(json.loads((home / FILE).read_text())["scratch"])
        give_up_s = time.monotonic() + CLEAN_S
        while scratch.exists() and time.monotonic() < give_up_s:
            shutil.rmtree(scratch, ignore_errors=True)  # who ends last may still write
            time.sleep(0.1)


def _make_token(home: Path) -> None:
    """Only who can read the home may use our Ray: it runs any code it is given."""
    path = home / TOKEN
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Take the lock and become the head."""
    home = Path(sys.argv[1])
    descriptor = os.open(home / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # somebody else is it
    os.set_inheritable(descriptor, True)  # kept across what follows, and by nobody whom that starts
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    _clean_up(home)
    port = free_port()
    # Sockets' paths are short, so the directory is not under the home.
    scratch = tempfile.mkdtemp(prefix="swell-ray-")
    write_json(home / FILE, {"address": f"127.0.0.1:{port}", "pid": os.getpid(), "scratch": scratch})
    words = [
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--temp-dir={scratch}",
        f"--system-config={json.dumps(SETTINGS)}",
    ]
    # When it is told to end, all jobs have left: there is nothing to drain, which would take half a minute.
    env = {**os.environ, **environment(home), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    os.execve(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *words], env)


if __name__ == "__main__":
    main()
