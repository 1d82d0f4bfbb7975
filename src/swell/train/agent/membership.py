"""Who is a member of which generation: a pure state machine, events in, instructions out.

It has no clock, socket or disk: the coordinator passes in what happened (with the time) and carries out the
instructions it gets. Stop-free scaling follows EDL (TPDS'21): newcomers prepare while the others train. As in
CoDDL (NSDI'21, section 4), a newer request replaces an older one whose switch has not happened yet.

    starting --ready--> ready --(candidate switched)--> member --(candidate without it)--> leaving --> gone
        \\_______________ any of them may die: lost ______________________________________/

The file tells it from the parts to the whole: workers and generations, the instructions, how many workers on
which slots, how a job ends, how long it waits, and then `Membership`: what happens first, what follows from
it below. `reach` has which workers reach each other. `restarts` is the same for a job that runs any program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import Struct

from swell.train.agent.errors import FENCED, RESPAWN, Refused
from swell.train.agent.protocol import (
    Exited,
    Finish,
    Kill,
    LeftOut,
    NewcomerWaits,
    Returned,
    Spawn,
    Standstill,
    Status,
    age,
)
from swell.train.agent.reach import Pair, Reach, connected, pair
from swell.train.agent.story import Past, transition

SETTLE_S = 0.3
"""After a death no new worker is started for this long, so that the survivors recover undisturbed."""
SPARE_AFTER_S = 1.0
"""After a switch no spare is started for this long, so that the new generation trains undisturbed."""
AWAY_S = 1.0
"""No worker is started for this long after a slot was unreachable: the job may have lost it by then."""
FIRST_STEP = 6
"""How many times longer than `silent_after_s` a member may be silent before the first step is over."""
_SLEPT_S = 1.0
"""If the coordinator did not run for longer than this (a suspended machine, say), it heard no worker."""
LEAVE_S = 0.5
"""How long a worker that has left training may take to end by itself, in a job whose workers have slots."""
SHUT_S = 300.0
"""A slot on which no worker could be started is tried again after this long, or when the job is resized."""
CUT_OFF_S = 10.0
"""The same if the slot's node did not reach the job or does not answer: a link may soon be healed."""
MAX_FRUITLESS_DEATHS = 5
"""The job fails after this many workers have died in a row without a step in between."""

STOPPED = "stopped"
"""Reason of a job that was asked to save its state and end."""
FINISHED = "training is over"
"""Reason of a job whose script has run to its end."""

# ---------------------------------------------------------------------- workers and generations


@dataclass(slots=True)
class KnownWorker:
    """What is known of one worker process."""

    name: str
    status: Status
    seen_s: float
    ready_s: float = 0.0
    address: tuple[str, int] | None = None
    connected: bool = False
    done_at: int = 0
    """For a worker that is done: the first operation that it takes no part in."""
    slot: int | None = None
    """The slot of its process, in a job whose workers are given slots."""
    slow: bool = False
    """Whether it is to be replaced, because it is slower than the others."""
    leaving_s: float | None = None
    """For a worker that was a member and leaves: since when; None once it was killed for taking too long."""

    def leave(self, now_s: float) -> None:
        """Note that a member leaves; the time that it may take counts from the first word of it."""
        if self.status is not Status.LEAVING:
            self.status, self.leaving_s = Status.LEAVING, now_s


@dataclass(slots=True)
class Names:
    """The names of workers, numbered as they are started; none is used twice."""

    prefix: str = "w"
    """What the names begin with; "r" if the workers are replicas (see `replicas`)."""
    born: int = 0
    """How many names were given."""

    def new(self) -> str:
        """The name of a worker that is about to be started."""
        self.born += 1
        return f"{self.prefix}{self.born - 1}"


@dataclass(slots=True)
class GivenUp:
    """Workers that the job goes on without, and those that it will as soon as there is proof."""

    fenced: set[str] = field(default_factory=set)
    """Workers that must end if they are heard again."""
    accused: set[str] = field(default_factory=set)
    """Members of which a peer reported that their connection ended."""
    missing: dict[str, int | None] = field(default_factory=dict)
    """Members that were left out because of cut links, with their slots: others come in their place."""

    def fence(self, name: str) -> None:
        """Make sure that a worker cannot come back."""
        self.fenced.add(name)
        self.accused.discard(name)


@dataclass(slots=True)
class Generation:
    """The present generation. Invariants: members are alive and unique; numbers only grow."""

    number: int = 0
    members: list[str] = field(default_factory=list)
    leader: str = ""
    """The member that was first when the generation began: what it prints and saves is the job's result."""
    epoch: int = 0
    live: bool = False
    """True if there is (or was a moment ago) a generation with live state."""
    counter: int = 0
    """The highest number that a generation or a candidate has had."""

    def next_number(self) -> int:
        """A number for a candidate, which none has had."""
        self.counter = max(self.counter, self.number) + 1
        return self.counter


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation that begins when every member of the present one agrees to it at one step boundary."""

    number: int
    members: tuple[str, ...]
    recovery: bool = False
    """True if the present generation is broken, so that members enter this one at once."""
    epoch: int = 0
    """The epoch of its newcomers: members that are in another epoch must not switch to it."""


# -------------------------------------------------- instructions (and `Spawn`, `Kill`, `Finish`)


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell this worker that the job goes on without it, so that it ends."""

    worker: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell these workers about the candidate; None withdraws the earlier one."""

    candidate: Candidate | None
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tell a waiting newcomer that the job went on to another epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell these workers to save the job's state and leave at the next step."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Have these workers try whom of each other they reach, and say so."""

    number: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Add an event to the job's history."""

    event: Struct


