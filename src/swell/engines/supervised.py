"""The engine that runs each job as a detached process tree under a `supervisor`, on this machine or on Ray.

Such a tree runs without the engine. The engine is a thread that starts the trees, speaks to their
coordinators over the wire protocol, and listens to their reports. All it must know after a restart is in the
folder `orders` of the home (see `order`): a job whose lock is held is alive, a job with an exit.json is over,
and a job with neither has lost all its processes.

No two workers use a slot at once: a job is told to grow only when the workers of other jobs have left the
slots. `Site` is where the workers live. `job_state` decides what is to be done for a job, and `JobListener`
takes in what jobs say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from swell.domain import Cluster, Placement
from swell.engines import groups, parts
from swell.engines.accounts import Account
from swell.engines.base import NOTHING_HELD, EngineReport, Held, Launch, Observed, drain
from swell.engines.border import BadMessage, confined, read_beat, read_event
from swell.engines.job_state import NOTE_END_S, JobStage, Outcome, Said, Step
from swell.engines.order import EXIT, START, LeaderFence, folder_of, make_folder, started
from swell.engines.parts import Part
from swell.engines.processes import sweep
from swell.engines.supervised_job import STOP, SupervisedJob, story_of
from swell.train.agent import outputs
from swell.train.agent.children import Child, Forked
from swell.train.agent.polling import readable
from swell.train.agent.protocol import Exited, Resize
from swell.train.agent.wire import Message

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
            log.exception("job %s; what happened to it last:\n%s", job.job_id, "\n".join(job.state.story()))


class SupervisedEngine:
    """Runs each job as a process tree of its own, with workers on a site."""

    def __init__(self, site: Site) -> None:
        self.name = site.name
        self.site = site
        self.may_act: Callable[[], bool] = lambda: True
        """Whether this control plane leads. If it does not, jobs are left to the one that does."""
        self.fence: LeaderFence | None = None
        """Which leader this control plane is; None if there can be no other."""
        self._jobs: dict[str, SupervisedJob] = {}
        self._reserved: frozenset[int] = frozenset()
        """The slots that services hold."""
        self._gives_way: tuple[str, Placement] | None = None
        """A job that gives way in this turn, because jobs wait for each other's slots, and what it keeps."""
        self._lock = threading.RLock()
        """Held for every change of `_jobs` and of a job's wanted slots; never held while waiting."""
        self._listener = JobListener(site.cluster, self._lock)
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
        return [self._part]

    def reports(self) -> Iterator[EngineReport]:
        """What jobs reported since the last call."""
        return self._listener.reports()

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's output from an offset."""
        try:
            return outputs.read(job_dir / outputs.FILE, offset, limit)
        except OSError:
            return b"", offset  # nothing was printed yet, or the job put something else there

    def story(self, job_id: str, job_dir: Path) -> list[str]:
        """The last transitions of the job here and in its coordinator; the latter while that answers."""
        with self._lock:
            job = self._jobs.get(job_id)
            own = [] if job is None else job.state.story()
            up = job is not None and job.state.up
        return [f"engine: {one}" for one in own] + [
            f"coordinator: {one}" for one in (story_of(job_dir) if up else [])
        ]

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
        if job.state.stage is JobStage.STOPPING:  # the coordinator may be a new one that was not told to stop
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
            (folder_of(job.directory) / START).unlink(missing_ok=True)
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


# Which job gives way when jobs wait for each other's slots in a circle. Pure.
#
# A job keeps its slots until it has others, so jobs that exchange all of their slots would wait for ever.
# Then one job gives way. If it can, it shrinks: it keeps whole replicas, if possible on slots that nobody
# in the circle waits for. Only where no job can shrink by enough, one saves its state and stops, and is
# started again on the slots that it is to have. Once a job of the circle is on slots that it is to have, it
# never leaves them for another one, so each turn of this brings at least one job nearer, and a circle has
# an end.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanger:
    """A job that runs, the slots it was last told to use, and those it is to have."""

    job_id: str
    told: Placement
    wanted: Placement
    """Those of its wanted slots that workers can be on."""
    size: int = 1
    """How many workers a replica has: the fewest that the job can go on with."""
    able: bool = True
    """Whether it can be told anything now."""


