"""The supervisor of one job: a process that holds the job's lock, runs its launcher, and keeps its exit code.

    python -m swell.engines.supervisor JOB_DIRECTORY

The supervisor has a session of its own, so it and the job outlive the control plane. The lock makes sure that
a job never runs twice at once: a second supervisor finds the lock taken and ends. A supervisor that follows
one that was killed first kills all processes which that one left.

    start.json    what to run, written by the engine, see `swell.engines.order`
    lock          held while a supervisor lives; its content is the supervisor's process id and machine
    exit.json     how the job ended; absent if it was killed from outside
    runs/0000     a run of the job, see `swell.train.agent.jobdir`; the next run after a stop is 0001
    checkpoints   shared by all runs
    output.log    what the workers printed, in all runs
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from swell.domain import gpu_of_slot
from swell.engines import groups, wall
from swell.engines.fencing import order_outdated
from swell.engines.files import write_json
from swell.engines.order import Order
from swell.engines.processes import descendants, end_descendants, memory_bytes, sweep
from swell.train.agent.launcher import Launcher
from swell.train.agent.outputs import FILE, OutputFile
from swell.train.agent.regular import open_regular, read_regular
from swell.train.agent.run_config import RunConfig
from swell.train.agent.slots import PER_GPU
from swell.train.agent.worker_processes import LocalWorkers

T = TypeVar("T")

STOPPED = "stopped"
"""Reason of a job that was asked to stop and saved its state."""
OUT_OF_MEMORY = 137
"""Exit code of a job that was ended because a worker used too much memory."""
MEMORY_EVERY_S = 1.0
_LOCK_S = 3.0
"""How long to try for the lock. `is_locked` holds it for microseconds; only a supervisor holds it longer."""
_ROOM_S = 600.0
"""How long to wait for room on a full disk."""
_SWEEP_S = 20.0
"""Longest wait for the end of processes that were killed."""
_MOST_REPORT = 64 << 10
"""Most characters of a last report; a longer one is not kept, so that exit.json can always be read."""
_GROUP_S = 10.0
"""How long to wait for the engine to put this process into the job's control group."""


def is_locked(directory: Path) -> bool:
    """Whether a supervisor of the job is alive."""
    try:
        with open_regular(directory / "lock") as lock:
            # A shared lock, so that two processes that look at the same time do not see a supervisor.
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False  # absent, or not a lock any more


def signal_supervisor(directory: Path, number: signal.Signals) -> bool:
    """Send a signal to the job's supervisor, never to another process with the same id; True if sent."""
    try:
        pid, *host = read_regular(directory / "lock", 512).decode().split()
        if host and host[0] != socket.gethostname():
            return False  # the directory is shared, and the supervisor runs on another machine
        descriptor = os.pidfd_open(int(pid))
    except (OSError, ValueError):
        return False
    try:
        # The descriptor belongs to the process that has the id now. If the lock is still held, that is the
        # supervisor.
        if not is_locked(directory):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def supervise(directory: Path) -> int:
    """Run the job that `directory` describes to its end; returns its exit code."""
    if not _in_group():
        return 1  # the engine was killed as it started this process; the next one will try again
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as lock:
        if not _take(lock):
            return 0  # the job runs already
        if not sweep(directory, _SWEEP_S):
            return 1  # processes of an earlier supervisor cannot be killed; the engine will try again
        try:
            order = Order.read(directory)
        except FileNotFoundError:
            return 0  # the job was ended before it began
        if order_outdated(order.extras):
            return 0  # another control plane leads by now, and may have decided otherwise
        _enter_wall(directory, order)
        (directory / "exit.json").unlink(missing_ok=True)
        run_dir = directory / "runs" / f"{len(list((directory / 'runs').glob('*'))):04d}"
        output = OutputFile(directory / FILE)
        code, reason, last_report = _run(order, run_dir, output.say)
        output.close()
        end_descendants(_SWEEP_S)
        sweep(directory, _SWEEP_S)
        if reason is not None:
            content = {"code": code, "reason": reason, "time_s": time.time()}
            if len(json.dumps(last_report)) <= _MOST_REPORT:
                content["report"] = last_report
            _with_room(lambda: write_json(directory / "exit.json", content))  # else the job would run again
        return code


def _in_group() -> bool:
    """Wait until this process is in the job's control group, if the engine said that it has one."""
    beginning, until_s = os.environ.pop(groups.VARIABLE, ""), time.monotonic() + _GROUP_S
    while beginning and not groups.is_entered(beginning):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.002)
    return True


