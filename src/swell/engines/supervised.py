"""The engine that runs each job as a detached process tree under a `supervisor`, on this machine or on Ray.

Such a tree runs without the engine. The engine is a thread that starts the trees, speaks to their
coordinators over the wire protocol, and listens to their reports. All it must know after a restart is in the
folder `orders` of the home (see `order`): a job whose lock is held is alive, a job with an exit.json is over,
and a job with neither has lost all its processes.

No two workers use a slot at once: a job is told to grow only when the workers of other jobs have left the
slots. `Site` is where the workers live. `job_state` decides what is to be done for a job, and `Listener`
takes in what jobs say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swell.domain import Cluster, Placement
from swell.engines import groups
from swell.engines.base import NOTHING_HELD, Held, Launch, Observed, Report
from swell.engines.border import BadMessage, confined
from swell.engines.coordinator_line import STOP
from swell.engines.exchange import Exchanger, give_way
from swell.engines.fencing import Fence
from swell.engines.job_state import NOTE_END_S, Stage, Step
from swell.engines.listener import Listener
from swell.engines.order import EXIT, FILE, folder_of, make_folder, started
from swell.engines.parts import Part
from swell.engines.processes import sweep
from swell.engines.site import Site
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent import outputs
from swell.train.agent.children import Forked
from swell.train.agent.polling import readable
from swell.train.agent.protocol import Resize

log = logging.getLogger(__name__)

TICK_S = 0.2
OLDER_S = 5.0
"""Longest wait for the end of a job that an older version started."""
STOPS_FOR_OTHERS = (
    "saves its state and stops for a moment: it exchanges all of its slots with other jobs, and no job can "
    "move before one has left its slots"
)


class Bell:
    """Ends the wait of a thread that polls connections, from any other thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Readable once the bell was rung."""
        return self._read

    def ring(self) -> None:
        """End the wait, or the next one."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def quiet(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)


@contextlib.contextmanager
def _sparing_others(job: SupervisedJob) -> Iterator[None]:
    """Have what fails for one job (a full disk, an error of ours) disturb no other job."""
    try:
        yield
    except OSError as error:
        job.complain(str(error))
    except Exception as error:
        if job.complain(f"internal error: {error!r}"):
            log.exception("job %s", job.job_id)