def give_way(jobs: Sequence[Exchanger]) -> tuple[str, Placement] | None:
    """The job that gives way, and the slots that it keeps; () if it has to stop. None without a circle.

    `jobs`: those that are on none of the slots that they are to have.
    """
    circle = _circle(jobs)
    asked = {slot for job in circle for slot in job.wanted}
    able = [job for job in circle if job.able and asked.intersection(job.told)]
    if not able:
        return None
    smaller: list[tuple[Exchanger, Placement]] = [(job, _kept(job, circle)) for job in able]
    shrink = [(job, keeps) for job, keeps in smaller if len(keeps) < len(job.told)]
    stop: list[tuple[Exchanger, Placement]] = [
        (job, ()) for job in sorted(able, key=lambda job: len(job.told))
    ]
    helpful = (option for option in [*shrink, *stop] if _helps(*option, circle))
    job, keeps = next(helpful, stop[0])
    return job.job_id, keeps


def _circle(jobs: Sequence[Exchanger]) -> list[Exchanger]:
    """The jobs that wait for slots of each other and of nobody else: none of them can ever move."""
    holders = {slot: job.job_id for job in jobs for slot in job.told}
    stuck = {job.job_id: job for job in jobs if job.wanted}
    while True:
        moving = [
            job
            for job in stuck.values()
            if sum(holders.get(slot) not in stuck for slot in job.wanted) >= min(job.size, len(job.wanted))
        ]
        if not moving:
            return sorted(stuck.values(), key=lambda job: job.job_id)
        for job in moving:
            del stuck[job.job_id]


def _kept(job: Exchanger, circle: Sequence[Exchanger]) -> Placement:
    """What a job keeps that shrinks as far as the others need it."""
    asked = {slot for other in circle if other is not job for slot in other.wanted}
    first = sorted(job.told, key=lambda slot: slot in asked)
    spare = sum(slot not in asked for slot in job.told)
    return tuple(sorted(first[: max(spare - spare % job.size, job.size)]))


def _helps(job: Exchanger, keeps: Placement, circle: Sequence[Exchanger]) -> bool:
    """Whether another job of the circle can move once this one keeps no more than that."""
    held = {slot for other in circle if other is not job for slot in other.told} | set(keeps)
    return any(
        sum(slot not in held for slot in other.wanted) >= min(other.size, len(other.wanted))
        for other in circle
        if other is not job
    )


# What jobs say of themselves, on its way from their coordinators to the control plane.
#
# Every message is checked at the border. What fails there, or is more than a job may say, counts against that
# job and disturbs no other.


