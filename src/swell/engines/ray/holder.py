"""The actor that holds one worker: Ray accounts for its slot, places it, and notices its death.

The worker is a process of its own, forked from the node's prepared process or started from nothing. It ends
when its holder ends (a pipe closes), and the holder ends when the job's supervisor ends (a connection
closes), so no worker trains on without its supervisor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from swell.engines.processes import MARK, MARK_BYTES, descendants, for_jobs, memory_bytes, own_folder
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.polling import readable
from swell.train.agent.regular import read_regular, remove_tree
from swell.train.agent.run_config import BEGUN, same_hashes
from swell.train.agent.wire import Connection, WireError

# Warm spares: on every node one prepared process that forks workers of any job in milliseconds.
#
# A Ray actor that takes no resources keeps the process. The actor outlives a restart of the control plane,
# and ends by itself when no control plane has asked for it for a while. Holders on the node find the
# process under a path that both sides compute, in a directory that only this user can enter.


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


MEMORY_EVERY_S = 1.0
BEGUN_S = 10.0
"""How long the call that starts a worker may be on its way."""
_LOST = -int(signal.SIGKILL)
_PREFIX = f"swell-worker-{os.getuid()}-"


class Running(Protocol):
    """A worker's process."""

    pid: int

    def wait(self) -> int:
        """Its exit code, once it has ended."""


