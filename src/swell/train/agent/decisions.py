"""What a job's membership decides: whom to start, whom to end, and which generation comes next.

`membership` has what happens; both are one pure state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swell.train.agent import links
from swell.train.agent.generations import (
    Announce,
    Candidate,
    Finish,
    Instruction,
    Kill,
    Spawn,
    Status,
    Stop,
    Worker,
)
from swell.train.agent.reach import Reach
from swell.train.agent.slots import age, check_target, ended_early, newcomers, open_slots, place

MAX_FRUITLESS_DEATHS = 5
"""The job fails after this many workers have died in a row without a step in between."""

SETTLE_S = 0.3
"""After a death no new worker is started for this long, so that the survivors recover undisturbed."""
SPARE_AFTER_S = 1.0
"""After a switch no spare is started for this long, so that the new generation trains undisturbed."""

STOPPED = "stopped"
"""Reason of a job that was asked to save its state and end."""


@dataclass(slots=True)
class Decisions:
    """The job's membership and its plans. Invariants: members are alive and unique; numbers only grow; one
    candidate."""

    minimum: int
    maximum: int
    target: int
    spares: int = 0
    silent_after_s: float = 5.0
    kill_silent: bool = True
    """Whether to kill the process of a silent worker; if not, it is only fenced."""
    gather_s: float = 1.0
    """How long a prepared newcomer waits for others that are being prepared, to join in one switch."""
    slots: tuple[int, ...] | None = None
    """The slots of the workers, one for each; None for a job without slots."""
    host: str = ""
    """The coordinator's address, which tells who is on another host; empty if nobody is."""
    away_s: float = 60.0
    """How long a coordinator that hears nobody on other hosts waits, because its own link may be down."""

    generation: int = 0
    members: list[str] = field(default_factory=list)
    counter: int = 0
    epoch: int = 0
    live: bool = False
    """True if there is (or was a moment ago) a generation with live state."""
    candidate: Candidate | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    fenced: set[str] = field(default_factory=set)
    accused: set[str] = field(default_factory=set)
    """Members of which a peer reported that their connection ended."""
    reach: Reach = field(default_factory=Reach)
    missing: dict[str, int | None] = field(default_factory=dict)
    """Members that were left out because of cut links, with their slots: others come in their place."""
    stood_at: int = -1
    """The step that was last reported to stand still."""
    born: int = 0
    step: int = 0
    founded_at: int | None = None
    """The step that a job without live state began at, until a later one is reported; None then."""
    fruitless: int = 0
    leader: str = ""
    """The first member of the generation: what it prints and saves is the job's result."""
    stopping: bool = False
    """True once the job was asked to save its state and end."""
    finished: bool = False
    """True once the leader has run its whole script."""
    ticked_s: float | None = None
    calm_s: float = 0.0
    """Before this time no worker is started, because survivors of a death come first."""
    settled_s: float = 0.0
    """Before this time no spare is started, because a switch comes first."""
    result: Finish | None = None
    confined: str = ""
    """Why the job may have fewer workers than it was started with, or ''."""
    prefix: str = "w"
    """What the names of workers begin with; "r" if they are replicas (see `replicas`)."""

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, on these slots if the job has slots."""
        check_target(target, self.minimum, self.maximum, self.confined, over=self.result is not None)
        self.slots = place(target, slots, self.slots)
        self.target = target
        return self._plan(now_s)

    def confine(self, most: int, reason: str, now_s: float) -> list[Instruction]:
        """Allow no more than `most` workers from now on: a worker found out that the job cannot use more."""
        self.maximum = max(self.minimum, min(most, self.maximum))
        self.confined = reason
        if self.target <= self.maximum:
            return []
        slots = None if self.slots is None else list(self.slots[: self.maximum])
        return self.resize(self.maximum, now_s, slots)

    def _plan(self, now_s: float) -> list[Instruction]:
        """Start or end workers and announce a candidate, as the target requires."""
        if self.stopping and self.result is None:
            if any(w.status in (Status.MEMBER, Status.DONE) for w in self.workers.values()):
                return [Stop(tuple(self.members))]
            return self.finish(0, STOPPED)  # no worker has state that is not on disk
        if self.result is not None or (self.candidate is not None and self.candidate.recovery):
            return []
        if any(w.status is Status.DONE for w in self.workers.values()):
            return []
        out: list[Instruction] = []
        staying = self._staying()
        ready = sorted(self._with(Status.READY), key=lambda w: age(w.name))
        starting = sorted(self._with(Status.STARTING), key=lambda w: age(w.name))
        free = open_slots(self.slots, [self.workers[name] for name in staying])
        missing = self.target - len(staying)
        waiting = max(missing, 0) + self.spares
        # A spare starts only after a switch, because its preparation would slow the steps around it.
        urgent = missing if missing > 0 or now_s < self.settled_s else waiting
        needed, surplus = newcomers(ready + starting, free, waiting, urgent)
        for worker in surplus:
            worker.status = Status.LEAVING
            out.append(Kill(worker.name))
        ready = [w for w in ready if w.status is Status.READY]
        starting = [w for w in starting if w.status is Status.STARTING]
        for slot in needed if now_s >= self.calm_s else []:
            name = f"{self.prefix}{self.born}"
            self.born += 1
            self.workers[name] = Worker(name, Status.STARTING, now_s, slot=slot)
            out.append(Spawn(name, slot))
            starting.append(self.workers[name])

        joiners = [w for w in ready if w.connected and not self.reach.held(w.name, now_s)][:missing]
        if missing > len(joiners) and starting and joiners:
            # Others are still being prepared: wait for them, so that one switch is enough for all.
            waited = now_s - min(w.ready_s for w in joiners)
            if waited < self.gather_s:
                joiners = []
        if not self.live and len(joiners) < min(self.minimum, self.target):
            joiners = []
        wanted = staying + [w.name for w in joiners]
        if not staying and self.members and self.live:
            # All workers move to other slots: one member stays until the newcomers have its state.
            wanted = self.members[:1] + wanted if joiners else self.members
        if not wanted or wanted == self.members:
            if self.candidate is not None:
                out.append(Announce(None, self._concerned(self.candidate)))
                self.candidate = None
        elif self.candidate is None or list(self.candidate.members) != wanted:
            out += self.announce(wanted)
        return out

    def _staying(self) -> list[str]:
        """Members that go on under the present target, in their order."""
        slow = {w.name for w in self.workers.values() if w.slow}
        if self.slots is None:
            return [m for m in self.members if m not in slow][: self.target]
        there = [self.workers[m] for m in self.members if m in self.workers and m not in slow]
        return [w.name for w in there if w.slot in self.slots]

    def announce(self, members: list[str], recovery: bool = False) -> list[Instruction]:
        self.counter = max(self.counter, self.generation) + 1
        self.candidate = Candidate(self.counter, tuple(members), recovery, self.epoch)
        return [Announce(self.candidate, self._concerned(self.candidate))]

    def _concerned(self, candidate: Candidate) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.members, *candidate.members]))

    def lost(self, name: str, reason: str, now_s: float) -> list[Instruction]:
        """A worker is dead or given up: form a generation without it, and replace it."""
        if self.workers.pop(name, None) is None:
            return []
        if over := self._died_fruitless(name, reason):
            return over
        if name not in self.members:
            return self._plan(now_s)
        self.members.remove(name)
        if self.members:
            return [*self._recover(now_s), *self._plan(now_s)]
        return self._closing() or self._begin_again(now_s)

    def _recover(self, now_s: float) -> list[Instruction]:
        self.calm_s = max(self.calm_s, now_s + SETTLE_S)
        going = self._going()
        return self.announce(going, recovery=True) if going else []

    def _going(self) -> list[str]:
        """Members that train on."""
        there = [self.workers[m] for m in self.members if m in self.workers]
        return [w.name for w in there if w.status not in (Status.DONE, Status.LEAVING)]

    def _part(self, now_s: float) -> list[Instruction]:
        """A check is over: go on with the largest set of members that all reach each other."""
        cuts, mute = self.reach.end(now_s)
        if self.result is not None or not cuts:
            return []
        before = self._going()
        out = [*links.leave_out(self, before, cuts, mute), *links.hold_back(self, cuts, now_s)]
        if len(self._going()) < len(before):
            out += self._recover(now_s)
        return [*out, *self._plan(now_s)]

    def _give_up(self, name: str, now_s: float) -> list[Instruction]:
        """Go on without `name`, and make sure that it cannot come back."""
        self.fenced.add(name)
        self.accused.discard(name)
        kill: list[Instruction] = [Kill(name)] if self.kill_silent else []
        return [*self.lost(name, "it does not answer", now_s), *kill]

    def _without(self, name: str, now_s: float) -> list[Instruction]:
        """Announce a recovery again without `name`, if `name` was part of it."""
        if self.candidate is None or not self.candidate.recovery or name not in self.candidate.members:
            return []
        self.members = [m for m in self.members if m != name]
        return self._recover(now_s)

    def _adopt(self, number: int, members: list[str], now_s: float) -> list[Instruction]:
        left = [m for m in self.members if m not in members]
        out: list[Instruction] = list(links.returned(self, members))
        self.generation, self.live, self.settled_s = number, True, now_s + SPARE_AFTER_S
        self.counter = max(self.counter, number)
        self.members = [m for m in members if m in self.workers]
        self.leader = members[0]
        for name in left:
            if name in self.workers:
                links.leaves(self.workers[name], now_s)
        for name in self.members:
            if self.workers[name].status is not Status.DONE:
                self.workers[name].status = Status.MEMBER
                self.workers[name].seen_s = max(now_s, self.workers[name].seen_s)
        if self.candidate is not None and self.candidate.number <= number:
            self.candidate = None
        if len(self.members) < len(members) and self.members:  # a member died around the switch
            out += self._recover(now_s)
        return out

    def _begin_again(self, now_s: float) -> list[Instruction]:
        """Start over without live state; newcomers, prepared for another position, are replaced too."""
        out: list[Instruction] = []
        for worker in self.workers.values():
            if worker.status is not Status.LEAVING:
                worker.status = Status.LEAVING
                out.append(Kill(worker.name))
        self.live, self.candidate, self.epoch = False, None, 0
        return out + self._plan(now_s)

    def _died_fruitless(self, name: str, reason: str) -> list[Instruction]:
        self.fruitless += 1
        if self.fruitless <= MAX_FRUITLESS_DEATHS + self.target:
            return []
        last = f"the last was {name} ({reason})"
        return self.finish(1, f"{self.fruitless} workers died without a single step in between; {last}")

    def _ended_early(self, name: str) -> list[Instruction]:
        return self.finish(1, ended_early(name, self.workers[name]))

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job; later calls change nothing."""
        if self.result is not None:
            return []
        self.result = Finish(code, reason)
        return [*(Kill(name) for name in self.workers), self.result]

    def _closing(self) -> list[Instruction]:
        """End the job with success once the script has finished and no worker trains any more."""
        if self.result is not None or not self.finished:
            return []
        if any(w.status in (Status.MEMBER, Status.DONE) for w in self.workers.values()):
            return []
        return self.finish(0, "training is over")

    def _with(self, status: Status) -> list[Worker]:
        return [w for w in self.workers.values() if w.status is status]
