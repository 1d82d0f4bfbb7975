"""One Ray node on this machine, in a process of its own: what `ray start` does, without ports that collide.

  python -m swell.engines.ray.raylet '{"home": ..., "name": ..., "address": ..., "resource": ..., "slots": 2}'

A platform starts and ends such nodes when it rents them from the `local` provider. While a node lives, its
process holds a lock file in the home with its process id, and only that process is ever signalled; a file
beside it says when the node is up. The node outlives the control plane; it ends on SIGTERM, or with its
raylet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swell.engines.processes import lock_holder, write_json

FOLDER = "rented"
LOCK_S = 2.0
"""How long to try for the lock: a process that only looks whether it is held holds it for a moment."""
STOPPED_S = 15.0
GRACE_S = 2.0
"""How long a raylet may take to sign off. Ray lists one that is killed until it misses its heartbeats."""
MEMORY_BYTES = 80_000_000
"""Memory for Ray's object store, which swell does not use; Ray wants at least 75 MiB."""


def running(home: Path) -> dict[str, int]:
    """The nodes of a home that live, with the ids of their processes."""
    found = {path.stem: lock_holder(path) for path in sorted((home / FOLDER).glob("*.lock"))}
    return {name: pid for name, pid in found.items() if pid is not None}


def address_of(home: Path, name: str, pid: int) -> str | None:
    """The address of the Ray that a node has joined; None while it is not up."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = json.loads((home / FOLDER / f"{name}.json").read_text())
        if said["pid"] == pid:
            return str(said["address"])
    return None


def ask_to_stop(home: Path, name: str, number: signal.Signals = signal.SIGTERM) -> bool:
    """Have a node end; False if there is none of that name."""
    path = home / FOLDER / f"{name}.lock"
    pid = lock_holder(path)
    if pid is None:
        return False
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor belongs to the process that has the id now: the node, if the lock is still held.
            if lock_holder(path) == pid:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    return True


def stop_all(home: Path) -> bool:
    """End all nodes of a home, and wait for that; False if there were none."""
    names = list(running(home))
    for name in names:
        ask_to_stop(home, name)
    give_up_s = time.monotonic() + STOPPED_S
    while left := running(home):
        if time.monotonic() > give_up_s:
            for name in left:
                ask_to_stop(home, name, signal.SIGKILL)  # its reaper ends what it started
        time.sleep(0.05)
    return bool(names)


def run(up: Callable[[dict[str, Any]], None], sockets: str, *, is_head: bool = False, **params: Any) -> None:
    """Be a Ray node until SIGTERM, or until the raylet has ended. `up` is called once the node is up.

    `sockets`: a directory with a short path. `params` are those of Ray.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    own = f"{params['node_name']}-{os.getpid()}"
    environments = f"runtime_resources/{own}"
    all_params: dict[str, Any] = {
        "object_store_memory": MEMORY_BYTES,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "include_dashboard": False,
        "include_log_monitor": False,
        # Names of their own: nodes that start at the same time would pick the same otherwise.
        "raylet_socket_name": f"{sockets}/raylet-{own}",
        "plasma_store_socket_name": f"{sockets}/plasma-{own}",
        # Nodes of one machine share the session's directory. In a common folder for runtime environments each
        # would put a job's working directory in place of the one that the workers of another node run in.
        "runtime_env_dir_name": environments,
    }
    given = RayParams(**all_params | ({} if is_head else {"node_manager_port": 0}) | params)
    given.dashboard_agent_listen_port = None
    node: Any = Node(given, head=is_head, shutdown_at_exit=True, spawn_reaper=True)

    raylet = node.all_processes["raylet"][0].process

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raylet.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            raylet.wait(GRACE_S)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        shutil.rmtree(Path(node.get_session_dir_path(), environments), ignore_errors=True)
        if params.get("temp_dir") is None:
            shutil.rmtree(sockets, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    up({"address": node.gcs_address, "raylet": raylet.pid, "client": given.ray_client_server_port})
    while raylet.poll() is None:
        time.sleep(0.5)
    leave()


def _lock(path: Path) -> bool:
    """Take the lock of a node until this process ends; False if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    give_up_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return True


def main() -> None:
    """Take the lock and be a node."""
    asked = json.loads(sys.argv[1])
    folder, name, slots = Path(asked["home"], FOLDER), str(asked["name"]), int(asked["slots"])
    if not _lock(folder / f"{name}.lock"):
        return
    resource = str(asked["resource"])

    def up(said: dict[str, Any]) -> None:
        write_json(folder / f"{name}.json", {"pid": os.getpid(), "address": asked["address"]} | said)

    run(
        up,
        tempfile.mkdtemp(prefix="swell-rn-"),
        node_name=name,
        num_cpus=slots if resource == "CPU" else 0,
        num_gpus=slots if resource == "GPU" else 0,
        resources=None if resource in ("CPU", "GPU") else {resource: slots},
        gcs_address=asked["address"],
    )


if __name__ == "__main__":
    main()
