"""The common part of engines that run each job as a detached process tree under a `supervisor`.

Such a tree runs without the engine. The engine is a thread that starts the trees, speaks to their
coordinators over the wire protocol, and listens to their reports. All it must know after a restart is in the
jobs' directories: a job whose lock is held is alive, a job with an exit.json is over, and a job with neither
has lost all its processes.

No two workers use a slot at once: a job is told to grow only when the workers of other jobs have left the
slots. The kinds of engine differ in where workers live.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from swell.engines import clock
from swell.engines.accounts import of_job
from swell.engines.base import NOTHING_HELD, Held, Launch, Observed, Report, RunState, drain
from swell.engines.border import BadMessage, Confined, read_beat, read_event
from swell.engines.environment import for_jobs
from swell.engines.fencing import Fence
from swell.engines.parts import Part
from swell.engines.processes import MARK, how_ended, mark, sweep
from swell.engines.supervised_job import END, NOTE_END_S, STOP, Outcome, SupervisedJob
from swell.engines.supervisor import is_locked, signal_supervisor
from swell.train.agent import outputs
from swell.train.agent.children import Child, Forked
from swell.train.agent.errors import TrainError
from swell.train.agent.polling import readable
from swell.train.agent.regular import open_for_append
from swell.train.agent.wire import Connection, Message

log = logging.getLogger(__name__)

TICK_S = 0.2
STOP_GRACE_S = 60.0
"""A job that was asked to save its state and stop is killed after this long."""
END_GRACE_S = 8.0
"""A supervisor that was asked to end (SIGTERM) is killed after this long."""
HANDOVER_S = 3.0
"""How long a job waits for all of its wanted slots before it starts on those that are free."""
RESTART_S = 0.5
"""Least time between two attempts to start a job's processes."""
_PAUSES = ("switch", "recovery")
"""Events of a job that contain a pause in its training."""


