"""What an engine has to do next for one job under a supervisor: a state machine without clock or I/O.

Events go in (a wish of the control plane, an event of the job's own log, the end of its processes), and come
back as reports for the control plane. `next_steps` says what the engine is to do now:

    DOWN      -- the engine starts its supervisor, or finds one --> STARTING
    STARTING  -- the job reports progress --------------------------> RUNNING
    RUNNING   -- no member has a process any more ------------------> STARTING
    STARTING, RUNNING -- no slots are wanted, or it has to move ----> STOPPING
    STARTING, RUNNING, STOPPING -- it is to be ended for good ------> ENDING
    all others -- its supervisor has ended -------------------------> DOWN
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct

from swell.domain import Placement
from swell.engines.base import Observed, RunState
from swell.engines.border import BadMessage, confined, told
from swell.engines.processes import how_ended
from swell.engines.supervisor import STOPPED
from swell.train.agent import protocol
from swell.train.agent.story import Past, transition

STOP_GRACE_S = 60.0
"""A job that was asked to save its state and stop is killed after this long."""
END_GRACE_S = 8.0
"""A supervisor that was asked to end (SIGTERM) is killed after this long."""
CIRCLE_S = 1.0
"""How long jobs that wait for each other's slots do so before one gives way: wishes come one by one."""
HANDOVER_S = 3.0
"""How long a job waits for all of its wanted slots before it starts on those that are free."""
RESTART_S = 0.5
"""Least time between two attempts to start a job's processes."""
NOTE_END_S = 60.0
"""How long the control plane is given to note that a job has ended, or to start it again if it was killed,
before its slots go to another one all the same. A control plane that is frozen may need as long."""
MOVE_S = 0.6
"""How long a job may take to move off slots that services want, all its workers at once."""
UNBORN_S = 60.0
"""For this long after its start a job that says nothing counts as one that has not trained yet."""
MOST_WORKERS = 200_000
"""Most workers, present and former, that one run of a job may claim to have had."""
NEVER_S = float("-inf")

Said = tuple[str, dict[str, Any]]
"""The kind and the data of a `Report`."""


class JobStage(Enum):
    """Where a job's processes are in their life."""

    DOWN = "down"
    """The job has no processes: it waits for slots, was stopped or killed, or is over."""
    STARTING = "starting"
    """Its supervisor runs, and no worker has reported progress yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was asked to stop, and to save its state first if it has one; it is killed at `kill_s`."""
    ENDING = "ending"
    """Its supervisor was asked to end; it is killed at `kill_s`."""


_SEEN_AS = {JobStage.RUNNING: RunState.RUNNING, JobStage.STOPPING: RunState.STOPPING}


class Step(Enum):
    """Something that the engine is to do for a job now."""

    START = "start"
    """Start its supervisor on the slots that it is granted."""
    READ_OUTCOME = "read outcome"
    """See whether it has run and ended since the engine last looked."""
    CONNECT = "connect"
    """Connect to its coordinator, unless there is a connection."""
    SEND_TARGET = "send target"
    """Send its coordinator the slots that it is to have workers on."""
    TERMINATE = "terminate"
    KILL = "kill"
    FORGET = "forget"
    """End what is left of its processes, and forget the job."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    code: int
    reason: str
    report: object = None
    """The leader's last report as it was written, which `border` has to check; None if there is none."""


@dataclass(slots=True)
class ReportedWorkers:
    """The workers of one run of a job, as it reports them."""

    live: dict[str, int | None] = field(default_factory=dict)
    """The workers that have a process, with their slots."""
    members: set[str] = field(default_factory=set)
    """Those of the live workers that belong to the current generation."""
    former: set[str] = field(default_factory=set)
    """Workers that are or once were members."""
    left_out: str = ""
    """The last worker that others went on without because of a cut link."""
    parted: frozenset[str] = frozenset()
    """The workers of the last replica that was given up because they did not reach each other."""

    def slots(self, names: Collection[str]) -> Placement:
        """The known slots of these workers."""
        slots = (self.live.get(name) for name in names)
        return tuple(sorted(slot for slot in slots if slot is not None))

    @property
    def leaving(self) -> set[int]:
        """The slots on which workers that are no longer members still have a process."""
        return set(self.slots(self.former - self.members))

    def follow(self, event: Struct | None) -> None:
        """Keep track of the workers, from an event of the job's log."""
        joined = event.members if isinstance(event, protocol.Began) else ()
        if len(self.live) + len(self.former) + len(joined) > MOST_WORKERS:
            raise BadMessage(f"the job says it has had more than {MOST_WORKERS} workers")
        match event:
            case protocol.Spawn(worker, slot):
                self.live[worker] = slot
            case protocol.Exited(worker):
                self.live.pop(worker, None)
            case protocol.Began(members):
                self.members = set(members)
                self.former |= self.members