@dataclass(frozen=True, slots=True)
class Begin:
    """Write down who is in this generation, before its processes are started (see `restarts`)."""

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Tell the processes of this generation to save their state and end."""

    number: int


Instruction = Spawn | Kill | Fence | Announce | Turn | Finish | Stop | Check | Say | Begin | Save


# ---------------------------------------------------------------------- how many workers, and where


def place(
    target: int, slots: list[int] | None, before: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """The slots of `target` workers; Refused if `slots` are not that many different ones.

    For a job that has slots, `slots` may be left out only if the number of workers does not grow.
    """
    if slots is not None:
        if len(set(slots)) != target or len(slots) != target:
            raise Refused(f"slots: got {slots}, need {target} different slots, one for each worker")
        return tuple(slots)
    if before is not None and len(before) < target:
        raise Refused(f"slots: this job has {len(before)}; to grow it to {target}, name {target} slots")
    return None if before is None else before[:target]


def open_slots(slots: tuple[int, ...] | None, members: list[KnownWorker]) -> list[int] | None:
    """The slots without a member; None for a job without slots."""
    taken = {member.slot for member in members}
    return None if slots is None else [slot for slot in slots if slot not in taken]


def newcomers(
    present: list[KnownWorker], free: list[int] | None, waiting: int, urgent: int
) -> tuple[list[int | None], list[KnownWorker]]:
    """Which slots need a new worker, and which of the waiting workers to stop.

    `present`: workers started but not yet members, best prepared first. `free`: slots without a member, or
    None for a job without slots. Such a job may have `waiting` workers, and needs `urgent` of them now.
    """
    if free is None:
        # The youngest, least prepared workers are stopped first.
        return [None] * (urgent - len(present)), present[waiting:][::-1]
    too_many: list[KnownWorker] = []
    still: list[int | None] = list(free)
    for worker in present:
        if worker.slot in still:
            still.remove(worker.slot)
        else:
            too_many.append(worker)
    return still, too_many


@dataclass(slots=True)
class Scale:
    """A job's bounds and its target. Invariant: the target is within the bounds."""

    minimum: int
    maximum: int
    target: int
    slots: tuple[int, ...] | None = None
    """The slots of the workers, one for each; None for a job without slots."""
    confined: str = ""
    """Why the job may have fewer workers than it was started with, or ''."""
    shut: dict[int, float] = field(default_factory=dict)
    """Slots on which no worker could be started, and when each is tried again."""

    def resize(self, target: int, slots: list[int] | None, *, over: bool) -> None:
        """Set the target, and its slots if the job has slots; Refused if that is not possible.

        `over`: the job has ended.
        """
        if not self.minimum <= target <= self.maximum:
            why = self.confined or f"it was started with --workers {self.minimum}:{self.maximum}"
            raise Refused(f"workers: got {target}, this job allows {self.minimum} to {self.maximum} ({why})")
        if over:
            raise Refused("the job is over and cannot be resized; start it again to go on")
        self.slots = place(target, slots, self.slots)
        self.target = target
        self.shut.clear()

    def shut_out(self, slot: int | None, cause: str, now_s: float) -> None:
        """Start no worker on this slot for a while."""
        if slot is not None:
            self.shut[slot] = now_s + (CUT_OFF_S if cause in ("link", "silent") else SHUT_S)

    def open(self, now_s: float) -> tuple[int, ...] | None:
        """The slots on which workers can be started now; None for a job without slots."""
        if self.slots is None:
            return None
        return tuple(slot for slot in self.slots if now_s >= self.shut.get(slot, now_s))

    def to_json(self) -> dict[str, Any]:
        """What outlives the coordinator; shut slots are simply tried again."""
        return {name: value for name, value in asdict(self).items() if name != "shut"}

    def confine(self, most: int, reason: str) -> bool:
        """Lower the maximum to `most`; True if the target is now too high."""
        self.maximum = max(self.minimum, min(most, self.maximum))
        self.confined = reason
        return self.target > self.maximum


# ---------------------------------------------------------------------- how a job ends


@dataclass(slots=True)
class Ending:
    """Whether the job goes on. A job that is being stopped may finish meanwhile; it is over once, for ever.

    running --(asked to save and end)-----> stopping --> over (stopped)
       |  \\--(the leader has run its script)--> finished --> over (training is over)
       \\--(too many fruitless deaths, a failed script, a request)--> over
    """

    stopping: bool = False
    """True once the job was asked to save its state and end."""
    finished: bool = False
    """True once the leader has run its whole script."""
    fruitless: int = 0
    """Deaths since the job last made progress."""
    result: Finish | None = None
    """How the job ended; None while it is not over."""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.result is not None

    def finish(self, code: int, reason: str) -> list[Finish]:
        """The job is over with this result; nothing if it was over before."""
        if self.result is not None:
            return []
        self.result = Finish(code, reason)
        return [self.result]


