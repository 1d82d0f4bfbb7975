"""What an engine keeps of one job under a supervisor: its wanted slots, its connection, its workers."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swell.domain import Placement
from swell.engines.accounts import Account
from swell.engines.base import Launch, Observed, RunState
from swell.engines.border import BadMessage, Confined, JobEvent, read_status
from swell.engines.order import Order
from swell.engines.supervisor import STOPPED, is_locked
from swell.train.agent.children import Child
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.regular import read_regular
from swell.train.agent.wire import Connection, Message

log = logging.getLogger(__name__)

CONNECT_EVERY_S = 0.2
SLOWEST_CONNECT_S = 30.0
ANSWER_S = 1.0
"""Longest wait for a coordinator's answer, because other jobs wait meanwhile; it is tried again later."""
NOTE_END_S = 60.0
"""How long the control plane is given to note that a job has ended, or to start it again if it was killed,
before its slots go to another one all the same. A control plane that is frozen may need as long."""
MOVE_S = 0.6
"""How long a job may take to move off slots that services want, all its workers at once."""
UNBORN_S = 60.0
"""For this long after its start a job that says nothing counts as one that has not trained yet."""
MOST_REASON = 4000
"""Longest reason of a job's end, in characters."""
MOST_WORKERS = 200_000
"""Most workers, present and former, that one run of a job may claim to have had."""
COMPLAIN_EVERY_S = 60.0
"""The server's log gets at most one line about a misbehaving job in this time."""
STOP: Message = {"type": "stop", "save": True}
"""Tells a coordinator to have its job save its state and stop."""
END: Message = {"type": "stop", "code": 143}
"""Tells a coordinator to end its job at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    code: int
    reason: str

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """The outcome that the supervisor wrote to exit.json; None if the supervisor was killed."""
        try:
            content = json.loads(read_regular(directory / "exit.json"))
            code, reason = int(content["code"]), str(content["reason"])[:MOST_REASON]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None
        if reason == STOPPED:
            return cls(RunState.STOPPED, code, reason)
        return cls(RunState.FINISHED if code == 0 else RunState.FAILED, code, reason)


@dataclass(slots=True)
class Allowance:
    """How many reports of one job are listened to: `rate` per second, and `most` in a burst."""

    rate: float = 20.0
    most: float = 400.0
    _left: float = 400.0
    _at_s: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether one more report is listened to."""
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._at_s) * self.rate, self.most)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(slots=True)
class SupervisedJob:
    """One job. Only the engine's thread changes it, under the engine's lock where other threads look."""

    job_id: str
    directory: Path
    launch: Launch | None = None
    account: Account | None = None
    """The account that the job runs as; None for the platform's own."""
    order: Order | None = None
    """The content of the job's start.json: what its supervisor was last told to run."""
    wanted: Placement = ()
    """The slots that `apply` last asked for."""
    wanted_s: float = 0.0
    """When `apply` asked for them."""
    told: Placement = ()
    """The slots that the coordinator was last told to have workers on."""
    told_s: float = float("-inf")
    logged: Placement = ()
    """The slots that the event log was last told of."""
    live: dict[str, int | None] = field(default_factory=dict)
    """The workers that have a process, with their slots, as the job reports them."""
    ready: set[str] = field(default_factory=set)
    """Those of the live workers that have reported to the coordinator."""
    members: set[str] = field(default_factory=set)
    """Those of the live workers that belong to the current generation."""
    former: set[str] = field(default_factory=set)
    """Workers that are or once were members."""
    left_out: str = ""
    """The last worker that others went on without because of a cut link."""
    confined: Confined | None = None
    """Set if the coordinator said, when the connection was made, that the job cannot use more workers."""
    connection: Connection | None = None
    fresh: bool = False
    """Set until the coordinator of this new connection has been sent the current target."""
    child: Child | None = None
    """The supervisor, if this engine started it."""
    alive: bool = False
    state: RunState = RunState.STARTING
    outcome: Outcome | None = None
    started_s: float = float("-inf")
    tried_s: float = float("-inf")
    slow: int = 0
    """How many attempts in a row to connect to the coordinator ended by its silence."""
    stop_by_s: float | None = None
    """If the job was asked to save its state and stop: when it is killed."""
    kept_until_s: float = float("-inf")
    """Until when the slots of a job that has ended are still its own."""
    ending: bool = False
    """Whether the job is to be ended for good."""
    end_by_s: float | None = None
    """If the supervisor was asked to end: when it is killed."""
    allowance: Allowance = field(default_factory=Allowance)
    complaints: int = 0
    """How often the job did or said something that the platform cannot use."""
    complained_s: float = float("-inf")

    @classmethod
    def found(cls, directory: Path) -> SupervisedJob:
        """A job that an earlier engine started."""
        order = Order.read(directory)
        job = cls(order.launch.job_id, directory, launch=order.launch, order=order)
        if is_locked(directory):
            job.alive, job.wanted, job.told = True, order.placement, order.slots
        else:
            job.outcome = Outcome.read(directory)  # if the job is to run again, `apply` will say so
        return job

    # -- what others see ---------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Whether a supervisor that this engine started runs, though it may not hold the job's lock yet."""
        return self.child is not None and self.child.poll() is None

    @property
    def present(self) -> bool:
        """Whether `observe` lists the job: it is alive, waits for slots, or its outcome is known."""
        return self.alive or bool(self.wanted) or self.outcome is not None

    @property
    def runs_any_command(self) -> bool:
        """Whether the job runs any program (docs/any-command.md), which need not report anything."""
        return self.launch is not None and self.launch.request.command

    @property
    def over(self) -> bool:
        """Whether the job's script has ended, so that it must not be started again."""
        return self.outcome is not None and self.outcome.state is not RunState.STOPPED

    @property
    def slots(self) -> set[int]:
        """The slots on which the job has or was told to have workers.

        A job that has ended keeps them until the control plane had time to note the end, and one that was
        killed until it had time to start it again. One that shrinks keeps those that it leaves until its
        workers are gone and the log says so. So the event log never shows a slot in two hands.
        """
        if not self.alive and time.monotonic() > self.kept_until_s:
            return set()
        return {*self.told, *self.logged, *self.occupied(self.live)}

    @property
    def shown(self) -> Placement:
        """The slots that the event log is to show: those of the members or, before there are any, those that
        the job was told to use."""
        return self.occupied(self.members) if self.members else self.told

    def unborn(self, now_s: float) -> bool:
        """Whether this engine started the job a moment ago and no worker of it has trained yet.

        Of a job that another engine started this is not known, because its reports went there.
        """
        young = self.child is not None and now_s - self.started_s < UNBORN_S
        silent = not self.former and not self.runs_any_command
        return young and silent and self.state in (RunState.STARTING, RunState.STOPPING)

    @property
    def left(self) -> set[int]:
        """The slots on which workers that are no longer members still have a process."""
        return set(self.occupied(self.former - self.members))

    def stranded(self, reserved: frozenset[int], granted: Placement, now_s: float) -> bool:
        """Whether the job has to stop because services want all slots that its workers are on.

        A job that keeps a worker elsewhere just shrinks, in one step. This one has to start a worker on
        another slot first. It may try for MOVE_S, if it was granted such a slot already.
        """
        on = set(self.shown)
        if not on or not on <= reserved or reserved.intersection(self.wanted):
            return False
        return reserved.issuperset(granted) or now_s - self.wanted_s > MOVE_S

    def observed(self) -> Observed:
        """The job as the control plane sees it."""
        if self.outcome is not None:
            end = self.outcome
            return Observed(job_id=self.job_id, state=end.state, exit_code=end.code, reason=end.reason)
        return Observed(
            job_id=self.job_id, state=self.state, placement=self.occupied(self.live), target=self.wanted
        )

    def occupied(self, workers: Collection[str]) -> Placement:
        """The known slots of these workers."""
        slots = (self.live.get(name) for name in workers)
        return tuple(sorted(slot for slot in slots if slot is not None))

    def complain(self, about: str) -> bool:
        """Count something that is wrong with this job; True if the log got a line about it."""
        self.complaints += 1
        now_s = time.monotonic()
        if now_s - self.complained_s < COMPLAIN_EVERY_S:
            return False
        self.complained_s = now_s
        log.warning("job %s: %s (%d so far)", self.job_id, about, self.complaints)
        return True

    def whole_replicas(self, granted: Placement) -> Placement:
        """Of these slots as many as whole replicas need, those that the job uses already first."""
        size = 1 if self.launch is None else self.launch.request.workers_per_replica
        if len(granted) % size == 0:
            return granted
        first = [*(s for s in granted if s in self.told), *(s for s in granted if s not in self.told)]
        return tuple(sorted(first[: len(granted) - len(granted) % size]))

    # -- its life ----------------------------------------------------------------------------------------

    def write_order(self, granted: Placement, most: int, extras: dict[str, Any]) -> None:
        """Write start.json for the job's supervisor; `extras` is what the kind of engine adds."""
        assert self.launch is not None
        launch = replace(self.launch, max_workers=max(self.launch.max_workers, most))
        self.order = Order(launch=launch, slots=granted, placement=self.wanted, extras=extras)
        self.order.write(self.account)

    def note(self, slots: Placement) -> None:
        """Bring start.json up to date, for an engine that takes the job over: the wanted slots, and those
        that the coordinator is told."""
        order = self.order
        if order is not None and (order.slots, order.placement) != (slots, self.wanted):
            order = replace(order, slots=slots, placement=self.wanted)
            order.write(self.account)
            self.order = order

    def started(self, child: Child, granted: Placement, now_s: float) -> None:
        """Note that a supervisor was started on the granted slots."""
        self.child, self.started_s = child, now_s
        self.told, self.told_s, self.logged = granted, now_s, ()
        self.alive, self.state, self.outcome = True, RunState.STARTING, None
        self.stop_by_s = None
        self.live, self.ready, self.members, self.former = {}, set(), set(), set()

    def gone(self) -> None:
        """Note that the supervisor has ended."""
        self.disconnect()
        asked_to_stop = self.stop_by_s is not None
        self.alive, self.stop_by_s, self.child = False, None, None
        self.ready, self.members, self.former = set(), set(), set()
        self.outcome = Outcome.read(self.directory)
        if self.outcome is None and asked_to_stop:  # before it had trained, or it was killed as it stopped
            self.outcome = Outcome(RunState.STOPPED, 0, STOPPED)
        if self.outcome is None or self.over:
            self.told = tuple(sorted({*self.told, *self.occupied(self.live)}))
            self.kept_until_s = time.monotonic() + NOTE_END_S
        else:
            self.told = self.logged = ()
        self.live = {}
        if self.outcome is not None and self.outcome.state is RunState.STOPPED and self.wanted:
            self.outcome = None  # the job was wanted again while it stopped
        else:
            self.wanted = ()  # if the job is to run again, `apply` will say so

    def follow(self, event: JobEvent) -> None:
        """Keep track of the job's workers, from an event of its log."""
        if len(self.live) + len(self.former) + len(event.members) > MOST_WORKERS:
            raise BadMessage(f"the job says it has had more than {MOST_WORKERS} workers")
        if event.kind == "spawn":
            self.live[event.worker] = event.slot
        elif event.kind == "exited":
            self.live.pop(event.worker, None)
            self.ready.discard(event.worker)
        elif event.kind == "ready":
            self.ready.add(event.worker)
        elif event.kind == "generation":
            self.members = set(event.members)
            self.former |= self.members

    # -- its coordinator ---------------------------------------------------------------------------------

    def connect(self, now_s: float, slots: int, fencing: int | None = None) -> bool:
        """Connect to the job's coordinator if it is up; True if a connection was made now.

        `slots`: how many slots the cluster has. `fencing`: the fencing number of this control plane.
        """
        if self.connection is not None or now_s - self.tried_s < self._patience_s():
            return False
        self.tried_s, began_s = now_s, time.monotonic()
        runs = sorted((self.directory / "runs").glob("*"))
        if not runs:
            return False
        run = JobDirectory(runs[-1])
        connection = None
        try:
            connection = Connection.to_job(run.address(), run.config(), timeout_s=ANSWER_S)
            connection.limit_sending(ANSWER_S)
            hello = {"type": "hello", "role": "tool", "fencing": fencing}
            status = read_status(connection.request(hello, ANSWER_S), slots)
            connection.request({"type": "watch"}, ANSWER_S)
        except (OSError, TrainError, ValueError, KeyError, TypeError, AttributeError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, BadMessage):
                self.complain(str(error))
            self.slow += time.monotonic() - began_s > ANSWER_S / 2
            return False
        self.slow = 0
        self.live = dict(status.slots)
        self.ready = {name for name, state in status.workers.items() if state != "starting"}
        self.members = set(status.members)
        self.confined = status.confined
        self.former |= self.members | {n for n, s in status.workers.items() if s == "leaving"}
        self.connection, self.fresh = connection, True
        if self.stop_by_s is not None:  # the coordinator may be a new one that was not told to stop
            self.send(STOP)
        return True

    def _patience_s(self) -> float:
        """How long to wait between two attempts to connect.

        Other jobs wait meanwhile, so a coordinator that is there but does not answer is tried less and less.
        """
        return min(CONNECT_EVERY_S * 2**self.slow, SLOWEST_CONNECT_S)

    def send(self, message: Message) -> bool:
        """Send the coordinator a message; False if the connection is lost."""
        assert self.connection is not None
        try:
            self.connection.send(message)
        except OSError:
            self.disconnect()
            return False
        return True

    def disconnect(self) -> None:
        """Close the connection to the coordinator, if there is one."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.close()
            self.connection = None