@dataclass(slots=True)
class JobState:
    """What is wanted of a job, where it is in its life, and which slots are its own. Times are monotonic."""

    wanted: Placement = ()
    """The slots that the control plane last asked for. Without processes, a job that wants slots has no
    outcome: it is to run."""
    wanted_s: float = 0.0
    """When the control plane asked for them."""
    to_end: bool = False
    """Whether the job is to be ended for good."""
    stage: JobStage = JobStage.DOWN
    kill_s: float = NEVER_S
    """When a job that stops or ends is killed."""
    started_s: float = NEVER_S
    """When this engine started the job's supervisor; never if another engine started the present one."""
    outcome: Outcome | None = None
    """How the last run ended; None while the job runs, and if it was killed."""
    told: Placement = ()
    """The slots that the coordinator was last told to have workers on."""
    fresh: bool = False
    """Set until the coordinator of this new connection has been sent the current target."""
    logged: Placement = ()
    """The slots that the event log was last told of."""
    kept_until_s: float = NEVER_S
    """Until when the slots of a job that has ended are still its own."""
    workers: ReportedWorkers = field(default_factory=ReportedWorkers)
    past: Past = field(default_factory=Past, compare=False, repr=False)

    def story(self) -> list[str]:
        """The last events and what was reported of each, the oldest first."""
        return self.past.lines()

    def validate(self) -> None:
        """Raise AssertionError, with the story, if an invariant does not hold."""
        for broken, what in (
            (self.up and self.outcome is not None, "a job that has ended has processes"),
            (self.over and bool(self.wanted), "slots are wanted of a job that is over"),
            (not self.workers.members <= self.workers.former, "a member never was one"),
            (len(set(self.told)) < len(self.told), "a slot was told twice"),
            (len(set(self.wanted)) < len(self.wanted), "a slot is wanted twice"),
        ):
            assert not broken, "\n".join([what, *self.story()])

    # -- what others see ---------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether the job has processes."""
        return self.stage is not JobStage.DOWN

    @property
    def trains(self) -> bool:
        """Whether the job has processes and nobody asked it to stop or end."""
        return self.stage in (JobStage.STARTING, JobStage.RUNNING)

    @property
    def over(self) -> bool:
        """Whether the job's script has ended, so that it must not be started again."""
        return self.outcome is not None and self.outcome.state is not RunState.STOPPED

    @property
    def shown(self) -> Placement:
        """The slots that the event log is to show: those of the members or, before there are any, those that
        the job was told to use."""
        return self.workers.slots(self.workers.members) if self.workers.members else self.told

    def slots(self, now_s: float) -> set[int]:
        """The slots on which the job has or was told to have workers.

        A job that has ended keeps them until the control plane had time to note the end, and one that was
        killed until it had time to start it again. One that shrinks keeps those that it leaves until its
        workers are gone and the log says so. So the event log never shows a slot in two hands.
        """
        if not self.up and now_s > self.kept_until_s:
            return set()
        return {*self.told, *self.logged, *self.workers.slots(self.workers.live)}

    def observed(self, job_id: str) -> Observed | None:
        """The job as the control plane sees it; None if it was killed, or is to be ended for good."""
        end = self.outcome
        if self.to_end or not (self.up or self.wanted or end):
            return None
        if end is not None:
            return Observed(job_id=job_id, state=end.state, exit_code=end.code, reason=end.reason)
        placement = self.workers.slots(self.workers.live)
        state = _SEEN_AS.get(self.stage, RunState.STARTING)
        return Observed(job_id=job_id, state=state, placement=placement, target=self.wanted)

    # -- events ------------------------------------------------------------------------------------------

    @transition
    def wish(self, slots: Placement, now_s: float) -> list[Said]:
        """Take in which slots the control plane wants the job to have."""
        if not slots and not self.up and not self.over:
            self.told = self.logged = ()  # the control plane knows that it has no slots any more
        if self.wanted == slots or self.over:
            return []  # nothing new, or the job is over and the control plane has not seen that yet
        was_to_stop = not self.wanted
        self.wanted, self.wanted_s = slots, now_s
        if not self.up:
            self.outcome = None  # the job was stopped before, and is to go on
        if self.trains and was_to_stop and self.told:
            # It was to stop, and has not been told yet: it goes on as it is, and the log says so.
            return [("started", {"gpus": self.shown, "pause_s": 0.0})]
        return []

    @transition
    def started(self, granted: Placement, now_s: float) -> list[Said]:
        """Note that the engine started a supervisor on the granted slots."""
        self.stage, self.outcome, self.started_s = JobStage.STARTING, None, now_s
        self.told, self.logged, self.workers = granted, (), ReportedWorkers()
        return [("started", {"gpus": granted})]

    @transition
    def found_running(self) -> None:
        """Note that a supervisor runs which this engine did not start."""
        self.stage, self.outcome, self.started_s = JobStage.STARTING, None, NEVER_S

    @transition
    def connected(self, status: protocol.JobStatus) -> None:
        """Take in what the coordinator answered to a new connection."""
        workers, processes = self.workers, status.processes or {}
        workers.live = dict(processes)
        workers.members = set(status.members)
        workers.former |= workers.members | {n for n, s in status.workers.items() if s == "leaving"}
        workers.former |= processes.keys() - status.workers.keys()  # given up, and not ended yet
        self.fresh = True

    @transition
    def progressed(self) -> None:
        """Note that the job reported progress."""
        if self.stage is JobStage.STARTING:
            self.stage = JobStage.RUNNING

    @transition
    def happened(self, event: Struct | None) -> list[Said]:
        """Take in an event of the job's own log; returned is what the control plane has to know of it."""
        workers = self.workers
        first, members = not workers.former, frozenset(workers.members)
        workers.follow(event)
        gpus = workers.slots(workers.members)
        match event:
            case protocol.Began() if first:  # the job may have begun with fewer workers than are wanted
                return [("resized", {"pause_s": 0.0, "gpus": gpus})]
            case protocol.Switch(pause_s) | protocol.Recovery(pause_s) if pause_s is not None:
                return [("resized", {"pause_s": pause_s, "gpus": gpus})]
            case protocol.Exited(worker, code):
                if self.stage is JobStage.RUNNING and not workers.members & workers.live.keys():
                    self.stage = JobStage.STARTING
                if worker in members and code < 0 and self.trains:
                    return [("worker_lost", {"worker": worker, "reason": how_ended(code)})]
            case protocol.LeftOut(worker) if worker in members:
                workers.left_out = worker
                return [("worker_lost", {"worker": worker, "reason": told(event)})]
            case protocol.Parted(replica):
                workers.parted = frozenset(replica)
            case protocol.GaveUp(worker) if worker in members - workers.parted - {workers.left_out}:
                reason = "the worker did not answer and was given up"
                return [("worker_lost", {"worker": worker, "reason": reason})]
            case protocol.Confined(most, reason):
                return [confined(most, reason)]
            case protocol.Checkpoint(step):
                return [("checkpoint", {"step": step})]
        said: list[Said] = [("noticed", {"text": text})] if (text := told(event)) else []
        match event:
            case protocol.Straggler(worker, times, leader=False) if workers.live.get(worker) is not None:
                said.append(("slow", {"slot": workers.live[worker], "times": times}))
            case protocol.Unstartable(worker, _, cause) if workers.live.get(worker) is not None:
                said.append(("unstartable", {"slot": workers.live[worker], "cause": cause}))
        return said

    @transition
    def gone(self, outcome: Outcome | None, now_s: float) -> list[Said]:
        """Note that the supervisor has ended; `outcome`: what it wrote, None if it was killed."""
        said: list[Said] = []
        if (
            outcome is None and self.stage is JobStage.STOPPING
        ):  # before it had trained, or it was killed then
            outcome = Outcome(RunState.STOPPED, 0, STOPPED)
        if outcome is not None and outcome.state is RunState.STOPPED:
            if self.wanted:
                outcome = None  # the job is to go on; until it does, others may get its slots
                if self.logged:
                    said = [("resized", {"pause_s": 0.0, "gpus": ()})]
            self.told = self.logged = ()
        else:
            self.told = tuple(sorted({*self.told, *self.workers.slots(self.workers.live)}))
            self.kept_until_s = now_s + NOTE_END_S
            self.wanted = ()  # if the job is to run again, the control plane will say so
        self.stage, self.outcome, self.workers = JobStage.DOWN, outcome, ReportedWorkers()
        return said

    # -- what to do --------------------------------------------------------------------------------------

    def next_steps(self, now_s: float, *, silent: bool) -> tuple[Step, ...]:
        """What the engine is to do now. `silent`: the job's program need not report anything."""
        overdue = now_s > self.kill_s
        if not self.up:
            if self.to_end:
                return (Step.FORGET,)
            if self.wanted:
                return (Step.START,) if now_s - self.started_s >= RESTART_S else ()
            return () if self.outcome else (Step.READ_OUTCOME,)
        if self.stage is JobStage.ENDING:
            return (Step.KILL,) if overdue else ()
        if self.to_end:
            self.stage, self.kill_s = JobStage.ENDING, now_s + END_GRACE_S
            return (Step.TERMINATE,)
        unborn = not silent and self._unborn(now_s)
        if self.stage is JobStage.STOPPING:
            if unborn and not self.wanted:
                return (Step.KILL,) if overdue else ()
            return (Step.CONNECT, Step.KILL) if overdue else (Step.CONNECT,)
        if unborn and not self.wanted:  # it has no state to save, and others wait for its slots
            self.stage, self.kill_s = JobStage.STOPPING, now_s + END_GRACE_S
            return (Step.TERMINATE,)
        return Step.CONNECT, Step.SEND_TARGET

    def _unborn(self, now_s: float) -> bool:
        """Whether this engine started the job a moment ago and no worker of it has trained yet.

        Of a job that another engine started this is not known, because its reports went there.
        """
        young = now_s - self.started_s < UNBORN_S
        return young and not self.workers.former and self.stage is not JobStage.RUNNING

    def granted(
        self, usable: Placement, taken: Collection[int], reserved: Collection[int], now_s: float
    ) -> Placement:
        """The slots that the job may use now. `usable`: those of its wanted slots that workers can be on;
        `taken`: slots of other jobs; `reserved`: slots that services want."""
        free = tuple(slot for slot in usable if slot not in taken)
        has = self.told if self.up else ()
        has = tuple(slot for slot in has if slot not in reserved) or has
        if free == self.wanted or now_s - self.wanted_s > HANDOVER_S:
            return free or has
        # Other jobs still use some wanted slots. The job gives up its unwanted slots now, and gets the rest
        # of the wanted ones when they are free.
        return tuple(slot for slot in free if slot in has) or has

    def waits_for_others(self, now_s: float) -> bool:
        """Whether the job has been on none of its wanted slots for a moment."""
        disjoint = self.trains and self.wanted and self.told and set(self.told).isdisjoint(self.wanted)
        return bool(disjoint) and now_s - self.wanted_s > CIRCLE_S

    def next_target(
        self, granted: Placement, reserved: frozenset[int], now_s: float, *, leaves: bool = False
    ) -> Placement | None:
        """The slots to send to the coordinator now: () to have the job stop, None if there is nothing to say.

        A newer target simply replaces an older one. `leaves`: the job has to stop for others (`give_way`).
        """
        if not self.wanted or leaves or self.stranded(granted, reserved, now_s):
            self.stage, self.kill_s = JobStage.STOPPING, now_s + STOP_GRACE_S
            return ()
        if not granted or (granted == self.told and not self.fresh):
            return None
        # Workers of the job's own that are leaving may still use the slots.
        return None if self.workers.leaving.intersection(granted).difference(self.told) else granted

    def stranded(self, granted: Placement, reserved: frozenset[int], now_s: float) -> bool:
        """Whether the job has to stop because services want all slots that its workers are on.

        A job that keeps a worker elsewhere just shrinks, in one step. This one has to start a worker on
        another slot first. It may try for MOVE_S, if it was granted such a slot already.
        """
        on = set(self.shown)
        if not on or not on <= reserved or reserved.intersection(self.wanted):
            return False
        return reserved.issuperset(granted) or now_s - self.wanted_s > MOVE_S

    def unlogged(self) -> list[Said]:
        """Where the job is, if the event log shows it elsewhere: before it trains, after a report that was
        not listened to, or because it was resized while nobody listened."""
        settled = self.workers.members <= self.workers.live.keys() and self.trains
        if settled and self.logged and self.shown != self.logged:
            return [("resized", {"pause_s": 0.0, "gpus": self.shown})]
        return []