class SupervisedEngine:
    """Runs each job as a process tree of its own, with workers on a site."""

    def __init__(self, site: Site) -> None:
        self.name = site.name
        self.site = site
        self.may_act: Callable[[], bool] = lambda: True
        """Whether this control plane leads. If it does not, jobs are left to the one that does."""
        self.fence: Fence | None = None
        """Which leader this control plane is; None if there can be no other."""
        self._jobs: dict[str, SupervisedJob] = {}
        self._reserved: frozenset[int] = frozenset()
        """The slots that services hold."""
        self._gives_way: tuple[str, Placement] | None = None
        """A job that gives way in this turn, because jobs wait for each other's slots, and what it keeps."""
        self._lock = threading.RLock()
        """Held for every change of `_jobs` and of a job's wanted slots; never held while waiting."""
        self._listener = Listener(site.cluster, self._lock)
        self._part = Part("engine", self._loop)
        self._bell = Bell()

    def prepare(self) -> None:
        """Begin with what takes long and touches no job, for a control plane that may have to lead soon."""
        self.site.prepare()

    def start(self, wake: Callable[[], None], held: Held = NOTHING_HELD) -> None:
        """Find the jobs that already run, and begin to listen to them."""
        self.site.open(self._bell.ring)
        self._listener.wake = wake
        # Before looking which jobs run: a supervisor that an earlier leader has started either holds its
        # job's lock by now and is found, or reads this number and does not run.
        if self.fence is not None and self.may_act():
            self.fence.raise_in(self.site.home)
        now_s = time.monotonic()
        self._end_jobs_of_older_versions()
        for directory in started(self.site.home):
            try:
                job = SupervisedJob.found(directory)
            except Exception as error:  # whatever is wrong with one job, the others are taken over
                log.error("%s cannot be read (%r): the job is not taken over", folder_of(directory), error)
                continue
            # A job that was killed meanwhile keeps the slots that the log shows too, until the caller knows.
            job.state.logged = held.get(job.job_id, ())
            job.state.kept_until_s = now_s + NOTE_END_S
            self._listener.take_outcome(job, job.state.outcome)
            self._jobs[job.job_id] = job
        self._part.start()

    def close(self) -> None:
        """Stop listening. Jobs go on."""
        self._part.stopping.set()
        self._bell.ring()
        self._part.stop(10.0)
        for job in self._jobs.values():
            job.line.close()
        self.site.close()

    # -- the interface -----------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The present nodes and slots."""
        return self.site.cluster()

    def check(self, launch: Launch) -> None:
        """Raise InputError for a job that could never run here; called before a job is accepted."""
        self.site.check(launch)

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots; the engine's thread carries it out."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is None:
                if not placement:
                    return
                job = self._jobs[launch.job_id] = SupervisedJob(launch)
            job.launch = launch
            self._listener.report(job, job.state.wish(placement, time.monotonic()))
        self._bell.ring()

    def reserve(self, slots: frozenset[int]) -> None:
        """Note which slots services hold."""
        if slots != self._reserved:
            self._reserved = slots
            self._bell.ring()

    def end(self, job_id: str) -> None:
        """End a job and all its processes."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            job.state.to_end, job.state.wanted = True, ()
        self._bell.ring()

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
        return self._listener.reports()

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's output from an offset."""
        try:
            return outputs.read(job_dir / outputs.FILE, offset, limit)
        except OSError:
            return b"", offset  # nothing was printed yet, or the job put something else there

    # -- the thread --------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._part.stopping.is_set():
            self._part.beat()
            if not self.may_act():
                self._part.stopping.wait(TICK_S)
                continue
            self._wait_and_read()
            if self.site.look(self._all_jobs(), time.monotonic()):
                self._listener.wake()
            self._break_circle(time.monotonic())
            # Jobs that give slots back go first, so that other jobs can have the slots in the same turn.
            for job in sorted(self._all_jobs(), key=lambda j: len(j.state.wanted) - len(j.state.told)):
                self._part.beat()
                with _sparing_others(job):
                    if self.may_act():
                        self._tend(job)

    def _wait_and_read(self) -> None:
        """Wait until a job says something or its supervisor ends, the bell rings, or the next turn is due."""
        jobs = self._all_jobs()
        listening = {j.line.connection: j for j in jobs if j.line.connection is not None}
        supervisors = [j.child for j in jobs if isinstance(j.child, Forked) and j.child.returncode is None]
        watched: list[Any] = [self._bell, *listening, *supervisors]
        for one in readable(watched, TICK_S):
            if one is self._bell:
                self._bell.quiet()
            elif one in listening:
                with _sparing_others(listening[one]):
                    self._listener.read(listening[one])

    def _all_jobs(self) -> list[SupervisedJob]:
        with self._lock:
            return list(self._jobs.values())

    def _tend(self, job: SupervisedJob) -> None:
        """Take the next steps towards what is wanted of one job."""
        now_s, runs = time.monotonic(), job.has_processes()
        if job.state.up and not runs:
            self._supervisor_ended(job)
        elif runs and not job.state.up:
            with self._lock:
                job.state.found_running()
            self._listener.wake()
        if runs and self.site.abandoned(job):
            job.complain("the cluster that it ran on was restarted")
            self._signal(job, signal.SIGKILL)
        with self._lock:
            steps = job.state.next_steps(now_s, silent=job.runs_any_command)
        for step in steps:
            match step:
                case Step.START:
                    self._start_job(job, now_s)
                case Step.READ_OUTCOME:
                    job.state.outcome = self._listener.take_outcome(job, job.read_outcome())
                case Step.CONNECT:
                    self._connect(job, now_s)
                case Step.SEND_TARGET if job.line.connection is not None:
                    self._send_target(job, now_s)
                    self._listener.report(job, job.state.unlogged())
                case Step.TERMINATE:
                    self._signal(job, signal.SIGTERM)
                case Step.KILL:
                    log.warning("job %s did not stop in time and is killed", job.job_id)
                    self._signal(job, signal.SIGKILL)
                case Step.FORGET:
                    self._forget(job)

    def _end_jobs_of_older_versions(self) -> None:
        """End the processes of jobs whose orders an older version wrote into the jobs' own directories.

        The job may have rewritten such an order, so it is not read: the control plane has the job's record,
        and starts the job again from its last checkpoint.
        """
        for path in sorted((self.site.home / "jobs").glob("*/start.json")):
            directory = path.parent
            if folder_of(directory).exists() or not self.may_act():
                continue
            log.warning("job %s was started by an older version: it starts again", directory.name)
            groups.end_all(directory)
            sweep(directory, OLDER_S)
            with contextlib.suppress(OSError):  # it may be anything
                path.unlink()

    # -- the steps ---------------------------------------------------------------------------------------

    def _granted(self, job: SupervisedJob, now_s: float) -> Placement:
        """The slots that a job may use now."""
        with self._lock:
            others = (other.state.slots(now_s) for other in self._jobs.values() if other is not job)
            taken = set[int]().union(*others)
        usable = self.site.usable(job.state.wanted)
        return job.whole_replicas(job.state.granted(usable, taken, self._closed_slots(), now_s))

    def _break_circle(self, now_s: float) -> None:
        """If jobs wait for each other's slots in a circle, decide which one gives way."""
        with self._lock:
            waiting = [job for job in self._jobs.values() if job.state.waits_for_others(now_s)]
            jobs = [
                Exchanger(
                    job_id=job.job_id,
                    told=job.state.told,
                    wanted=self.site.usable(job.state.wanted),
                    size=job.launch.request.workers_per_replica,
                    able=job.line.connection is not None,
                )
                for job in waiting
            ]
        self._gives_way = give_way(jobs) if len(jobs) > 1 else None

    def _closed_slots(self) -> frozenset[int]:
        """The slots that jobs have to leave."""
        return self._reserved | self.site.retired()

    def _start_job(self, job: SupervisedJob, now_s: float) -> None:
        granted = self._granted(job, now_s)
        if not granted or not self.site.may_start(job):
            return
        job.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        job.account = self.site.account(job.launch.owner)
        if job.account is not None:
            job.account.own(job.directory)
        (make_folder(job.directory) / EXIT).unlink(missing_ok=True)
        # If this control plane has stopped leading meanwhile, the fence keeps the supervisor from running.
        fenced = {} if self.fence is None else self.fence.for_order(self.site.home)
        job.write_order(granted, self.site.cluster().capacity, self.site.order_extras() | fenced)
        job.child = self.site.start_supervisor(job)
        with self._lock:
            self._listener.report(job, job.state.started(granted, now_s))

    def _connect(self, job: SupervisedJob, now_s: float) -> None:
        fencing = None if self.fence is None else self.fence.number
        try:
            status = job.line.connect(job.directory, now_s, len(self.site.cluster().node_of_gpu), fencing)
        except BadMessage as error:
            job.complain(str(error))
            return
        if status is None:
            return
        with self._lock:
            job.state.connected(status)
        if job.state.stage is Stage.STOPPING:  # the coordinator may be a new one that was not told to stop
            job.line.send(STOP)
        if status.confined:
            self._listener.report(job, [confined(max(status.maximum, 1), status.confined)])

    def _send_target(self, job: SupervisedJob, now_s: float) -> None:
        state = job.state
        granted, leaves = self._granted(job, now_s) if state.wanted else (), False
        if self._gives_way is not None and self._gives_way[0] == job.job_id:
            granted = self._gives_way[1]
            self._gives_way, leaves = None, not granted
        with self._lock:
            target = state.next_target(granted, self._closed_slots(), now_s, leaves=leaves)
        if target is None:
            job.note(state.told)
            return
        if leaves:
            self._listener.report(job, [("noticed", {"text": STOPS_FOR_OTHERS})])
        if not target:
            job.line.send(STOP)
            return
        try:
            job.note(target)  # first, so that an engine that takes the job over knows of them in any case
        except OSError:
            if not set(target) <= set(state.told):
                raise
        if job.line.send(Resize(len(target), list(target))):
            with self._lock:
                state.told, state.fresh = target, False

    def _forget(self, job: SupervisedJob) -> None:
        """End what is left of a job, and forget it; if some of it is still ending, in a later turn."""
        if not self.site.sweep(job):
            return
        job.line.close()
        with self._lock:
            (folder_of(job.directory) / FILE).unlink(missing_ok=True)
            self._jobs.pop(job.job_id, None)
        self._listener.wake()

    def _signal(self, job: SupervisedJob, number: signal.Signals) -> None:
        if self.may_act():
            job.send_signal(number)

    def _supervisor_ended(self, job: SupervisedJob) -> None:
        """Clean up after a supervisor that has ended, whether it ended by itself or was killed."""
        self._listener.read_last(job)
        if self.may_act():
            self.site.sweep(job)
        job.line.close()
        outcome = self._listener.take_outcome(job, job.read_outcome())
        with self._lock:
            job.child = None
            self._listener.report(job, job.state.gone(outcome, time.monotonic()))
        self._listener.wake()
