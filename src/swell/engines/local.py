"""The local engine: real worker processes on this machine's GPUs, or on CPU slots where there are none.

Each job is a detached process tree (see `supervisor`) that needs nobody. The engine is a thread that starts
such trees, speaks to their coordinators over the wire protocol, and listens to their reports. All it must
know after a restart is in the jobs' directories: a job whose lock is held is alive, one with an exit.json is
over, one with neither has lost all its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swell.domain import Cluster, InputError, Placement
from swell.engines.base import Launch, Observed, Report, RunState
from swell.engines.processes import descendants, memory_bytes
from swell.engines.supervisor import STOPPED, is_locked, write_json
from swell.train.errors import TrainError
from swell.train.jobdir import JobDirectory
from swell.train.wire import Connection

TICK_S = 0.2
STOP_GRACE_S = 60.0
"""A job that was asked to save its state and leave is ended after this long."""
END_GRACE_S = 8.0
MEMORY_EVERY_S = 1.0


def detect_gpus() -> int:
    """GPUs of this machine, as the driver lists them; 0 without one."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


@dataclass(slots=True)
class _Job:
    """What the engine keeps of one job."""

    directory: Path
    launch: Launch | None = None
    wanted: Placement = ()
    """What `apply` last asked for."""
    applied: Placement = ()
    """What the running processes were last told."""
    connection: Connection | None = None
    state: RunState = RunState.STARTING
    alive: bool = False
    stop_by_s: float | None = None
    """Asked to stop; ended by force at this moment."""
    ending: bool = False
    ended: bool = False
    exit_code: int | None = None
    reason: str = ""
    last_memory_s: float = 0.0
    started_s: float = 0.0
    reports: dict[str, Any] = field(default_factory=dict)