class ColdWorker:
    """A worker that was started as a new process."""

    def __init__(self, order: dict[str, Any]) -> None:
        with Path(order["log"]).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", order["module"], order["script"], *order["arguments"]],
                cwd=order["cwd"],
                env={**for_jobs(os.environ), **order["env"], **order["visible"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self.pid = self._process.pid

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()


class WarmWorker:
    """A worker forked from the node's prepared process; raises OSError if there is none."""

    def __init__(self, order: dict[str, Any], path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(5.0)
        self._sock.connect(str(path))
        self._sock.sendall(json.dumps(order).encode() + b"\n")
        self._lines = self._sock.makefile("rb")
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the prepared process has ended")
        self.pid = int(json.loads(line)["pid"])
        self._descriptor = os.pidfd_open(self.pid)
        self._exit = Path(order["env"]["SWELL_EXIT_FILE"])
        self._sock.settimeout(None)

    def wait(self) -> int:
        """Its exit code, once it has ended; from the worker's exit file if the prepared process has ended."""
        with contextlib.suppress(OSError):
            if line := self._lines.readline():
                return int(json.loads(line)["code"])
        readable([self._descriptor])
        try:
            return int(self._exit.read_text())
        except (OSError, ValueError):
            return _LOST


class WorkerHolder:
    """Holds one worker. `run` lasts as long as the worker does."""

    def __init__(self, lifeline: tuple[str, int, str]) -> None:
        self._worker: Running | None = None
        self._answer: dict[str, Any] | None = None
        self._began, self._ended = threading.Event(), threading.Event()
        self._doomed = False
        self._verdict = ""
        host, port, token = lifeline
        self._line = Connection.open((host, port), token, timeout_s=10.0)
        # A supervisor that ends closes the connection at once. One that is cut off may come back for longer
        # than its coordinator waits for its workers (`away_s`): only after that nobody needs this one.
        keep_alive(self._line.sock, every_s=15, probes=5)
        threading.Thread(target=self._watch_supervisor, name="swell-lifeline", daemon=True).start()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the worker that `order` describes to its end; returns how it ended."""
        self._began.set()
        self._answer = self._run(order)
        self._ended.set()
        return self._answer

    def ended(self) -> dict[str, Any]:
        """What `run` returned or will return, for a caller whose call of it was cut off."""
        if not self._began.wait(BEGUN_S):
            return {"code": _LOST, "verdict": "", "warm": False}  # the call never came here
        self._ended.wait()
        assert self._answer is not None
        return self._answer

    def _run(self, order: dict[str, Any]) -> dict[str, Any]:
        if not sees(order):
            need = "swell's home (swell up --home) must be on storage that all nodes share"
            reason = f"it cannot read {order['env']['SWELL_JOB_DIR']}; {need}"
            return {"cause": "home", "reason": reason}
        try:
            return self._run_here(order)
        except (OSError, RuntimeError) as error:
            if self._worker is not None:
                raise
            return {"cause": "process", "reason": str(error)}

    def _run_here(self, order: dict[str, Any]) -> dict[str, Any]:
        _prune()
        home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        lifeline = home / "lifeline"
        os.mkfifo(lifeline, 0o600)
        held = os.open(lifeline, os.O_RDWR)  # not inherited by children: it closes when this process ends
        try:
            order = _complete(order, lifeline, assigned_gpu() if order.get("shares_gpu") else None)
            self._worker = worker = self._start(order)
            if self._doomed:
                self.end()
            if order["memory_bytes"] is not None:
                threading.Thread(
                    target=self._watch_memory, args=(order["memory_bytes"],), daemon=True
                ).start()
            code = worker.wait()
            with contextlib.suppress(OSError):  # loader processes of a killed worker
                os.killpg(worker.pid, signal.SIGKILL)
            if code > 0 and not self._doomed and not Path(order["env"][BEGUN]).exists():
                return {"cause": "process", "reason": _last_line(order["log"])}
            return {"code": code, "verdict": self._verdict, "warm": isinstance(worker, WarmWorker)}
        finally:
            os.close(held)
            with contextlib.suppress(OSError):
                remove_tree(home)

    def end(self) -> None:
        self._doomed = True
        if self._worker is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._worker.pid, signal.SIGKILL)

    def _start(self, order: dict[str, Any]) -> Running:
        if order["warm"] is not None:
            import ray

            node_id = ray.get_runtime_context().get_node_id()
            with contextlib.suppress(OSError, ValueError):
                return WarmWorker(order, socket_path(order["warm"], node_id))
        return ColdWorker(order)

    def _watch_supervisor(self) -> None:
        with contextlib.suppress(OSError, WireError):
            self._line.receive()  # nothing is ever said: this ends when the supervisor does
        self.end()
        os._exit(1)

    def _watch_memory(self, limit: int) -> None:
        assert self._worker is not None
        while not self._verdict:
            time.sleep(MEMORY_EVERY_S)
            pids = [self._worker.pid, *descendants(self._worker.pid)]
            largest = max(memory_bytes(pid) for pid in pids)
            if largest > limit:
                self._verdict = (
                    f"a worker used {largest / 2**20:.0f} MiB of memory; the job's limit is "
                    f"{limit / 2**20:.0f} MiB for each worker"
                )
                self.end()


def _prune() -> None:
    """Remove the temporary files of holders that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # anybody may have put anything there under such a name
                remove_tree(path)


def _last_line(log: str) -> str:
    """The end of what a worker printed, in a line."""
    try:
        lines = read_regular(Path(log)).decode(errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1][:300] if lines else "the worker's process ended without a word"


def sees(order: dict[str, Any]) -> bool:
    """Whether this node sees the same job directory that the supervisor writes to."""
    try:
        content = json.loads((Path(order["env"]["SWELL_JOB_DIR"]) / "job.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(content.get("launch") == order["env"]["SWELL_LAUNCH"])


def assigned_gpu() -> str:
    """The GPU that Ray gave this actor a part of: Ray chooses it, whatever the number of the slot is."""
    import ray

    found = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    if len(found) != 1:
        raise RuntimeError(f"Ray gave a worker that needs a part of one GPU these GPUs: {found}")
    return found[0]


def _complete(order: dict[str, Any], lifeline: Path, gpu: str | None) -> dict[str, Any]:
    """The order completed with what only this node knows: directories and devices.

    `gpu`: the GPU that the worker has a part of; None if it has whole ones, or none.
    """
    cwd = str(Path.cwd())
    env = {
        **order["env"],
        "SWELL_LIFELINE": str(lifeline),
        "SWELL_EXIT_FILE": str(lifeline.with_name("exit")),
        BEGUN: str(lifeline.with_name("begun")),
    }
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    return {**order, "cwd": cwd, "env": env, "script": str(Path(cwd, order["script"]))}