def ended_early(name: str, worker: KnownWorker) -> str:
    """Why a job is over in which a worker's script ended before the others', and what to do about it."""
    if worker.address is None:
        return (
            f"the script ended in worker {name} without ever calling swell.elastic(model, optimizer), so "
            "nothing can be made elastic. Add the call (see docs/how/runtime.md), try --auto, or use plain "
            "python"
        )
    return (
        f"worker {name}'s script ended before training was over. Let every worker run the loop "
        "`for epoch in job.epochs(n)` to its end, or leave it on all of them together with "
        "`if job.agree(...): break`"
    )


# ---------------------------------------------------------------------- how long a job waits


@dataclass(slots=True)
class Quiet:
    """Until when no worker is started, because those that train come first."""

    calm_s: float = 0.0
    """Before this time no worker is started."""
    settled_s: float = 0.0
    """Before this time no spare is started."""

    def after_loss(self, now_s: float) -> None:
        """A member is lost: the survivors come first."""
        self.calm_s = max(self.calm_s, now_s + SETTLE_S)

    def after_lost_slot(self, now_s: float) -> None:
        """A slot cannot be reached: the job may be told to leave it."""
        self.calm_s = now_s + AWAY_S

    def after_switch(self, now_s: float) -> None:
        """A generation begins, and comes first."""
        self.settled_s = now_s + SPARE_AFTER_S


@dataclass(slots=True)
class Silence:
    """What tells a member that hangs from one that is only slow, or that nobody listened to."""

    founded_at: int | None = None
    """The step that a job without live state began at, until a later one is reported; None then."""
    stood_at: int = -1
    """The step that was last reported to stand still."""
    ticked_s: float | None = None
    """When the coordinator last looked who is silent."""

    def reached(self, step: int) -> None:
        """A member is at `step`."""
        if self.founded_at is not None and step > self.founded_at:
            self.founded_at = None

    def patience_s(self, silent_after_s: float) -> float:
        """How long a member may be silent; in the first step of a job, which nobody has rehearsed, longer."""
        return silent_after_s * (FIRST_STEP if self.founded_at is not None else 1)

    def stands_still(self, step: int) -> bool:
        """Note a step that stands still; False if that was known."""
        known, self.stood_at = step == self.stood_at, step
        return not known

    def slept_s(self, now_s: float) -> float:
        """For how long the coordinator itself did not run since the last call, 0 if it did."""
        gap_s = 0.0 if self.ticked_s is None else now_s - self.ticked_s
        self.ticked_s = now_s
        return gap_s if gap_s > _SLEPT_S else 0.0


# ---------------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True)
class Rules:
    """What a job's membership was told when the job began, and keeps to."""

    spares: int = 0
    silent_after_s: float = 5.0
    kill_silent: bool = True
    """Whether to kill the process of a silent worker; if not, it is only fenced."""
    gather_s: float = 1.0
    """How long a prepared newcomer waits for others that are being prepared, to join in one switch."""
    host: str = ""
    """The coordinator's address, which tells who is on another host; empty if nobody is."""
    away_s: float = 60.0
    """How long a coordinator that hears nobody on other hosts waits, because its own link may be down."""