class JobListener:
    """Reads the messages of jobs, and keeps their reports until the control plane takes them."""

    def __init__(self, cluster: Callable[[], Cluster], lock: AbstractContextManager[object]) -> None:
        """`lock` is held for every change of a job's state."""
        self._cluster, self._lock = cluster, lock
        self._reports: deque[EngineReport] = deque(maxlen=100_000)
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new for the control plane."""

    def reports(self) -> Iterator[EngineReport]:
        """What jobs reported since the last call."""
        return drain(self._reports)

    def read(self, job: SupervisedJob) -> None:
        """Take in the messages of a job that have arrived."""
        for message in job.line.pending():
            try:
                if message.get("type") == "report":
                    self._take_report(job, message.get("report"))
                elif message.get("type") == "event":
                    self._take_event(job, message)
            except BadMessage as error:
                job.complain(f"sent something that is not a message of a job: {error}")

    def read_last(self, job: SupervisedJob) -> None:
        """Take in the last messages of a job whose supervisor has ended, until its connection is closed."""
        while job.line.connection is not None and readable([job.line.connection], 0.0):
            self.read(job)

    def take_outcome(self, job: SupervisedJob, outcome: Outcome | None) -> Outcome | None:
        """Hand on the last report of a job that has ended, before anybody sees the end; returns `outcome`.

        A job may end before anybody has connected to it, so its supervisor keeps that report.
        """
        if outcome is not None and outcome.report:
            try:
                beat = read_beat(outcome.report)
            except BadMessage as error:
                job.complain(f"left a last report that is none: {error}")
            else:
                if beat.rank == 0 and beat.progress != job.progress:
                    self._hand_on(job, "progress", beat.progress)
        return outcome

    def report(self, job: SupervisedJob, said: list[Said]) -> None:
        """Hand on to the control plane what a job said, or what is to be said of it."""
        for kind, data in said:
            if not job.allowance.take():
                job.complain("reports more than the platform listens to; the rest is dropped")
                continue
            if kind in ("started", "resized"):
                job.state.logged = data["gpus"]
            self._hand_on(job, kind, data)

    def _hand_on(self, job: SupervisedJob, kind: str, data: dict[str, Any]) -> None:
        if kind == "progress":
            job.progress = data
        self._reports.append(EngineReport(job_id=job.job_id, time_s=parts.now_s(), kind=kind, data=data))
        self.wake()

    def _take_event(self, job: SupervisedJob, message: Message) -> None:
        event = read_event(message, len(self._cluster().node_of_gpu))
        with self._lock:
            said = job.state.happened(event)
        if isinstance(event, Exited):
            self.wake()  # a service may wait for the slot
        self.report(job, said)

    def _take_report(self, job: SupervisedJob, raw: object) -> None:
        beat = read_beat(raw)
        if beat.rank != 0 or not job.state.trains:
            return
        job.state.progressed()
        self.report(job, [("progress", beat.progress)])
        if beat.timing is not None:
            cluster = self._cluster()
            there = tuple(slot for slot in job.state.wanted if slot < len(cluster.node_of_gpu))
            nodes = max(len(cluster.nodes_of(there)), 1)
            self.report(job, [("timing", beat.timing | {"nodes": nodes})])
        if beat.noise is not None:
            self.report(job, [("noise", beat.noise)])


# Where the workers of an engine live: this machine (`local`) or a Ray cluster (`ray.site`).
#
# `SupervisedEngine` tends jobs in the same way on both. It asks its site for all that differs: the slots
# there are, who may start there, and how a job's supervisor is started.


class Site(Protocol):
    """`cluster` and `check` are called from any thread; all else, once it is open, from the engine's."""

    name: str
    home: Path

    def prepare(self) -> None:
        """Begin with what takes long and touches no job, for a control plane that may have to lead soon."""

    def open(self, poke: Callable[[], None]) -> None:
        """Get ready for jobs; raises SwellError if there can be none. `poke`, called from any thread, has the
        engine take a turn now."""

    def close(self) -> None:
        """Stop watching. Jobs go on."""

    def look(self, jobs: Sequence[SupervisedJob], now_s: float) -> bool:
        """Called in every turn of the engine, with all of its jobs: keep helpers of the site alive, and see
        what has changed. True if the nodes have changed, or which slots other users hold."""

    # -- the slots ---------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The present nodes and slots."""

    def usable(self, slots: Placement) -> Placement:
        """Those of the slots that workers can be on now."""

    def retired(self) -> frozenset[int]:
        """Slots that jobs have to leave, because what they are made of belongs to other slots now."""

    # -- the jobs ----------------------------------------------------------------------------------------

    def check(self, launch: Launch) -> None:
        """Raise InputError for a job that could never run here; called before a job is accepted."""

    def account(self, owner: str) -> Account | None:
        """The account that jobs of this user run as; None for the platform's own."""

    def may_start(self, job: SupervisedJob) -> bool:
        """Whether processes of a job that has none may be started now."""

    def order_extras(self) -> dict[str, Any]:
        """What the order for a job's supervisor says of this site."""

    def start_supervisor(self, job: SupervisedJob) -> Child:
        """Start the supervisor of a job, as the job's account."""

    def abandoned(self, job: SupervisedJob) -> bool:
        """Whether a job that has processes belongs to an earlier run of this site, which will not return."""

    def sweep(self, job: SupervisedJob) -> bool:
        """Kill what is left of a job whose supervisor has ended; False if some of it is still ending."""