class SupervisedEngine:
    """Runs each job as a process tree of its own; subclasses decide where the workers live."""

    name = ""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.run_as: str | None = None
        """The account that jobs run as, 'submitter' for that of each job's owner, None for this process's."""
        self.pass_env: tuple[str, ...] = ()
        """Variables of the platform's environment that jobs get besides those on the list."""
        self.may_act: Callable[[], bool] = lambda: True
        """Whether this control plane leads. If it does not, jobs are left to the one that does."""
        self.fence: Fence | None = None
        """Which leader this control plane is; None if there can be no other."""
        self._jobs: dict[str, SupervisedJob] = {}
        self._reserved: frozenset[int] = frozenset()
        self._reports: deque[Report] = deque(maxlen=100_000)
        self._lock = threading.RLock()
        """Held for every change of `_jobs` and of a job's wanted slots; never held while waiting."""
        self._wake: Callable[[], None] = lambda: None
        self._part = Part("engine", self._loop)
        self._poke_r, self._poke_w = os.pipe()
        os.set_blocking(self._poke_w, False)
        os.set_blocking(self._poke_r, False)

    def prepare(self) -> None:
        """Begin with what takes long and touches no job, for a control plane that may have to lead soon."""

    def start(self, wake: Callable[[], None], held: Held = NOTHING_HELD) -> None:
        """Find the jobs that already run, and begin to listen to them."""
        now_s = time.monotonic()
        self._wake = wake
        # Before looking which jobs run: a supervisor that an earlier leader has started either holds its
        # job's lock by now and is found, or reads this number and does not run.
        if self.fence is not None and self.may_act():
            self.fence.raise_in(self._home)
        for path in sorted((self._home / "jobs").glob("*/start.json")):
            try:
                job = SupervisedJob.found(path.parent)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("%s cannot be read (%s): the job is not taken over", path, error)
                continue
            # A job that was killed meanwhile keeps the slots that the log shows too, until the caller knows.
            job.logged, job.told_s, job.kept_until_s = held.get(job.job_id, ()), now_s, now_s + NOTE_END_S
            self._jobs[job.job_id] = job
        self._part.start()

    def close(self) -> None:
        """Stop listening. Jobs go on."""
        self._part.stopping.set()
        self._poke()
        self._part.stop(10.0)
        for job in self._jobs.values():
            job.disconnect()

    # -- what subclasses provide -------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The present nodes and slots."""
        raise NotImplementedError

    def check(self, launch: Launch) -> None:
        """Raise InputError for a job that could never run here; called before a job is accepted."""
        raise NotImplementedError

    def _order_extras(self, job: SupervisedJob) -> dict[str, Any]:
        """What this kind of engine adds to the order for a job's supervisor."""
        raise NotImplementedError

    def _usable(self, slots: Placement) -> Placement:
        """Those of the slots that workers can be on now."""
        return slots

    def _may_start(self, job: SupervisedJob) -> bool:
        """Whether processes of a job that has none may be started now."""
        return True

    def _start_supervisor(self, job: SupervisedJob, env: dict[str, str]) -> Child:
        """Start the supervisor of a job, with this environment, as the job's account."""
        account = job.account
        with open_for_append(job.directory / "supervisor.log") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "swell.engines.supervisor", str(job.directory)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env=env,
                user=None if account is None else account.uid,
                group=None if account is None else account.gid,
                extra_groups=None if account is None else os.getgrouplist(account.name, account.gid),
            )

    def _sweep(self, job: SupervisedJob) -> bool:
        """Kill what is left of a job whose supervisor has ended; False if some of it is still ending."""
        return sweep(job.directory)

    def _tick(self, now_s: float) -> None:
        """Called in every turn of the thread, before the jobs are tended."""

    def _environment(self) -> dict[str, str]:
        """Environment of supervisors."""
        return for_jobs(os.environ, self.pass_env)

    # -- the interface -----------------------------------------------------------------------------------

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots; the engine's thread carries it out."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is None:
                if not placement:
                    return
                job = self._jobs[launch.job_id] = SupervisedJob(launch.job_id, launch.job_dir)
            job.launch = launch
            if not placement and not job.alive and not job.over:
                job.told = job.logged = ()  # the caller knows that it has no slots any more
            if job.wanted == placement or job.over:
                return  # nothing new, or the job is over and the caller has not seen that yet
            stopping = not job.wanted
            job.wanted, job.wanted_s = placement, time.monotonic()
            if job.alive and stopping and job.stop_by_s is None and job.told:
                # It was to stop, and has not been told yet: it goes on as it is, and the log says so.
                self._add_report(job, "started", {"gpus": job.shown, "pause_s": 0.0})
            if placement and not job.alive:
                job.outcome = None  # the job was stopped before, and is to go on
        self._poke()

    def reserve(self, slots: frozenset[int]) -> None:
        """Note which slots services hold."""
        if slots != self._reserved:
            self._reserved = slots
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
        """Jobs that run, jobs that wait for slots, and jobs that have ended."""
        with self._lock:
            return {n: job.observed() for n, job in self._jobs.items() if job.present and not job.ending}

    def parts(self) -> list[Part]:
        """The engine's thread."""
        return [self._part]

    def reports(self) -> Iterator[Report]:
        """What jobs reported since the last call."""
        return drain(self._reports)

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's output from an offset."""
        try:
            return outputs.read(job_dir / outputs.FILE, offset, limit)
        except OSError:
            return b"", offset  # nothing was printed yet, or the job put something else there

    # -- the thread --------------------------------------------------------------------------------------

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._poke_w, b"!")

    def _loop(self) -> None:
        while not self._part.stopping.is_set():
            self._part.beat()
            if not self.may_act():
                self._part.stopping.wait(TICK_S)
                continue
            with self._lock:
                jobs = list(self._jobs.values())
            listening = {j.connection: j for j in jobs if j.connection is not None}
            supervisors = [
                j.child for j in jobs if isinstance(j.child, Forked) and j.child.returncode is None
            ]
            watched: list[Any] = [self._poke_r, *listening, *supervisors]
            ready = readable(watched, TICK_S)
            if self._poke_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._poke_r, 4096)
            for connection in ready:
                if isinstance(connection, Connection):
                    with self._sparing_others(listening[connection]):
                        self._read_messages(listening[connection], connection)
            self._tick(time.monotonic())
            with self._lock:
                jobs = list(self._jobs.values())
            # Jobs that give slots back go first, so that other jobs can have the slots in the same turn.
            for job in sorted(jobs, key=lambda j: len(j.wanted) - len(j.told)):
                self._part.beat()
                with self._sparing_others(job):
                    if self.may_act():
                        self._tend(job)

    @contextlib.contextmanager
    def _sparing_others(self, job: SupervisedJob) -> Iterator[None]:
        """Have what fails for one job (a full disk, an error of ours) disturb no other job."""
        try:
            yield
        except OSError as error:
            job.complain(str(error))
        except Exception as error:
            if job.complain(f"internal error: {error!r}"):
                log.exception("job %s", job.job_id)

    def _tend(self, job: SupervisedJob) -> None:
        """Take the next step towards what is wanted of one job."""
        now_s = time.monotonic()
        alive = is_locked(job.directory) or job.starting
        if job.alive and not alive:
            self._supervisor_ended(job)
        elif alive and not job.alive:
            with self._lock:
                job.alive, job.outcome = True, None
            self._wake()
        if job.ending:
            self._end(job, now_s)
        elif not alive:
            if not job.present:
                job.outcome = Outcome.read(job.directory)  # the job may have run between two turns
            self._spawn(job, now_s)
        elif not job.wanted and job.unborn(now_s):
            self._stop_at_once(job, now_s)
        else:
            fencing = None if self.fence is None else self.fence.number
            if job.connect(now_s, len(self.cluster().node_of_gpu), fencing):
                self._report_confined(job, job.confined)
            if job.connection is not None:
                self._send_target(job, now_s)
                self._report_slots(job)
            if job.stop_by_s is not None and now_s > job.stop_by_s:
                log.warning("job %s did not save its state in time and is killed", job.job_id)
                self._signal(job, signal.SIGKILL)

    # -- starting, resizing, stopping --------------------------------------------------------------------

    def _spawn(self, job: SupervisedJob, now_s: float) -> None:
        if job.launch is None or not job.wanted or now_s - job.started_s < RESTART_S:
            return
        granted = job.whole_replicas(self._grant(job, now_s))
        if not granted or not self._may_start(job):
            return
        job.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        job.account = of_job(self.run_as, job.launch.owner)
        if job.account is not None:
            job.account.own(job.directory)
        (job.directory / "exit.json").unlink(missing_ok=True)
        job.write_order(granted, self.cluster().capacity, self._order_extras(job) | self._fenced())
        env = {**self._environment(), MARK: mark(job.directory)}
        if job.account is not None:
            env |= job.account.environment
        child = self._start_supervisor(job, env)
        with self._lock:
            job.started(child, granted, now_s)
        self._add_report(job, "started", {"gpus": granted})

    def _fenced(self) -> dict[str, Any]:
        """What keeps a supervisor from running if this control plane has stopped leading meanwhile."""
        return {} if self.fence is None else self.fence.for_order(self._home)

    def _send_target(self, job: SupervisedJob, now_s: float) -> None:
        """Send the job its present target; a newer target simply replaces an older one."""
        if job.stop_by_s is not None:
            return  # the job is stopping; if it is wanted again, it is started once it has stopped
        granted = job.whole_replicas(self._grant(job, now_s)) if job.wanted else ()
        if not job.wanted or job.stranded(self._reserved, granted, now_s):
            with self._lock:
                job.stop_by_s, job.state = now_s + STOP_GRACE_S, RunState.STOPPING
            job.send(STOP)
            return
        if not granted or (granted == job.told and not job.fresh):
            job.note(job.told)
            return
        more = set(granted) - set(job.told)
        if more & job.left:
            return  # workers of its own that are leaving still use these slots
        try:
            job.note(granted)  # first, so that an engine that takes the job over knows of them in any case
        except OSError:
            if more:
                raise
        if job.send({"type": "resize", "workers": len(granted), "slots": list(granted)}):
            with self._lock:
                job.told, job.told_s, job.fresh = granted, now_s, False

    def _grant(self, job: SupervisedJob, now_s: float) -> Placement:
        """The slots that a job may use now: those of its wanted slots that are free of other workers."""
        with self._lock:
            taken = set[int]().union(*(other.slots for other in self._jobs.values() if other is not job))
        free = tuple(slot for slot in self._usable(job.wanted) if slot not in taken)
        has = job.told if job.alive else ()
        has = tuple(slot for slot in has if slot not in self._reserved) or has
        if free == job.wanted or now_s - job.wanted_s > HANDOVER_S:
            return free or has
        # Other jobs still use some wanted slots. The job gives up its unwanted slots now, and gets the rest
        # of the wanted ones when they are free.
        return tuple(slot for slot in free if slot in has) or has

    def _stop_at_once(self, job: SupervisedJob, now_s: float) -> None:
        """Stop a job that has not trained yet: it has no state to save, and others wait for its slots."""
        if job.stop_by_s is None:
            with self._lock:
                job.stop_by_s, job.state = now_s + END_GRACE_S, RunState.STOPPING
            self._signal(job, signal.SIGTERM)

    # -- listening ---------------------------------------------------------------------------------------

    def _read_messages(self, job: SupervisedJob, connection: Connection) -> None:
        try:
            messages = connection.pending()
        except (OSError, TrainError):
            job.disconnect()
            return
        for message in messages:
            try:
                if message.get("type") == "report":
                    self._take_report(job, message.get("report"))
                elif message.get("type") == "event":
                    self._take_event(job, message)
            except BadMessage as error:
                job.complain(f"sent something that is not a message of a job: {error}")

    def _take_event(self, job: SupervisedJob, message: Message) -> None:
        """Take in an event of the job's own log: keep track of its workers, and report what people need."""
        event = read_event(message, len(self.cluster().node_of_gpu))
        what, worker = event.kind, event.worker
        trained, first = worker in job.members, not job.former
        with self._lock:
            job.follow(event)
            nobody = what == "exited" and not job.members & job.live.keys()
            if nobody and job.state is RunState.RUNNING:
                job.state = RunState.STARTING  # until one of its workers reports again
        if what == "exited":
            self._wake()  # a service may wait for the slot
        if what == "generation" and first:  # the job may have begun with fewer workers than are wanted
            self._add_report(job, "resized", {"pause_s": 0.0, "gpus": job.occupied(job.members)})
        elif what in _PAUSES and event.pause_s is not None:
            gpus = job.occupied(job.members)
            self._add_report(job, "resized", {"pause_s": event.pause_s, "gpus": gpus})
        elif what == "exited" and trained and event.code < 0 and job.stop_by_s is None:
            self._add_report(job, "worker_lost", {"worker": worker, "reason": how_ended(event.code)})
        elif what == "left_out" and trained:
            job.left_out = worker
            self._add_report(job, "worker_lost", {"worker": worker, "reason": event.text})
        elif what == "fenced" and trained and worker != job.left_out:
            reason = "the worker did not answer and was given up"
            self._add_report(job, "worker_lost", {"worker": worker, "reason": reason})
        elif event.confined is not None:
            self._report_confined(job, event.confined)
        elif event.text:
            self._add_report(job, "noticed", {"text": event.text})
            slot = job.live.get(worker)
            if what == "straggler" and slot is not None and not event.leads:
                self._add_report(job, "slow", {"slot": slot, "times": event.times})
        elif what == "checkpoint":
            self._add_report(job, "checkpoint", {"step": event.step})

    def _report_slots(self, job: SupervisedJob) -> None:
        """Report where a job is, if the event log shows it elsewhere: before it trains, after a report that
        was not listened to, or because it was resized while nobody listened."""
        settled = job.members <= job.live.keys() and job.stop_by_s is None
        if settled and job.logged and job.shown != job.logged:
            self._add_report(job, "resized", {"pause_s": 0.0, "gpus": job.shown})

    def _report_confined(self, job: SupervisedJob, confined: Confined | None) -> None:
        if confined is not None:
            self._add_report(job, "confined", {"workers": confined.workers, "reason": confined.reason})

    def _take_report(self, job: SupervisedJob, raw: object) -> None:
        beat = read_beat(raw)
        if beat.rank != 0 or job.stop_by_s is not None:
            return
        if job.state is RunState.STARTING:
            job.state = RunState.RUNNING
        self._add_report(job, "progress", beat.progress)
        if beat.timing is not None:
            cluster = self.cluster()
            there = tuple(slot for slot in job.wanted if slot < len(cluster.node_of_gpu))
            nodes = max(len(cluster.nodes_of(there)), 1)
            self._add_report(job, "timing", beat.timing | {"nodes": nodes})
        if beat.noise is not None:
            self._add_report(job, "noise", beat.noise)

    def _add_report(self, job: SupervisedJob, kind: str, data: dict[str, Any]) -> None:
        if not job.allowance.take():
            job.complain("reports more than the platform listens to; the rest is dropped")
            return
        if kind in ("started", "resized"):
            job.logged = data["gpus"]
        self._reports.append(Report(job_id=job.job_id, time_s=clock.now_s(), kind=kind, data=data))
        self._wake()

    # -- ends --------------------------------------------------------------------------------------------

    def _supervisor_ended(self, job: SupervisedJob) -> None:
        """Clean up after a supervisor that has ended, whether it ended by itself or was killed."""
        while job.connection is not None and readable([job.connection], 0.0):
            self._read_messages(job, job.connection)  # read the last messages, until the connection is closed
        if self.may_act():
            self._sweep(job)
        with self._lock:
            job.gone()
        self._wake()

    def _end(self, job: SupervisedJob, now_s: float) -> None:
        if not job.alive:
            if not self._sweep(job):
                return  # tried again in the next turn
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
        """Signal a job's supervisor. Its workers hold a pipe to it, and end when it ends."""
        if not self.may_act():
            return
        if signal_supervisor(job.directory, number):
            return
        if job.child is not None:
            job.child.send_signal(number)
        elif job.connection is not None:
            job.send(END)  # a control plane on another machine started it
