"""What engines have in common whose jobs are each a detached process tree under a `supervisor`.

Such a tree needs nobody. The engine is a thread that starts them, speaks to their coordinators over the wire
protocol, and listens to their reports. All it must know after a restart is in the jobs' directories: a job
whose lock is held is alive, one with an exit.json is over, one with neither has lost all its processes.

Slots are never used twice: a job is told to grow only when the workers of others that had to go have gone.
Where workers live, and whether it matters which slots a job has, is up to the kind of engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swell.domain import Cluster, Placement
from swell.engines.base import Launch, Observed, Report, RunState
from swell.engines.processes import MARK, mark, sweep
from swell.engines.supervised_job import STOP, Outcome, SupervisedJob
from swell.engines.supervisor import is_locked, signal_supervisor
from swell.train.errors import TrainError
from swell.train.wire import Connection, Message

log = logging.getLogger(__name__)

TICK_S = 0.2
STOP_GRACE_S = 60.0
"""A job that was asked to save its state and leave is ended after this long."""
END_GRACE_S = 8.0
HANDOVER_S = 3.0
"""How long a job waits for all of its slots before it makes do with those that are free."""
RESTART_S = 0.5
"""Between two attempts to start a job's processes."""
_PROGRESS = ("of", "at_most", "target_loss", "batch_size", "epoch", "loss", "lr", "metrics")
"""What of a worker's report tells how far the job is."""
_PAUSES = ("switch", "recovery")
"""Events of a job that tell how long its training stood still."""


