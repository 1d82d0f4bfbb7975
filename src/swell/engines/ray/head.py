"""swell's own Ray, for people who have none: a head on the loopback that outlives the control plane.

The head is one process (`ray start --head --block`) in a session of its own, which ends the processes it
started. While it lives it holds a lock file in the home with its process id, and only that process is ever
signalled.
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
from swell.engines.processes import lock_holder, write_json
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
    "worker_niceness": 0,
}
"""For a Ray of swell's own, on one machine. With these health checks it notices a lost node in seconds; by
default it takes up to a minute. Ray starts no processes in advance, because holders need processes with the
job's own files and could not use them. And training is what the machine is for: by default Ray runs workers
with the priority of background work."""
CLUSTER_SETTINGS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 20,
    "gcs_rpc_server_reconnect_timeout_s": 120,
}
"""For a head with nodes on other hosts (docs/guides/ray.md, deploy/): a check that is not answered takes
period plus timeout, so a silent node is given up after two minutes, and then ends itself. That is what it
takes to live through a cut of one minute: TCP tries again at growing intervals, so Ray's connections may
stand still for as long again after the cut as it lasted. Nobody waits for a silent node meanwhile: a
job goes on without a worker that is silent for five seconds."""


def environment(home: Path) -> dict[str, str]:
    """Environment variables for a process that connects to swell's own Ray."""
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / TOKEN)}
    return {LOOPBACK: "0", "RAY_USE_TLS": "0", **access}  # nothing that it sends leaves the machine


def running(home: Path) -> int | None:
    """The process id of the head; None if there is no head."""
    return lock_holder(home / LOCK)


def address(home: Path) -> str:
    """The address of the head, as it wrote it when it started."""
    return str(json.loads((home / FILE).read_text())["address"])


def begin(home: Path, *, slots: bool = True) -> None:
    """Start a head unless one runs, with or without slots; it takes some seconds until the head answers."""
    if running(home) is not None:
        return
    _make_token(home)
    with (home / LOG).open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "swell.engines.ray.head", str(home), *([] if slots else ["no-slots"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def ensure(home: Path, *, slots: bool = True) -> str:
    """Start a head unless one runs, and wait until it answers; returns its address."""
    begin(home, slots=slots)
    give_up_s = time.monotonic() + STARTED_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = address(home)
            host, _, port = found.rpartition(":")
            if running(home) is not None and answers(host, int(port), 0.5):
                _check_slots(home, slots)
                return found
        time.sleep(0.1)
    raise SwellError(f"Ray did not come up within {STARTED_S:g} s; see {home / LOG}")


def _check_slots(home: Path, slots: bool) -> None:
    """Refuse a head that was started for other ends."""
    if bool(json.loads((home / FILE).read_text()).get("slots", True)) != slots:
        has = "no slots of its own" if slots else "slots of its own, which cannot be rented"
        raise SwellError(
            f"the Ray that swell had started for {home} has {has}: 'swell down' ends it, then start again"
        )


def stop(home: Path) -> bool:
    """End the head and the processes it started; False if there was no head."""
    pid = running(home)
    if pid is None:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The descriptor belongs to the process that has the id now. If the lock is still held, that is the
        # head.
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
    """Remove the temporary files of a head that has ended."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        scratch = Path(json.loads((home / FILE).read_text())["scratch"])
        give_up_s = time.monotonic() + CLEAN_S
        while scratch.exists() and time.monotonic() < give_up_s:
            shutil.rmtree(scratch, ignore_errors=True)  # the last processes of Ray may still write
            time.sleep(0.1)


def _make_token(home: Path) -> None:
    """Write a token that only the owner of the home can read, because Ray runs any code it is given."""
    path = home / TOKEN
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Take the lock and become the head."""
    home, slots = Path(sys.argv[1]), "no-slots" not in sys.argv[2:]
    descriptor = os.open(home / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another process is the head
    os.set_inheritable(descriptor, True)  # the lock survives the exec below; Ray's children close it
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    _clean_up(home)
    port = free_port()
    # The path of a socket must be short, so the directory is not under the home.
    scratch = tempfile.mkdtemp(prefix="swell-ray-")
    own = {"address": f"127.0.0.1:{port}", "pid": os.getpid(), "scratch": scratch, "slots": slots}
    write_json(home / FILE, own)
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
        *([] if slots else ["--num-cpus=0", "--num-gpus=0"]),
    ]
    # All jobs have stopped before the head is told to end, so it need not drain, which takes half a minute.
    env = {**os.environ, **environment(home), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    os.execve(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *words], env)


if __name__ == "__main__":
    main()