@dataclass(slots=True)
class Membership:
    """What happens in a job, and what it means for its members. `validate` has the invariants."""

    scale: Scale
    rules: Rules = Rules()
    workers: dict[str, KnownWorker] = field(default_factory=dict)
    """Every worker whose process is there, or about to be."""
    names: Names = field(default_factory=Names)
    given_up: GivenUp = field(default_factory=GivenUp)
    generation: Generation = field(default_factory=Generation)
    candidate: Candidate | None = None
    step: int = 0
    """The last step that was reported."""
    ending: Ending = field(default_factory=Ending)
    reach: Reach = field(default_factory=Reach)
    quiet: Quiet = field(default_factory=Quiet)
    silence: Silence = field(default_factory=Silence)
    past: Past = field(default_factory=Past, compare=False, repr=False)

    # ------------------------------------------------------------------ what can be asked of it

    def story(self) -> list[str]:
        """The last events and what followed from each, the oldest first."""
        return self.past.lines()

    def validate(self) -> None:
        """Raise AssertionError, with the story, if an invariant does not hold."""
        if wrong := self.wrong():
            raise AssertionError("\n".join([wrong, *self.story()]))

    def wrong(self) -> str:
        """Which invariant does not hold; empty if all do."""
        present, candidate, scale = self.generation, self.candidate, self.scale
        members = set(present.members)
        waiting = {w.name for w in self.workers.values() if w.status in (Status.STARTING, Status.READY)}
        invariants = (
            (len(members) < len(present.members), "a member is in the generation twice"),
            (bool(members & waiting), "a member counts as a newcomer"),
            (bool(self.given_up.fenced & self.workers.keys()), "a worker was given up and still counts"),
            (present.number > present.counter, "a generation has a number that was not given"),
            (candidate is not None and candidate.number <= present.number, "the candidate is an old one"),
            (candidate is not None and not candidate.members, "the candidate has no members"),
            (not scale.minimum <= scale.target <= scale.maximum, "the target is out of bounds"),
            (scale.slots is not None and len(scale.slots) != scale.target, "slots and target differ"),
            (any(w.name != name for name, w in self.workers.items()), "a worker goes by another name"),
        )
        return next((what for broken, what in invariants if broken), "")

    # ------------------------------------------------------------------ requests

    @transition
    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, on these slots if the job has slots."""
        self.scale.resize(target, slots, over=self.ending.over)
        return self._plan(now_s)

    @transition
    def confine(self, most: int, reason: str, now_s: float) -> list[Instruction]:
        """Allow no more than `most` workers from now on: a worker found out that the job cannot use more."""
        if self.ending.over or not self.scale.confine(most, reason):
            return []
        return self.resize(self.scale.maximum, now_s)

    @transition
    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end; it can be started again."""
        self.ending.stopping = True
        return self._plan(now_s)

    @transition
    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job; later calls change nothing."""
        over = self.ending.finish(code, reason)
        return [*(Kill(name) for name in self.workers), *over] if over else []

    # ------------------------------------------------------------------ what workers say

    @transition
    def hello(
        self,
        name: str,
        address: tuple[str, int],
        status: str,
        generation: int,
        members: list[str],
        now_s: float,
    ) -> list[Instruction]:
        """A worker (re)connected and reports its status."""
        if name in self.given_up.fenced:
            return [Fence(name)]
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = KnownWorker(name, Status(status), now_s)
        self._heard(worker, now_s)
        moved = worker.address != address
        worker.address, worker.connected = address, True
        out: list[Instruction] = []
        if generation > self.generation.number:
            out += self._adopt(generation, members, now_s)
        if status == Status.DONE:
            worker.status = Status.DONE
        if name in self.generation.members and worker.status in (Status.STARTING, Status.READY):
            worker.status = Status.MEMBER
        if self.candidate is not None and name in self._concerned():
            # After a restart of the coordinator the others may lack addresses. They get all of them at once,
            # with the last one: nobody can go on before, and with hundreds of members it would take seconds.
            rest = [other for other in self.candidate.members if other in self.workers]
            complete = all(self.workers[other].address is not None for other in rest)
            everybody = self._concerned() if moved and complete else (name,)
            out.append(Announce(self.candidate, everybody))
        return out

    @transition
    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`."""
        worker = self.workers.get(name)
        if worker is None or worker.status not in (Status.STARTING, Status.READY):
            return []
        if self.generation.live and epoch != self.generation.epoch:
            worker.status = Status.STARTING
            return [Turn(name, self.generation.epoch)]
        worker.status, worker.ready_s = Status.READY, now_s
        return self._plan(now_s)

    @transition
    def at_epoch(self, epoch: int, now_s: float) -> list[Instruction]:
        """The members began `epoch`; newcomers that wait in an earlier one are told to go there."""
        if epoch == self.generation.epoch:
            return []
        self.generation.epoch = epoch
        out: list[Instruction] = []
        for worker in self.workers.values():
            if worker.status is Status.READY and self.generation.live:
                worker.status = Status.STARTING
                out.append(Turn(worker.name, epoch))
        return out + self._plan(now_s)

    def beat(self, name: str, step: int, now_s: float) -> None:
        """A worker is alive, at `step`."""
        worker = self.workers.get(name)
        if worker is not None:
            self._heard(worker, now_s)
        self.silence.reached(step)
        if step > self.step:
            self.step, self.ending.fruitless = step, 0

    @transition
    def switched(
        self, number: int, members: list[str], now_s: float, step: int | None = None
    ) -> list[Instruction]:
        """A worker entered generation `number`, at `step`."""
        if number <= self.generation.number:
            return []
        if not self.generation.live:
            self.silence.founded_at = step
        return [*self._adopt(number, members, now_s), *self._plan(now_s)]

    @transition
    def broken(
        self, name: str, number: int, operation: int, now_s: float, lost: str = "", certain: bool = False
    ) -> list[Instruction]:
        """A member's connections of generation `number` broke in `operation`; it needs a new generation.

        `lost` is the peer whose connection ended. That peer is dead if its connection to the coordinator has
        ended too, or if the system says that it is exiting (`certain`); its exit is reported later.
        """
        if self.ending.over or name not in self.workers:
            return []
        for other in self.workers.values():
            if other.status is Status.DONE and operation >= other.done_at:
                return self.finish(1, ended_early(other.name, other))
        if lost in self.generation.members and lost in self.workers:
            self.given_up.accused.add(lost)
            if certain or not self.workers[lost].connected:
                return self._give_up(lost, now_s)
        if self.candidate is not None and self.candidate.recovery and self.candidate.number > number:
            return [Announce(self.candidate, (name,))]
        if number < self.generation.number:
            return []  # others are in the next generation already, and this worker was told
        return self._recover(now_s)

    @transition
    def left(self, name: str, number: int, now_s: float) -> list[Instruction]:
        """A member leaves, because candidate `number` was agreed on without it."""
        if (worker := self.workers.get(name)) is not None:
            worker.leave(now_s)
        return self._recover_without(name, now_s)

    @transition
    def done(self, name: str, operation: int, now_s: float) -> list[Instruction]:
        """A worker left the training loop and takes no part in `operation` and later ones."""
        if (worker := self.workers.get(name)) is not None:
            worker.status, worker.done_at = Status.DONE, operation
            for other in self.workers.values():
                # No worker can join any more.
                if other.status in (Status.STARTING, Status.READY):
                    other.status = Status.LEAVING
        return [Kill(w.name) for w in self.workers.values() if w.status is Status.LEAVING]

    @transition
    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut: have everybody check whom it reaches."""
        return [] if self.ending.over else self._check(name, other, now_s)

    @transition
    def checked(self, name: str, number: int, unreachable: list[str], now_s: float) -> list[Instruction]:
        """A worker says whom it cannot reach."""
        return self._part(now_s) if self.reach.answer(name, number, unreachable) else []

    @transition
    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return [] if self.ending.over else self._standstill(step, others)

    # ------------------------------------------------------------------ what becomes of processes

    @transition
    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed. It counts as dead only if a peer lost its connection to it too."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over:
            return []
        worker.connected = False
        ended = worker.status in (Status.DONE, Status.LEAVING)
        return self._give_up(name, now_s) if name in self.given_up.accused and not ended else []

    @transition
    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended with `code` (negative: killed by that signal)."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over:
            self.workers.pop(name, None)
            return self._closing()
        if code == FENCED or name in self.given_up.fenced:
            self.workers.pop(name)
            return self._plan(now_s)
        left = self.ending.stopping and code == 0 and worker.status is not Status.DONE
        if worker.status is Status.LEAVING or left:
            self.workers.pop(name)
            if name in self.generation.members and not left and not self._has_state():
                return self._without_state(now_s)
            again = self._recover_without(name, now_s)
            return [*again, *(self._closing() or self._plan(now_s))]
        if code == RESPAWN and name not in self.generation.members:
            self.workers.pop(name)
            # With live state, one that never reached the coordinator has a cut link, say: no failure.
            counts = worker.address is not None or not self.generation.live
            over = self._died_fruitless(name, "it asked to be started again") if counts else []
            return over or self._plan(now_s)
        if worker.status is Status.DONE and code <= 0:
            self.workers.pop(name)
            self.generation.members = [m for m in self.generation.members if m != name]
            self.ending.finished |= code == 0 and name == self.generation.leader
            goes_on = self.generation.members or self.ending.finished
            return self._closing() if goes_on else self._begin_again(now_s)
        if code == RESPAWN:
            return self._lost(name, "it asked to be started again", now_s)
        if code > 0:
            return self.finish(code, note or f"worker {name} ended with exit code {code}")
        if code == 0:
            return self.finish(1, ended_early(name, worker))
        return self._lost(name, f"killed by signal {-code}", now_s)

    @transition
    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: whether its process lives or not, it must not go on."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over or worker.status in (Status.LEAVING, Status.DONE):
            return self.exited(name, 0 if worker and worker.status is Status.LEAVING else -9, now_s)
        self.quiet.after_lost_slot(now_s)
        self.ending.fruitless -= 1  # not the script's fault
        return [Fence(name), *self._give_up(name, now_s)]

    @transition
    def unstartable(self, name: str, reason: str, cause: str, now_s: float) -> list[Instruction]:
        """A worker cannot be started on its node: the job goes on without that slot for now.

        If its process ended before it ran the script, the node is the reason only if the script runs on
        others.
        """
        worker = self.workers.get(name)
        if worker is None or self.ending.over or worker.status is Status.LEAVING:
            return self.exited(name, 0, now_s)
        if cause == "process" and not self.generation.live:
            return self.finish(1, f"worker {name} cannot be started: {reason}")
        self.scale.shut_out(worker.slot, cause, now_s)
        self.ending.fruitless -= 1  # not the script's fault
        return self._lost(name, reason, now_s)

    @transition
    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed: give up silent members, and let gathered newcomers join."""
        out: list[Instruction] = self._part(now_s) if self.reach.late(now_s) else []
        slept_s = self.silence.slept_s(now_s)
        for worker in self.workers.values():
            worker.seen_s += slept_s  # it could not be heard meanwhile
        for worker in [] if self.ending.over else self._silent(now_s):
            out += [self._gone(worker, now_s), Fence(worker.name)]
            out += self._give_up(worker.name, now_s)
        for worker in self._stuck(now_s):
            out += [Kill(worker.name), *self.exited(worker.name, -9, now_s)]
        out += self._overdue(now_s)
        return out or self._plan(now_s)

    @transition
    def agent_connected(self, alive: list[str], now_s: float) -> list[Instruction]:
        """The launcher (re)connected and says which processes exist; it missed instructions until now."""
        if self.ending.result is not None:  # the launcher was not connected when the job was finished
            return [*(Kill(name) for name in alive), self.ending.result]
        out: list[Instruction] = []
        for name in alive:
            worker = self.workers.get(name)
            if worker is None or (worker.status is Status.LEAVING and name not in self.generation.members):
                out.append(Kill(name))
        for worker in [w for w in self.workers.values() if w.name not in alive]:
            if worker.status is Status.STARTING and worker.address is None:
                out.append(Spawn(worker.name, worker.slot))
            elif worker.status is Status.LEAVING:
                # It may have been told to end before it was ever started; the engine waits for its slot.
                out += [Say(Exited(worker.name, 0))]
                out += self.exited(worker.name, 0, now_s)
            else:
                out += [Say(Exited(worker.name, -9))]
                out += self._lost(worker.name, "its process is gone", now_s)
        return [*out, *self._plan(now_s)]

    # ------------------------------------------------------------------ towards the target

    @property
    def recovering(self) -> bool:
        """Whether the present generation is broken, and its members enter the candidate at once."""
        return self.candidate is not None and self.candidate.recovery

    def _plan(self, now_s: float) -> list[Instruction]:
        """Start or end workers and announce a candidate, as the target requires."""
        if self.ending.over:
            return []
        if self.ending.stopping:
            if self._some(Status.MEMBER, Status.DONE):
                return [Stop(tuple(self.generation.members))]
            return self.finish(0, STOPPED)  # no worker has state that is not on disk
        if self.recovering or self._some(Status.DONE):
            return []
        staying = self._staying()
        out = self._start_and_end(staying, now_s)
        wanted = self._next_members(staying, now_s)
        if not wanted or wanted == self.generation.members:
            if self.candidate is not None:
                out.append(Announce(None, self._concerned()))
                self.candidate = None
        elif self.candidate is None or list(self.candidate.members) != wanted:
            out += self.announce(wanted)
        return out

    def _staying(self) -> list[str]:
        """Members that go on under the present target, in their order."""
        slow = {w.name for w in self.workers.values() if w.slow}
        members = [name for name in self.generation.members if name not in slow]
        if self.scale.slots is None:
            return members[: self.scale.target]
        there = [self.workers[name] for name in members if name in self.workers]
        return [w.name for w in there if w.slot in self.scale.slots]

    def _start_and_end(self, staying: list[str], now_s: float) -> list[Instruction]:
        """Start the workers that are missing beside those that stay, and end newcomers that are too many."""
        present = [*self._oldest_first(Status.READY), *self._oldest_first(Status.STARTING)]
        free = open_slots(self.scale.open(now_s), [self.workers[name] for name in staying])
        missing = self.scale.target - len(staying)
        waiting = max(missing, 0) + self.rules.spares
        # A spare starts only after a switch, because its preparation would slow the steps around it.
        urgent = missing if missing > 0 or now_s < self.quiet.settled_s else waiting
        needed, surplus = newcomers(present, free, waiting, urgent)
        out: list[Instruction] = []
        for worker in surplus:
            worker.status = Status.LEAVING
            out.append(Kill(worker.name))
        for slot in needed if now_s >= self.quiet.calm_s else []:
            name = self.names.new()
            self.workers[name] = KnownWorker(name, Status.STARTING, now_s, slot=slot)
            out.append(Spawn(name, slot))
        return out

    def _next_members(self, staying: list[str], now_s: float) -> list[str]:
        """The members of the next generation: those that stay, and newcomers that can join now."""
        ready = self._oldest_first(Status.READY)
        missing = self.scale.target - len(staying)
        joiners = [w for w in ready if w.connected and not self.reach.held(w.name, now_s)][:missing]
        if missing > len(joiners) and joiners and self._some(Status.STARTING):
            # Others are still being prepared: wait for them, so that one switch is enough for all.
            waited = now_s - min(w.ready_s for w in joiners)
            if waited < self.rules.gather_s:
                joiners = []
        members, live = self.generation.members, self.generation.live
        if not live and len(joiners) < min(self.scale.minimum, self.scale.target):
            joiners = []
        wanted = staying + [w.name for w in joiners]
        if not staying and members and live:
            # All workers move to other slots: one member stays until the newcomers have its state.
            wanted = members[:1] + wanted if joiners else members
        return wanted

    def announce(self, members: list[str], recovery: bool = False) -> list[Instruction]:
        """Replace the candidate by one with these members."""
        number, epoch = self.generation.next_number(), self.generation.epoch
        self.candidate = Candidate(number, tuple(members), recovery, epoch)
        return [Announce(self.candidate, self._concerned())]

    def _adopt(self, number: int, members: list[str], now_s: float) -> list[Instruction]:
        """Generation `number` has begun with these members."""
        present = self.generation
        left = [name for name in present.members if name not in members]
        out: list[Instruction] = list(self._returned(members))
        self.quiet.after_switch(now_s)
        present.number, present.live, present.leader = number, True, members[0]
        present.counter = max(present.counter, number)
        present.members = [name for name in members if name in self.workers]
        for name in left:
            if name in self.workers:
                self.workers[name].leave(now_s)
        for worker in [self.workers[name] for name in present.members]:
            if worker.status is not Status.DONE:
                worker.status, worker.seen_s = Status.MEMBER, max(now_s, worker.seen_s)
        if self.candidate is not None and self.candidate.number <= number:
            self.candidate = None
        if len(present.members) < len(members) and present.members:  # a member died around the switch
            out += self._recover(now_s)
        return out

    # ------------------------------------------------------------------ losses

    def _lost(self, name: str, reason: str, now_s: float) -> list[Instruction]:
        """A worker is dead or given up: form a generation without it, and replace it."""
        if self.workers.pop(name, None) is None:
            return []
        if over := self._died_fruitless(name, reason):
            return over
        if name not in self.generation.members:
            return self._plan(now_s)
        self.generation.members.remove(name)
        if self._has_state():
            return [*self._recover(now_s), *self._plan(now_s)]
        return self._without_state(now_s)

    def _has_state(self) -> bool:
        """Whether a member has the job's state: those that leave have let go of it."""
        there = [self.workers[name] for name in self.generation.members if name in self.workers]
        return any(worker.status is not Status.LEAVING for worker in there)

    def _without_state(self, now_s: float) -> list[Instruction]:
        """Nobody has the job's state any more: the job is over, or goes on from its checkpoint."""
        self.generation.members = []
        return self._closing() or self._begin_again(now_s)

    def _recover(self, now_s: float) -> list[Instruction]:
        """Have the members that train on form a new generation at once."""
        self.quiet.after_loss(now_s)
        going = self._going()
        return self.announce(going, recovery=True) if going else []

    def _going(self) -> list[str]:
        """Members that train on."""
        there = [self.workers[name] for name in self.generation.members if name in self.workers]
        return [w.name for w in there if w.status not in (Status.DONE, Status.LEAVING)]

    def _part(self, now_s: float) -> list[Instruction]:
        """A check is over: go on with the largest set of members that all reach each other."""
        cuts, mute = self.reach.end(now_s)
        if self.ending.over or not cuts:
            return []
        before = self._going()
        out = [*self._leave_out(before, cuts, mute), *self._hold_back(cuts, now_s)]
        if len(self._going()) < len(before):
            out += self._recover(now_s)
        return [*out, *self._plan(now_s)]

    def _give_up(self, name: str, now_s: float) -> list[Instruction]:
        """Go on without `name`, and make sure that it cannot come back."""
        self.given_up.fence(name)
        kill: list[Instruction] = [Kill(name)] if self.rules.kill_silent else []
        return [*self._lost(name, "it does not answer", now_s), *kill]

    def _recover_without(self, name: str, now_s: float) -> list[Instruction]:
        """Announce a recovery again without `name`, if `name` was part of it."""
        if not self.recovering or self.candidate is None or name not in self.candidate.members:
            return []
        self.generation.members = [member for member in self.generation.members if member != name]
        return self._recover(now_s)

    def _begin_again(self, now_s: float) -> list[Instruction]:
        """Start over without live state; newcomers, prepared for another position, are replaced too."""
        out: list[Instruction] = []
        for worker in self.workers.values():
            if worker.status is not Status.LEAVING:
                worker.status = Status.LEAVING
                out.append(Kill(worker.name))
        self.generation.live, self.generation.epoch, self.candidate = False, 0, None
        return out + self._plan(now_s)

    # ------------------------------------------------------------------ silence and cut links

    def _is_far(self, worker: KnownWorker) -> bool:
        """Whether a worker is on another host than the coordinator."""
        return bool(self.rules.host) and worker.address is not None and worker.address[0] != self.rules.host

    def _heard(self, worker: KnownWorker, now_s: float) -> None:
        """A worker said something. If nobody was heard before, everybody gets the time to speak again."""
        if self._is_far(worker) and now_s - worker.seen_s > self.rules.silent_after_s:
            for other in self.workers.values():
                other.seen_s = max(other.seen_s, now_s)
        worker.seen_s = now_s

    def _silent(self, now_s: float) -> list[KnownWorker]:
        """The members that are given up because they say nothing.

        One that hangs still has its connection. Where that has ended too, the link to its host is cut. But if
        the coordinator has heard nobody on another host since, its own link is cut: the members may train on
        without it, and it waits for `away_s`. In the first step of a job, which no worker has rehearsed,
        libraries are loaded and initialised, and a worker may be silent for as long as that takes.
        """
        patience_s = self.silence.patience_s(self.rules.silent_after_s)
        last_s = max((w.seen_s for w in self.workers.values() if self._is_far(w)), default=float("-inf"))
        found = []
        for worker in self.workers.values():
            silent_s = now_s - worker.seen_s
            if worker.status is not Status.MEMBER or silent_s <= patience_s:
                continue
            last_heard = last_s - worker.seen_s < self.rules.silent_after_s / 2
            alone = self._is_far(worker) and not worker.connected and last_heard
            if not alone or silent_s > self.rules.away_s:
                found.append(worker)
        return found

    def _stuck(self, now_s: float) -> list[KnownWorker]:
        """The workers that the end of the job does not wait for: their part is done, and they are silent.

        The job needs the leader's end, so the leader has more time: its threads end before its process does,
        and the link to its host may be cut for a while. If it is given up, the job goes on from its
        checkpoint.
        """
        found = []
        for worker in self.workers.values() if not self.ending.over else []:
            patience_s = self.rules.silent_after_s
            if worker.name == self.generation.leader:
                patience_s = max(FIRST_STEP * patience_s, self.rules.away_s if self._is_far(worker) else 0.0)
            elif not self.ending.finished:
                continue
            if worker.status is Status.DONE and now_s - worker.seen_s > patience_s:
                found.append(worker)
        return found

    def _overdue(self, now_s: float) -> list[Instruction]:
        """Kill the workers that have left training and still hold a slot: it is meant for somebody else."""
        out: list[Instruction] = []
        for worker in self.workers.values():
            since_s = worker.leaving_s if worker.slot is not None else None
            if worker.status is Status.LEAVING and since_s is not None and now_s - since_s > LEAVE_S:
                worker.leaving_s = None
                out.append(Kill(worker.name))
        return out

    def _gone(self, worker: KnownWorker, now_s: float) -> Say:
        """The event of a silent member that is given up."""
        self.given_up.missing[worker.name] = worker.slot
        return Say(LeftOut(worker.name, silent_s=round(now_s - worker.seen_s, 1)))

    def _standstill(self, step: int, others: list[str]) -> list[Instruction]:
        """The event of a step that waits for these members; once for each step."""
        others = [other for other in others if other in self.generation.members]
        if not others or not self.silence.stands_still(step):
            return []
        return [Say(Standstill(step, tuple(others)))]

    def _concerned(self) -> tuple[str, ...]:
        """The members, and those that the candidate would add."""
        coming = self.candidate.members if self.candidate is not None else ()
        return tuple(dict.fromkeys([*self.generation.members, *coming]))

    def _check(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """If these two are members or about to join: have all of them try which others they reach."""
        names = self._concerned()
        if name not in names or other not in names:
            return []
        there = [self.workers[one] for one in names if one in self.workers]
        asked = tuple(w.name for w in there if w.connected and w.address is not None)
        number = self.reach.begin(asked, now_s)
        return [] if number is None else [Check(number, asked)]

    def _leave_out(self, going: list[str], cuts: set[Pair], mute: Collection[str]) -> list[Instruction]:
        """Go on with the largest set of these members that all reach each other; the others have to end.

        Those in `mute` did not answer and cannot be reached by some: they go on only if there is nobody else.
        """
        stay = connected([name for name in going if name not in mute] or going, cuts)
        out: list[Instruction] = []
        for name in [name for name in going if name not in stay]:
            self.given_up.missing[name] = self.workers.pop(name).slot
            self.generation.members.remove(name)
            self.given_up.fence(name)
            by = tuple(other for other in stay if pair(other, name) in cuts)
            out += [Say(LeftOut(name, by)), Fence(name)]
            out += [Kill(name)] if self.rules.kill_silent else []
        return out

    def _hold_back(self, cuts: set[Pair], now_s: float) -> list[Instruction]:
        """Let the newcomers wait that members, or each other, cannot reach."""
        members = self.generation.members
        coming = [w.name for w in self.workers.values() if w.status is Status.READY and w.name not in members]
        stay = connected([*members, *coming], cuts, keep=members)
        out: list[Instruction] = []
        for name in [name for name in coming if name not in stay]:
            if self.reach.hold(name, now_s):
                by = tuple(other for other in stay if pair(other, name) in cuts)
                out.append(Say(NewcomerWaits(name, by)))
        return out

    def _returned(self, members: list[str]) -> list[Say]:
        """The events of workers that join in the place of those that were left out."""
        missing, out = self.given_up.missing, []
        for name in [n for n in members if n not in self.generation.members and n in self.workers]:
            slot = self.workers[name].slot
            before = next((gone for gone, its in missing.items() if its == slot), None)
            if before is not None:
                del missing[before]
                out.append(Say(Returned(name, before)))
        if len(members) >= self.scale.target:
            missing.clear()
        return out

    # ------------------------------------------------------------------ the end

    def _died_fruitless(self, name: str, reason: str) -> list[Instruction]:
        """Count a death, and end the job if there were too many without a step in between."""
        self.ending.fruitless += 1
        if self.ending.fruitless <= MAX_FRUITLESS_DEATHS + self.scale.target:
            return []
        deaths, last = self.ending.fruitless, f"the last was {name} ({reason})"
        return self.finish(1, f"{deaths} workers died without a single step in between; {last}")

    def _closing(self) -> list[Instruction]:
        """End the job with success once the script has finished and no worker trains any more."""
        if not self.ending.finished or self._some(Status.MEMBER, Status.DONE):
            return []
        return self.finish(0, FINISHED)

    def _some(self, *status: Status) -> bool:
        """Whether there is a worker with one of these."""
        return any(worker.status in status for worker in self.workers.values())

    def _oldest_first(self, status: Status) -> list[KnownWorker]:
        return sorted((w for w in self.workers.values() if w.status is status), key=lambda w: age(w.name))