class LocalEngine:
    """Workers as processes of this machine."""

    name = "local"

    def __init__(self, home: Path, nodes: str | None = None, slots: int | None = None) -> None:
        """`nodes` such as '2x4' for virtual nodes; else one node of `slots`, the GPUs, or the cores."""
        if nodes is not None and slots is not None:
            raise InputError("give either nodes or slots, not both", field="nodes")
        if slots is not None and slots < 1:
            raise InputError(f"slots must be at least 1, got {slots}", field="slots")
        count = slots or detect_gpus() or os.cpu_count() or 1
        self._cluster = Cluster.parse(nodes or f"1x{count}", "cpu" if not detect_gpus() else "gpu")
        self._home = home
        self._jobs: dict[str, _Job] = {}
        self._reports: deque[Report] = deque(maxlen=100_000)
        self._lock = threading.RLock()
        self._wake: Callable[[], None] = lambda: None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._poke_r, self._poke_w = os.pipe()
        os.set_blocking(self._poke_w, False)
        os.set_blocking(self._poke_r, False)
        self._children: list[subprocess.Popen[bytes]] = []

    # -- the interface -----------------------------------------------------------------------------------

    def start(self, wake: Callable[[], None]) -> None:
        """Find the jobs that live, and begin to listen."""
        self._wake = wake
        for start in sorted((self._home / "jobs").glob("*/start.json")):
            self._adopt(start.parent)
        self._thread = threading.Thread(target=self._loop, name="swell-local-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Jobs go on."""
        self._stopping = True
        self._poke()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        for job in self._jobs.values():
            self._disconnect(job)

    def cluster(self) -> Cluster:
        """The nodes, which never change here."""
        return self._cluster

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots; carried out by the engine's thread."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is None or job.ended:
                job = self._jobs[launch.job_id] = _Job(launch.job_dir)
            job.launch, job.wanted = launch, placement
        self._poke()

    def end(self, job_id: str) -> None:
        """End a job and all its processes."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                job.ending, job.wanted = True, ()
        self._poke()

    def observe(self) -> dict[str, Observed]:
        """Jobs that live, and those that came to an end."""
        with self._lock:
            return {
                job_id: Observed(
                    job_id=job_id,
                    state=job.state,
                    placement=job.applied if job.alive else (),
                    exit_code=job.exit_code,
                    reason=job.reason,
                )
                for job_id, job in self._jobs.items()
                if not job.ending and (job.alive or job.exit_code is not None)
            }

    def reports(self) -> Iterator[Report]:
        """What jobs said since the last call."""
        while self._reports:
            yield self._reports.popleft()

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's output from an offset."""
        try:
            with (job_dir / "output.log").open("rb") as file:
                file.seek(offset)
                data = file.read(limit)
        except FileNotFoundError:
            return b"", offset
        return data, offset + len(data)

    # -- the thread --------------------------------------------------------------------------------------

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._poke_w, b"!")

    def _loop(self) -> None:
        while not self._stopping:
            with self._lock:
                listening = {j.connection: n for n, j in self._jobs.items() if j.connection is not None}
            watched: list[Any] = [self._poke_r, *listening]
            readable, _, _ = select.select(watched, [], [], TICK_S)
            if self._poke_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._poke_r, 4096)
            for connection in readable:
                if isinstance(connection, Connection):
                    self._hear(listening[connection])
            for child in [c for c in self._children if c.poll() is not None]:
                self._children.remove(child)
            for job_id in list(self._jobs):
                self._tend(job_id)

    def _tend(self, job_id: str) -> None:
        """Bring one job nearer to what is wanted of it."""
        job, now_s = self._jobs[job_id], time.time()
        alive = is_locked(job.directory)
        if job.alive and not alive:
            self._gone(job_id, job)
        elif alive and not job.alive:
            job.alive, job.exit_code = True, None
            self._wake()
        if job.ending:
            self._end(job_id, job, now_s)
        elif not alive:
            if job.wanted and now_s - job.started_s > 1.0:
                self._spawn(job, now_s)
        else:
            if job.connection is None:
                self._connect(job)
            if job.connection is not None and job.wanted != job.applied:
                self._tell(job, now_s)
            if job.stop_by_s is not None and now_s > job.stop_by_s:
                self._kill(job)
            self._watch_memory(job_id, job, now_s)

    def _spawn(self, job: _Job, now_s: float) -> None:
        launch = job.launch
        assert launch is not None
        job.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            (job.directory / "exit.json").unlink()
        runs = len(list((job.directory / "runs").glob("*")))
        order = {
            "job_id": launch.job_id,
            "run": runs,
            "command": list(launch.command),
            "workdir": str(launch.workdir.resolve()),
            "env": dict(launch.env),
            "auto": launch.auto,
            "max_workers": max(launch.max_workers, len(job.wanted)),
            "workers": len(job.wanted),
            "placement": list(job.wanted),
            "checkpoint_s": launch.checkpoint_s,
            "memory_bytes": launch.memory_bytes,
        }
        write_json(job.directory / "start.json", order)
        with (job.directory / "supervisor.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.supervisor", str(job.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        write_json(job.directory / "pid.json", {"pid": child.pid})
        job.applied, job.state, job.exit_code, job.reason = job.wanted, RunState.STARTING, None, ""
        job.started_s, job.stop_by_s, job.reports = now_s, None, {}

    def _connect(self, job: _Job) -> None:
        runs = sorted((job.directory / "runs").glob("*"))
        if not runs:
            return
        run = JobDirectory(runs[-1])
        with contextlib.suppress(OSError, TrainError, ValueError, KeyError):
            connection = Connection.open(run.address(), run.config()["secret"], timeout_s=1.0)
            connection.request({"type": "hello", "role": "tool"})
            connection.request({"type": "watch"})
            job.connection = connection

    def _disconnect(self, job: _Job) -> None:
        if job.connection is not None:
            with contextlib.suppress(OSError):
                job.connection.close()
            job.connection = None

    def _tell(self, job: _Job, now_s: float) -> None:
        """Send the job what is wanted of it now; a newer wish simply replaces an older one."""
        assert job.connection is not None
        try:
            if job.wanted:
                job.connection.send({"type": "resize", "workers": len(job.wanted)})
                if job.stop_by_s is not None:
                    return  # it is leaving: it will be started again once it is gone
            else:
                job.connection.send({"type": "stop", "save": True})
                job.stop_by_s = now_s + STOP_GRACE_S
                job.state = RunState.STOPPING
        except OSError:
            self._disconnect(job)
            return
        job.applied = job.wanted
        start = job.directory / "start.json"
        order = json.loads(start.read_text()) | {"placement": list(job.wanted)}
        write_json(start, order)

    def _hear(self, job_id: str) -> None:
        job = self._jobs[job_id]
        assert job.connection is not None
        try:
            messages = job.connection.pending()
        except (OSError, TrainError):
            self._disconnect(job)
            return
        for message in messages:
            kind = message.get("type")
            if kind == "report":
                self._take_report(job_id, job, message["report"])
            elif kind == "event" and message.get("event") == "generation":
                pause_s = message.get("pause_s")
                if pause_s is not None:
                    self._add_report(job_id, "resized", {"pause_s": float(pause_s)})

    def _take_report(self, job_id: str, job: _Job, said: dict[str, Any]) -> None:
        if said.get("rank", 0) != 0:
            return
        if job.state is RunState.STARTING:
            job.state = RunState.RUNNING
        progress = {k: said.get(k) for k in ("of", "batch_size", "epoch", "loss", "lr", "metrics")}
        progress["done"] = said.get("done", said.get("step", 0))
        self._add_report(job_id, "progress", progress)
        workers = int(said.get("workers", said.get("world", 1)))
        if said.get("local_batch") and said.get("step_s"):
            timing = {k: said[k] for k in ("local_batch", "step_s", "sync_s")}
            timing |= {
                "workers": workers,
                "nodes": self._nodes(job),
                "accumulation": said.get("accumulation", 0),
            }
            self._add_report(job_id, "timing", timing)
        if said.get("sqr") is not None and said.get("var") is not None:
            self._add_report(job_id, "noise", {"sqr": said["sqr"], "var": said["var"]})

    def _add_report(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        self._reports.append(Report(job_id=job_id, time_s=time.time(), kind=kind, data=data))
        self._wake()

    def _nodes(self, job: _Job) -> int:
        return max(len(self._cluster.nodes_of(job.applied)), 1)

    # -- ends --------------------------------------------------------------------------------------------

    def _adopt(self, directory: Path) -> None:
        order = json.loads((directory / "start.json").read_text())
        job = _Job(directory, wanted=tuple(order["placement"]), applied=tuple(order["placement"]))
        job.alive = is_locked(directory)
        job.launch = Launch(
            job_id=order["job_id"],
            command=tuple(order["command"]),
            workdir=Path(order["workdir"]),
            env=order["env"],
            job_dir=directory,
            auto=order["auto"],
            max_workers=order["max_workers"],
            memory_bytes=order["memory_bytes"],
            checkpoint_s=order["checkpoint_s"],
        )
        if not job.alive:
            job.wanted = ()  # whoever wants it to run will say so
            self._read_exit(job)
        self._jobs[order["job_id"]] = job

    def _gone(self, job_id: str, job: _Job) -> None:
        """Its processes are gone: in good order, by its own fault, or by somebody's -9."""
        job.alive, job.stop_by_s = False, None
        self._disconnect(job)
        self._read_exit(job)
        if job.exit_code is not None and job.state is not RunState.STOPPED:
            job.wanted = ()
        self._wake()

    def _read_exit(self, job: _Job) -> None:
        try:
            exit_ = json.loads((job.directory / "exit.json").read_text())
        except (OSError, ValueError):
            job.exit_code = None
            return
        job.exit_code, job.reason = int(exit_["code"]), str(exit_["reason"])
        if job.reason == STOPPED:
            job.state = RunState.STOPPED
        else:
            job.state = RunState.FINISHED if job.exit_code == 0 else RunState.FAILED

    def _end(self, job_id: str, job: _Job, now_s: float) -> None:
        if not job.alive:
            self._disconnect(job)
            with contextlib.suppress(FileNotFoundError):
                (job.directory / "start.json").unlink()
            job.ended = True
            del self._jobs[job_id]
        elif job.stop_by_s is None or job.state is not RunState.STOPPING:
            job.state, job.stop_by_s = RunState.STOPPING, now_s + END_GRACE_S
            self._signal(job, signal.SIGTERM)
        elif now_s > job.stop_by_s:
            self._kill(job)

    def _kill(self, job: _Job) -> None:
        """End a job by force; its workers hold a pipe to the supervisor and end with it."""
        self._signal(job, signal.SIGKILL)

    def _signal(self, job: _Job, number: signal.Signals) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = int(json.loads((job.directory / "pid.json").read_text())["pid"])
            # The lock is held, so the supervisor lives and this pid is still its own.
            if is_locked(job.directory):
                os.kill(pid, number)

    def _watch_memory(self, job_id: str, job: _Job, now_s: float) -> None:
        limit = job.launch.memory_bytes if job.launch is not None else None
        if limit is None or now_s - job.last_memory_s < MEMORY_EVERY_S:
            return
        job.last_memory_s = now_s
        pid = int(json.loads((job.directory / "pid.json").read_text())["pid"])
        largest = max((memory_bytes(child) for child in descendants(pid)), default=0)
        if largest > limit:
            reason = f"a worker used {largest / 2**20:.0f} MiB; the job's limit is {limit / 2**20:.0f} MiB"
            self._kill(job)
            deadline = time.monotonic() + 5.0
            while is_locked(job.directory) and time.monotonic() < deadline:
                time.sleep(0.02)
            write_json(job.directory / "exit.json", {"code": 137, "reason": reason, "time_s": now_s})