def _enter_wall(directory: Path, order: Order) -> None:
    """Hide the platform and the other jobs from this one, if the engine asked for that.

    If it cannot be done the OSError ends this process, and the job is tried again: it never runs in the open.
    """
    text = os.environ.pop(wall.VARIABLE, "")
    if not text:
        return
    told = json.loads(text)
    home, workdir = Path(told["home"]), order.launch.workdir
    visible = wall.shown(home, directory, [workdir, workdir / order.launch.request.script])
    wall.enter(home, visible, map(Path, told["read_only"]))


def _with_room(action: Callable[[], T]) -> T:
    """Do something that writes. While the disk is full, wait for room: that is not the job's fault."""
    until_s = time.monotonic() + _ROOM_S
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > until_s:
                raise
            time.sleep(1.0)


def _take(lock: IO[bytes]) -> bool:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    lock.truncate(0)
    lock.write(f"{os.getpid()} {socket.gethostname()}".encode())
    lock.flush()
    return True


def _run(order: Order, run_dir: Path, say: Callable[[str], None]) -> tuple[int, str | None, dict[str, Any]]:
    """Run the job; its exit code, the reason of its end and its last report.

    There is no reason if it was ended from outside.
    """
    launch, request = order.launch, order.launch.request
    size = request.workers_per_replica
    try:
        os.chdir(launch.workdir)
        config = RunConfig(
            script=request.script,
            arguments=list(request.args),
            minimum=size,
            maximum=max(launch.max_workers - launch.max_workers % size, size),
            workers=len(order.slots),
            slots=list(order.slots),
            cold="ray" in order.extras,
            name=launch.job_id,
            directory=run_dir,
            threads=1,
            env=request.env,
            settings=request.for_runtime() | {"checkpoints": str(launch.job_dir / "checkpoints")},
        )
        launcher = _with_room(lambda: _launcher(order, config, say))
    except (ValueError, OSError) as error:
        say(str(error))
        # It is not the job's fault if Ray cannot be reached: without a reason the job is started again.
        return 2, None if isinstance(error, ConnectionError) else str(error), {}
    watch = _MemoryWatch(request.memory_bytes)
    code = launcher.run(watch.look)
    if watch.verdict:
        say(watch.verdict)
        return OUT_OF_MEMORY, watch.verdict, launcher.last_report
    reason = launcher.reason
    if reason.startswith("stopped by SIG"):
        return code, None, launcher.last_report
    return code, (_last_error(run_dir) if code > 0 else "") or reason, launcher.last_report


def _launcher(order: Order, config: RunConfig, say: Callable[[str], None]) -> Launcher:
    """The launcher, for the place where the job's workers live."""
    if "ray" in order.extras:
        from swell.engines.ray.workers import RayWorkers

        return Launcher(config, say, RayWorkers(config, order))
    return Launcher(config, say, LocalWorkers(lambda slot: _gpu_env(slot, order.extras)))


def _gpu_env(slot: int, extras: Mapping[str, Any]) -> dict[str, str]:
    """What makes a worker see only the GPU of its slot, if there are any."""
    if not extras.get("gpus", 0):
        return {}
    gpu = str(gpu_of_slot(slot, extras["gpus"]))
    return {"CUDA_VISIBLE_DEVICES": gpu, PER_GPU: str(extras.get("per_gpu", 1))}


class _MemoryWatch:
    """Ends the job once one of its processes uses too much memory; works without a control plane."""

    def __init__(self, limit: int | None) -> None:
        self.verdict = ""
        self._limit = limit
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look once a second; called in every turn of the launcher."""
        now_s = time.monotonic()
        if self._limit is None or self.verdict or now_s - self._looked_s < MEMORY_EVERY_S:
            return
        self._looked_s = now_s
        largest = max((memory_bytes(pid) for pid in descendants(os.getpid())), default=0)
        if largest > self._limit:
            self.verdict = (
                f"a worker used {largest / 2**20:.0f} MiB of memory; the job's limit is "
                f"{self._limit / 2**20:.0f} MiB for each worker"
            )
            os.kill(os.getpid(), signal.SIGTERM)


def _last_error(run_dir: Path) -> str:
    """The last line of the traceback of the worker that failed first."""
    errors = sorted((run_dir / "logs").glob("*.error"), key=lambda path: path.stat().st_mtime)
    for path in errors:  # files of the job's own, so they may be anything
        lines = read_regular(path).decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][:300]
    return ""


def main() -> int:
    """Supervise the job whose directory is given."""
    return supervise(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