class SupervisedEngine:
    """Jobs as process trees of their own; subclasses say where their workers are."""

    name = ""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._jobs: dict[str, SupervisedJob] = {}
        self._reports: deque[Report] = deque(maxlen=100_000)
        self._lock = threading.RLock()
        """Held for every change of `_jobs` and of what is wanted of a job; never while waiting."""
        self._wake: Callable[[], None] = lambda: None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._poke_r, self._poke_w = os.pipe()
        os.set_blocking(self._poke_w, False)
        os.set_blocking(self._poke_r, False)

    def start(self, wake: Callable[[], None]) -> None:
        """Find the jobs that live, and begin to listen."""
        self._wake = wake
        for path in sorted((self._home / "jobs").glob("*/start.json")):
            try:
                job = SupervisedJob.found(path.parent)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("%s cannot be read (%s): the job is not taken over", path, error)
                continue
            self._jobs[job.job_id] = job
        self._thread = threading.Thread(target=self._loop, name="swell-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Jobs go on."""
        self._stopping = True
        self._poke()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        for job in self._jobs.values():
            job.disconnect()

    # -- what kinds of engines differ in -----------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The nodes and slots there are now."""
        raise NotImplementedError

    def check(self, launch: Launch) -> None:
        """Refuse a job that could never run here, with a reason for people; called before it is taken in."""
        raise NotImplementedError

    def _grant(self, job: SupervisedJob, now_s: float) -> Placement:
        """Which slots it may use at this moment: what is wanted, as far as there is room."""
        raise NotImplementedError

    def _resize(self, granted: Placement) -> Message:
        """How its coordinator is told."""
        raise NotImplementedError

    def _order_extras(self, job: SupervisedJob, granted: Placement) -> dict[str, Any]:
        """What its supervisor must know beyond what every one must."""
        raise NotImplementedError

    def _connected(self, job: SupervisedJob) -> None:
        """Its coordinator is there and has said how many workers it wants."""
        raise NotImplementedError

    def _assign_slots(self, job: SupervisedJob) -> None:
        """Say which of its slots each worker has, where the job itself does not."""

    def _tick(self, now_s: float) -> None:
        """Called at every turn, before jobs are seen to."""

    def _environment(self) -> dict[str, str]:
        """Environment of supervisors."""
        return dict(os.environ)

    # -- the interface -----------------------------------------------------------------------------------

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots; carried out by the engine's thread."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is None:
                if not placement:
                    return
                job = self._jobs[launch.job_id] = SupervisedJob(launch.job_id, launch.job_dir)
            job.launch = launch
            if job.wanted == placement or job.over:
                return  # whoever asked has not seen yet how it ended
            job.wanted, job.wanted_s = placement, time.monotonic()
            if placement and not job.alive:
                job.outcome = None  # it was stopped, and is to go on
        self._poke()

    def end(self, job_id: str) -> None:
        """End a job and all its processes."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            job.ending, job.wanted = True, ()
        self._poke()

    def observe(self) -> dict[str, Observed]:
        """Jobs that live, and those that came to an end."""
        with self._lock:
            return {n: job.observed() for n, job in self._jobs.items() if job.present and not job.ending}

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
            listening = {j.connection: j for j in self._jobs.values() if j.connection is not None}
            watched: list[Any] = [self._poke_r, *listening]
            readable, _, _ = select.select(watched, [], [], TICK_S)
            if self._poke_r in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._poke_r, 4096)
            for connection in readable:
                if isinstance(connection, Connection):
                    self._hear(listening[connection], connection)
            self._tick(time.monotonic())
            with self._lock:
                jobs = list(self._jobs.values())
            # Whoever gives slots back goes first.
            for job in sorted(jobs, key=lambda j: len(j.wanted) - len(j.told)):
                try:
                    self._tend(job)
                except OSError as error:  # a full disk, say: the others need not suffer
                    log.error("job %s: %s", job.job_id, error)

    def _tend(self, job: SupervisedJob) -> None:
        """Bring one job nearer to what is wanted of it."""
        now_s = time.monotonic()
        alive = is_locked(job.directory) or job.starting
        if job.alive and not alive:
            self._gone(job)
        elif alive and not job.alive:
            with self._lock:
                job.alive, job.outcome = True, None
            self._wake()
        if job.ending:
            self._end(job, now_s)
        elif not alive:
            if not job.present:
                job.outcome = Outcome.read(job.directory)  # it may have run in a moment when nobody looked
            self._spawn(job, now_s)
        else:
            if job.connect(now_s):
                with self._lock:
                    self._assign_slots(job)
            if job.connection is not None:
                self._tell(job, now_s)
            if job.stop_by_s is not None and now_s > job.stop_by_s:
                log.warning("job %s did not save its state in time and is ended", job.job_id)
                self._signal(job, signal.SIGKILL)

    # -- starting, resizing, stopping --------------------------------------------------------------------

    def _spawn(self, job: SupervisedJob, now_s: float) -> None:
        if job.launch is None or not job.wanted or now_s - job.started_s < RESTART_S:
            return
        granted = self._grant(job, now_s)
        if not granted:
            return
        job.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (job.directory / "exit.json").unlink(missing_ok=True)
        job.write_order(granted, self.cluster().capacity, self._order_extras(job, granted))
        with (job.directory / "supervisor.log").open("ab") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.supervisor", str(job.directory)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env={**self._environment(), MARK: mark(job.directory)},
            )
        with self._lock:
            job.started(child, granted, now_s)
        self._add_report(job, "started", {"gpus": granted})

    def _tell(self, job: SupervisedJob, now_s: float) -> None:
        """Send the job what is wanted of it now; a newer wish simply replaces an older one."""
        if job.stop_by_s is not None:
            return  # it is leaving; if it is wanted again, it is started again once it is gone
        if not job.wanted:
            with self._lock:
                job.stop_by_s, job.state = now_s + STOP_GRACE_S, RunState.STOPPING
            job.send(STOP)
            return
        if job.fresh:
            job.fresh = False
            self._connected(job)
        granted = self._grant(job, now_s)
        message = self._resize(granted)
        if len(granted) > len(job.told) and job.leaving:
            return  # those who leave still have their slots
        if granted and message != self._resize(job.told) and job.send(message):
            with self._lock:
                job.told, job.told_s = granted, now_s
                self._assign_slots(job)
        elif granted and granted != job.told and message == self._resize(job.told):
            before = job.occupied(job.members)
            with self._lock:  # as many as before: where it does not matter which, it has others now
                job.told = granted
                self._assign_slots(job)
            if job.occupied(job.members) != before:
                self._add_report(job, "resized", {"pause_s": 0.0, "gpus": job.occupied(job.members)})
        if job.wanted != job.noted:
            job.note_placement()

    # -- listening ---------------------------------------------------------------------------------------

    def _hear(self, job: SupervisedJob, connection: Connection) -> None:
        try:
            messages = connection.pending()
        except (OSError, TrainError):
            job.disconnect()
            return
        for message in messages:
            kind = message.get("type")
            if kind == "report":
                self._take_report(job, message["report"])
            elif kind == "event":
                self._take_event(job, message)

    def _take_event(self, job: SupervisedJob, event: Message) -> None:
        """A line of the job's own history: keep track of its workers, and pass on what people care for."""
        what, worker = event.get("event"), str(event.get("worker", ""))
        trained, first = worker in job.members, not job.former
        with self._lock:
            job.follow(event)
            self._assign_slots(job)
        if what == "generation" and first:  # it may have begun with fewer workers than are wanted
            self._add_report(job, "resized", {"pause_s": 0.0, "gpus": job.occupied(job.members)})
        elif what in _PAUSES and event.get("pause_s") is not None:
            gpus = job.occupied(job.members)
            self._add_report(job, "resized", {"pause_s": float(event["pause_s"]), "gpus": gpus})
        elif what == "exited" and trained and int(event.get("code", 0)) < 0:
            self._add_report(job, "worker_lost", {"worker": worker, "reason": _signal_name(event["code"])})
        elif what == "fenced" and trained:
            reason = "it did not answer and was given up"
            self._add_report(job, "worker_lost", {"worker": worker, "reason": reason})
        elif what == "checkpoint":
            self._add_report(job, "checkpoint", {"step": int(event["step"])})

    def _take_report(self, job: SupervisedJob, said: Message) -> None:
        if said.get("rank", 0) != 0 or job.stop_by_s is not None:
            return
        if job.state is RunState.STARTING:
            job.state = RunState.RUNNING
        progress = {k: said.get(k) for k in _PROGRESS}
        progress["done"] = said.get("done", said.get("step", 0))
        self._add_report(job, "progress", progress)
        if said.get("local_batch") and said.get("step_s"):
            timing = {k: said.get(k, 0) for k in ("local_batch", "step_s", "sync_s", "accumulation")}
            timing |= {k: said[k] for k in ("mode", "limits") if said.get(k)}
            cluster = self.cluster()
            there = tuple(slot for slot in job.wanted if slot < len(cluster.node_of_gpu))
            timing |= {
                "workers": int(said.get("workers") or said.get("world") or 1),
                "nodes": max(len(cluster.nodes_of(there)), 1),
            }
            self._add_report(job, "timing", timing)
        if said.get("sqr") is not None and said.get("var") is not None:
            noise = {"sqr": said["sqr"], "var": said["var"], "updates": said.get("noise_updates")}
            self._add_report(job, "noise", noise)

    def _add_report(self, job: SupervisedJob, kind: str, data: dict[str, Any]) -> None:
        self._reports.append(Report(job_id=job.job_id, time_s=time.time(), kind=kind, data=data))
        self._wake()

    # -- ends --------------------------------------------------------------------------------------------

    def _gone(self, job: SupervisedJob) -> None:
        """Its supervisor is gone: in good order, by the job's own fault, or by somebody's -9."""
        while job.connection is not None and select.select([job.connection], [], [], 0)[0]:
            self._hear(job, job.connection)  # its last words; a closed connection ends them
        sweep(job.directory)
        with self._lock:
            job.gone()
        self._wake()

    def _end(self, job: SupervisedJob, now_s: float) -> None:
        if not job.alive:
            if not sweep(job.directory):
                return  # seen to again at the next turn
            job.disconnect()
            with self._lock:
                (job.directory / "start.json").unlink(missing_ok=True)
                self._jobs.pop(job.job_id, None)
            self._wake()
        elif job.end_by_s is None:
            job.end_by_s = now_s + END_GRACE_S
            self._signal(job, signal.SIGTERM)
        elif now_s > job.end_by_s:
            self._signal(job, signal.SIGKILL)

    def _signal(self, job: SupervisedJob, number: signal.Signals) -> None:
        """Its workers hold a pipe to the supervisor and end with it, however it ends."""
        if not signal_supervisor(job.directory, number) and job.child is not None:
            job.child.send_signal(number)


def _signal_name(code: object) -> str:
    """How a process ended that was ended by a signal."""
    try:
        return f"ended by {signal.Signals(-int(str(code))).name}"
    except ValueError:
        return f"ended with code {code}"
