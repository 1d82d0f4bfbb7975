"""Who is a member of which generation: a pure state machine, events in, instructions out.

It has no clock, socket or disk: the coordinator passes in what happened (with the time) and carries out the
instructions it gets. Stop-free scaling follows EDL (TPDS'21): newcomers prepare while the others train. As in
CoDDL (NSDI'21, section 4), a newer request replaces an older one whose switch has not happened yet.

    starting --ready--> ready --(candidate switched)--> member --(candidate without it)--> leaving --> gone
        \\_______________ any of them may die: lost ______________________________________/

`decisions` has what follows from what happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swell.train.agent import decisions, links
from swell.train.agent.ending import Ending
from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.generations import (
    Announce,
    Candidate,
    Fence,
    Generation,
    GivenUp,
    Instruction,
    Kill,
    Names,
    Say,
    Spawn,
    Status,
    Turn,
    Worker,
)
from swell.train.agent.patience import Quiet, Silence
from swell.train.agent.protocol import Exited
from swell.train.agent.reach import Reach
from swell.train.agent.scale import Scale
from swell.train.agent.slots import ended_early


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
    """What happens in a job, and what it means for its members. Invariant: there is one candidate at most."""

    scale: Scale
    rules: Rules = Rules()
    workers: dict[str, Worker] = field(default_factory=dict)
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

    # ------------------------------------------------------------------ requests

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, on these slots if the job has slots."""
        self.scale.resize(target, slots, over=self.ending.over)
        return decisions.plan(self, now_s)

    def confine(self, most: int, reason: str, now_s: float) -> list[Instruction]:
        """Allow no more than `most` workers from now on: a worker found out that the job cannot use more."""
        if self.ending.over or not self.scale.confine(most, reason):
            return []
        return self.resize(self.scale.maximum, now_s)

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end; it can be started again."""
        self.ending.stopping = True
        return decisions.plan(self, now_s)

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job; later calls change nothing."""
        over = self.ending.finish(code, reason)
        return [*(Kill(name) for name in self.workers), *over] if over else []

    # ------------------------------------------------------------------ what workers say

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
            worker = self.workers[name] = Worker(name, Status(status), now_s)
        links.heard(self, worker, now_s)
        moved = worker.address != address
        worker.address, worker.connected = address, True
        out: list[Instruction] = []
        if generation > self.generation.number:
            out += decisions.adopt(self, generation, members, now_s)
        if status == Status.DONE:
            worker.status = Status.DONE
        if name in self.generation.members and worker.status in (Status.STARTING, Status.READY):
            worker.status = Status.MEMBER
        if self.candidate is not None and name in links.concerned(self):
            # After a restart of the coordinator the others may lack addresses. They get all of them at once,
            # with the last one: nobody can go on before, and with hundreds of members it would take seconds.
            rest = [other for other in self.candidate.members if other in self.workers]
            complete = all(self.workers[other].address is not None for other in rest)
            everybody = links.concerned(self) if moved and complete else (name,)
            out.append(Announce(self.candidate, everybody))
        return out

    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`."""
        worker = self.workers.get(name)
        if worker is None or worker.status not in (Status.STARTING, Status.READY):
            return []
        if self.generation.live and epoch != self.generation.epoch:
            worker.status = Status.STARTING
            return [Turn(name, self.generation.epoch)]
        worker.status, worker.ready_s = Status.READY, now_s
        return decisions.plan(self, now_s)

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
        return out + decisions.plan(self, now_s)

    def beat(self, name: str, step: int, now_s: float) -> None:
        """A worker is alive, at `step`."""
        worker = self.workers.get(name)
        if worker is not None:
            links.heard(self, worker, now_s)
        self.silence.reached(step)
        if step > self.step:
            self.step, self.ending.fruitless = step, 0

    def switched(
        self, number: int, members: list[str], now_s: float, step: int | None = None
    ) -> list[Instruction]:
        """A worker entered generation `number`, at `step`."""
        if number <= self.generation.number:
            return []
        if not self.generation.live:
            self.silence.founded_at = step
        return [*decisions.adopt(self, number, members, now_s), *decisions.plan(self, now_s)]

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
                return decisions.give_up(self, lost, now_s)
        if self.candidate is not None and self.candidate.recovery and self.candidate.number > number:
            return [Announce(self.candidate, (name,))]
        if number < self.generation.number:
            return []  # others are in the next generation already, and this worker was told
        return decisions.recover(self, now_s)

    def left(self, name: str, number: int, now_s: float) -> list[Instruction]:
        """A member leaves, because candidate `number` was agreed on without it."""
        if (worker := self.workers.get(name)) is not None:
            links.leaves(worker, now_s)
        return decisions.recover_without(self, name, now_s)

    def done(self, name: str, operation: int, now_s: float) -> list[Instruction]:
        """A worker left the training loop and takes no part in `operation` and later ones."""
        if (worker := self.workers.get(name)) is not None:
            worker.status, worker.done_at = Status.DONE, operation
            for other in self.workers.values():
                # No worker can join any more.
                if other.status in (Status.STARTING, Status.READY):
                    other.status = Status.LEAVING
        return [Kill(w.name) for w in self.workers.values() if w.status is Status.LEAVING]

    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut: have everybody check whom it reaches."""
        return [] if self.ending.over else links.check(self, name, other, now_s)

    def checked(self, name: str, number: int, unreachable: list[str], now_s: float) -> list[Instruction]:
        """A worker says whom it cannot reach."""
        return decisions.part(self, now_s) if self.reach.answer(name, number, unreachable) else []

    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return [] if self.ending.over else links.standstill(self, step, others)

    # ------------------------------------------------------------------ what becomes of processes

    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed. It counts as dead only if a peer lost its connection to it too."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over:
            return []
        worker.connected = False
        ended = worker.status in (Status.DONE, Status.LEAVING)
        return decisions.give_up(self, name, now_s) if name in self.given_up.accused and not ended else []

    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended with `code` (negative: killed by that signal)."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over:
            self.workers.pop(name, None)
            return decisions.closing(self)
        if code == FENCED or name in self.given_up.fenced:
            self.workers.pop(name)
            return decisions.plan(self, now_s)
        left = self.ending.stopping and code == 0 and worker.status is not Status.DONE
        if worker.status is Status.LEAVING or left:
            self.workers.pop(name)
            if name in self.generation.members and not left and not decisions.has_state(self):
                return decisions.without_state(self, now_s)
            again = decisions.recover_without(self, name, now_s)
            return [*again, *(decisions.closing(self) or decisions.plan(self, now_s))]
        if code == RESPAWN and name not in self.generation.members:
            self.workers.pop(name)
            # With live state, one that never reached the coordinator has a cut link, say: no failure.
            counts = worker.address is not None or not self.generation.live
            over = decisions.died_fruitless(self, name, "it asked to be started again") if counts else []
            return over or decisions.plan(self, now_s)
        if worker.status is Status.DONE and code <= 0:
            self.workers.pop(name)
            self.generation.members = [m for m in self.generation.members if m != name]
            self.ending.finished |= code == 0 and name == self.generation.leader
            goes_on = self.generation.members or self.ending.finished
            return decisions.closing(self) if goes_on else decisions.begin_again(self, now_s)
        if code == RESPAWN:
            return decisions.lost(self, name, "it asked to be started again", now_s)
        if code > 0:
            return self.finish(code, note or f"worker {name} ended with exit code {code}")
        if code == 0:
            return self.finish(1, ended_early(name, worker))
        return decisions.lost(self, name, f"killed by signal {-code}", now_s)

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: whether its process lives or not, it must not go on."""
        worker = self.workers.get(name)
        if worker is None or self.ending.over or worker.status in (Status.LEAVING, Status.DONE):
            return self.exited(name, 0 if worker and worker.status is Status.LEAVING else -9, now_s)
        self.quiet.after_lost_slot(now_s)
        self.ending.fruitless -= 1  # not the script's fault
        return [Fence(name), *decisions.give_up(self, name, now_s)]

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
        return decisions.lost(self, name, reason, now_s)

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed: give up silent members, and let gathered newcomers join."""
        out: list[Instruction] = decisions.part(self, now_s) if self.reach.late(now_s) else []
        slept_s = self.silence.slept_s(now_s)
        for worker in self.workers.values():
            worker.seen_s += slept_s  # it could not be heard meanwhile
        for worker in [] if self.ending.over else links.silent(self, now_s):
            out += [links.gone(self, worker, now_s), Fence(worker.name)]
            out += decisions.give_up(self, worker.name, now_s)
        for worker in links.stuck(self, now_s):
            out += [Kill(worker.name), *self.exited(worker.name, -9, now_s)]
        out += links.overdue(self, now_s)
        return out or decisions.plan(self, now_s)

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
                out += decisions.lost(self, worker.name, "its process is gone", now_s)
        return [*out, *decisions.plan(self, now_s)]
