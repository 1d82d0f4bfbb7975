"""The common part of engines that run each job as a detached process tree under a `supervisor`.

Such a tree runs without the engine. The engine is a thread that starts the trees, speaks to their
coordinators over the wire protocol, and listens to their reports. All it must know after a restart is in the
jobs' directories: a job whose lock is held is alive, a job with an exit.json is over, and a job with neither
has lost all its processes.

No two workers use a slot at once: a job is told to grow only when the workers of other jobs have left the
slots. The kinds of engine differ in where workers live. `job_state` decides what is to be done for a job.
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
from swell.engines.base import NOTHING_HELD, Held, Launch, Observed, Report, drain
from swell.engines.border import BadMessage, read_beat, read_event
from swell.engines.coordinator_line import END, STOP
from swell.engines.environment import for_jobs
from swell.engines.fencing import Fence
from swell.engines.job_state import NOTE_END_S, Said, Stage, Step
from swell.engines.parts import Part
from swell.engines.processes import MARK, mark, sweep
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import signal_supervisor
from swell.train.agent import outputs
from swell.train.agent.children import Child, Forked
from swell.train.agent.polling import readable
from swell.train.agent.regular import open_for_append
from swell.train.agent.wire import Connection, Message

log = logging.getLogger(__name__)

TICK_S = 0.2


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
            job.state.logged = held.get(job.job_id, ())
            job.state.told_s, job.state.kept_until_s = now_s, now_s + NOTE_END_S
            self._jobs[job.job_id] = job
        self._part.start()

    def close(self) -> None:
        """Stop listening. Jobs go on."""
        self._part.stopping.set()
        self._poke()
        self._part.stop(10.0)
        for job in self._jobs.values():
            job.line.close()

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

    def _closed_slots(self) -> frozenset[int]:
        """The slots that jobs have to leave: those that services hold."""
        return self._reserved

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
                job = self._jobs[launch.job_id] = SupervisedJob(launch)
            job.launch = launch
            self._report(job, job.state.wish(placement, time.monotonic()))
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
            job.state.to_end, job.state.wanted = True, ()
        self._poke()

    def observe(self) -> dict[str, Observed]:
        """Jobs that run, jobs that wait for slots, and jobs that have ended."""
        with self._lock:
            seen = {job_id: job.state.observed(job_id) for job_id, job in self._jobs.items()}
        return {job_id: one for job_id, one in seen.items() if one is not None}

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
            listening = {j.line.connection: j for j in jobs if j.line.connection is not None}
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
                        self._read_messages(listening[connection])
            self._tick(time.monotonic())
            with self._lock:
                jobs = list(self._jobs.values())
            # Jobs that give slots back go first, so that other jobs can have the slots in the same turn.
            for job in sorted(jobs, key=lambda j: len(j.state.wanted) - len(j.state.told)):
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
        """Take the next steps towards what is wanted of one job."""
        now_s, runs = time.monotonic(), job.has_processes()
        if job.state.up and not runs:
            self._supervisor_ended(job)
        elif runs and not job.state.up:
            with self._lock:
                job.state.found_running()
            self._wake()
        with self._lock:
            steps = job.state.next_steps(now_s, silent=job.runs_any_command)
        for step in steps:
            match step:
                case Step.START:
                    self._start_job(job, now_s)
                case Step.READ_OUTCOME:
                    job.state.outcome = job.read_outcome()
                case Step.CONNECT:
                    self._connect(job, now_s)
                case Step.SEND_TARGET if job.line.connection is not None:
                    self._send_target(job, now_s)
                    self._report(job, job.state.unlogged())
                case Step.TERMINATE:
                    self._signal(job, signal.SIGTERM)
                case Step.KILL:
                    log.warning("job %s did not stop in time and is killed", job.job_id)
                    self._signal(job, signal.SIGKILL)
                case Step.FORGET:
                    self._forget(job)

    # -- the steps ---------------------------------------------------------------------------------------

    def _granted(self, job: SupervisedJob, now_s: float) -> Placement:
        """The slots that a job may use now."""
        with self._lock:
            others = (other.state.slots(now_s) for other in self._jobs.values() if other is not job)
            taken = set[int]().union(*others)
        usable = self._usable(job.state.wanted)
        return job.whole_replicas(job.state.granted(usable, taken, self._closed_slots(), now_s))

    def _start_job(self, job: SupervisedJob, now_s: float) -> None:
        granted = self._granted(job, now_s)
        if not granted or not self._may_start(job):
            return
        job.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        job.account = of_job(self.run_as, job.launch.owner)
        if job.account is not None:
            job.account.own(job.directory)
        (job.directory / "exit.json").unlink(missing_ok=True)
        # If this control plane has stopped leading meanwhile, the fence keeps the supervisor from running.
        fenced = {} if self.fence is None else self.fence.for_order(self._home)
        job.write_order(granted, self.cluster().capacity, self._order_extras(job) | fenced)
        env = {**self._environment(), MARK: mark(job.directory)}
        if job.account is not None:
            env |= job.account.environment
        job.child = self._start_supervisor(job, env)
        with self._lock:
            self._report(job, job.state.started(granted, now_s))

    def _connect(self, job: SupervisedJob, now_s: float) -> None:
        fencing = None if self.fence is None else self.fence.number
        try:
            status = job.line.connect(job.directory, now_s, len(self.cluster().node_of_gpu), fencing)
        except BadMessage as error:
            job.complain(str(error))
            return
        if status is None:
            return
        with self._lock:
            job.state.connected(status)
        if job.state.stage is Stage.STOPPING:  # the coordinator may be a new one that was not told to stop
            job.line.send(STOP)
        if status.confined is not None:
            self._report(job, [status.confined.said])

    def _send_target(self, job: SupervisedJob, now_s: float) -> None:
        state = job.state
        granted = self._granted(job, now_s) if state.wanted else ()
        with self._lock:
            target = state.next_target(granted, self._closed_slots(), now_s)
        if target is None:
            job.note(state.told)
            return
        if not target:
            job.line.send(STOP)
            return
        try:
            job.note(target)  # first, so that an engine that takes the job over knows of them in any case
        except OSError:
            if not set(target) <= set(state.told):
                raise
        if job.line.send({"type": "resize", "workers": len(target), "slots": list(target)}):
            with self._lock:
                state.told, state.told_s, state.fresh = target, now_s, False

    def _forget(self, job: SupervisedJob) -> None:
        """End what is left of a job, and forget it; if some of it is still ending, in a later turn."""
        if not self._sweep(job):
            return
        job.line.close()
        with self._lock:
            (job.directory / "start.json").unlink(missing_ok=True)
            self._jobs.pop(job.job_id, None)
        self._wake()

    def _signal(self, job: SupervisedJob, number: signal.Signals) -> None:
        """Signal a job's supervisor. Its workers hold a pipe to it, and end when it ends."""
        if not self.may_act():
            return
        if signal_supervisor(job.directory, number):
            return
        if job.child is not None:
            job.child.send_signal(number)
        else:
            job.line.send(END)  # a control plane on another machine started it

    # -- listening ---------------------------------------------------------------------------------------

    def _read_messages(self, job: SupervisedJob) -> None:
        for message in job.line.pending():
            try:
                if message.get("type") == "report":
                    self._take_report(job, message.get("report"))
                elif message.get("type") == "event":
                    self._take_event(job, message)
            except BadMessage as error:
                job.complain(f"sent something that is not a message of a job: {error}")

    def _take_event(self, job: SupervisedJob, message: Message) -> None:
        event = read_event(message, len(self.cluster().node_of_gpu))
        with self._lock:
            said = job.state.happened(event)
        if event.kind == "exited":
            self._wake()  # a service may wait for the slot
        self._report(job, said)

    def _take_report(self, job: SupervisedJob, raw: object) -> None:
        beat = read_beat(raw)
        if beat.rank != 0 or not job.state.trains:
            return
        job.state.progressed()
        self._report(job, [("progress", beat.progress)])
        if beat.timing is not None:
            cluster = self.cluster()
            there = tuple(slot for slot in job.state.wanted if slot < len(cluster.node_of_gpu))
            nodes = max(len(cluster.nodes_of(there)), 1)
            self._report(job, [("timing", beat.timing | {"nodes": nodes})])
        if beat.noise is not None:
            self._report(job, [("noise", beat.noise)])

    def _report(self, job: SupervisedJob, said: list[Said]) -> None:
        """Hand on to the control plane what a job said, or what is to be said of it."""
        for kind, data in said:
            if not job.allowance.take():
                job.complain("reports more than the platform listens to; the rest is dropped")
                continue
            if kind in ("started", "resized"):
                job.state.logged = data["gpus"]
            self._reports.append(Report(job_id=job.job_id, time_s=clock.now_s(), kind=kind, data=data))
            self._wake()

    def _supervisor_ended(self, job: SupervisedJob) -> None:
        """Clean up after a supervisor that has ended, whether it ended by itself or was killed."""
        while job.line.connection is not None and readable([job.line.connection], 0.0):
            self._read_messages(job)  # read the last messages, until the connection is closed
        if self.may_act():
            self._sweep(job)
        job.line.close()
        outcome = job.read_outcome()
        with self._lock:
            job.child = None
            job.state.gone(outcome, time.monotonic())
        self._wake()
