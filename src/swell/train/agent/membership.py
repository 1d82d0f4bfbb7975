"""Who is a member of which generation: a pure state machine, events in, instructions out.

It has no clock, socket or disk: the coordinator passes in what happened (with the time) and carries out the
instructions it gets. Stop-free scaling follows EDL (TPDS'21): newcomers prepare while the others train. As in
CoDDL (NSDI'21, section 4), a newer request replaces an older one whose switch has not happened yet.

    starting --ready--> ready --(candidate switched)--> member --(candidate without it)--> leaving --> gone
        \\_______________ any of them may die: lost ______________________________________/
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.train.agent import links
from swell.train.agent.decisions import STOPPED, Decisions
from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.generations import (
    Announce,
    Fence,
    Instruction,
    Kill,
    Say,
    Spawn,
    Status,
    Turn,
    Worker,
)

AWAY_S = 1.0
"""No worker is started for this long after a slot was unreachable: the job may have lost it by then."""


@dataclass(slots=True)
class Membership(Decisions):
    """What happens in a job, and what it means for its members."""

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end; it can be started again."""
        self.stopping = True
        return self._plan(now_s)

    def stopped(self) -> list[Instruction]:
        """The leader has written the state to disk."""
        return self.finish(0, STOPPED)

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
        if name in self.fenced:
            return [Fence(name)]
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = Worker(name, Status(status), now_s)
        links.heard(self, worker, now_s)
        worker.address, worker.connected = address, True
        out: list[Instruction] = []
        if generation > self.generation:
            out += self._adopt(generation, members, now_s)
        if status == Status.DONE:
            worker.status = Status.DONE
        if name in self.members and worker.status in (Status.STARTING, Status.READY):
            worker.status = Status.MEMBER
        if self.candidate is not None and name in self._concerned(self.candidate):
            # All are told: after a restart of the coordinator they may not have this worker's address.
            out.append(Announce(self.candidate, self._concerned(self.candidate)))
        return out

    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`."""
        worker = self.workers.get(name)
        if worker is None or worker.status not in (Status.STARTING, Status.READY):
            return []
        if self.live and epoch != self.epoch:
            worker.status = Status.STARTING
            return [Turn(name, self.epoch)]
        worker.status, worker.ready_s = Status.READY, now_s
        return self._plan(now_s)

    def at_epoch(self, epoch: int, now_s: float) -> list[Instruction]:
        """The members began `epoch`; newcomers that wait in an earlier one are told to go there."""
        if epoch == self.epoch:
            return []
        self.epoch = epoch
        out: list[Instruction] = []
        for worker in self.workers.values():
            if worker.status is Status.READY and self.live:
                worker.status = Status.STARTING
                out.append(Turn(worker.name, epoch))
        return out + self._plan(now_s)

    def beat(self, name: str, step: int, now_s: float) -> None:
        """A worker is alive, at `step`."""
        worker = self.workers.get(name)
        if worker is not None:
            links.heard(self, worker, now_s)
        if self.founded_at is not None and step > self.founded_at:
            self.founded_at = None
        if step > self.step:
            self.step, self.fruitless = step, 0

    def switched(
        self, number: int, members: list[str], now_s: float, step: int | None = None
    ) -> list[Instruction]:
        """A worker entered generation `number`, at `step`."""
        if number <= self.generation:
            return []
        if not self.live:
            self.founded_at = step
        return [*self._adopt(number, members, now_s), *self._plan(now_s)]

    def broken(
        self, name: str, number: int, operation: int, now_s: float, lost: str = "", certain: bool = False
    ) -> list[Instruction]:
        """A member's connections of generation `number` broke in `operation`; it needs a new generation.

        `lost` is the peer whose connection ended. That peer is dead if its connection to the coordinator has
        ended too, or if the system says that it is exiting (`certain`); its exit is reported later.
        """
        if self.result is not None or name not in self.workers:
            return []
        for other in self.workers.values():
            if other.status is Status.DONE and operation >= other.done_at:
                return self._ended_early(other.name)
        if lost in self.members and lost in self.workers:
            self.accused.add(lost)
            if certain or not self.workers[lost].connected:
                return self._give_up(lost, now_s)
        if self.candidate is not None and self.candidate.recovery and self.candidate.number > number:
            return [Announce(self.candidate, (name,))]
        if number < self.generation:
            return []  # others are in the next generation already, and this worker was told
        return self._recover(now_s)

    def left(self, name: str, number: int, now_s: float) -> list[Instruction]:
        """A member leaves, because candidate `number` was agreed on without it."""
        if (worker := self.workers.get(name)) is not None:
            links.leaves(worker, now_s)
        return self._without(name, now_s)

    def done(self, name: str, operation: int, now_s: float) -> list[Instruction]:
        """A worker left the training loop and takes no part in `operation` and later ones."""
        if (worker := self.workers.get(name)) is not None:
            worker.status, worker.done_at = Status.DONE, operation
            for other in self.workers.values():
                # No worker can join any more.
                if other.status in (Status.STARTING, Status.READY):
                    other.status = Status.LEAVING
        return [Kill(w.name) for w in self.workers.values() if w.status is Status.LEAVING]

    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed. It counts as dead only if a peer lost its connection to it too."""
        worker = self.workers.get(name)
        if worker is None or self.result is not None:
            return []
        worker.connected = False
        ended = worker.status in (Status.DONE, Status.LEAVING)
        return self._give_up(name, now_s) if name in self.accused and not ended else []

    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut: have everybody check whom it reaches."""
        return links.check(self, name, other, now_s) if self.result is None else []

    def checked(self, name: str, number: int, unreachable: list[str], now_s: float) -> list[Instruction]:
        """A worker says whom it cannot reach."""
        return self._part(now_s) if self.reach.answer(name, number, unreachable) else []

    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return links.standstill(self, step, others) if self.result is None else []

    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended with `code` (negative: killed by that signal)."""
        worker = self.workers.get(name)
        if worker is None or self.result is not None:
            self.workers.pop(name, None)
            return self._closing()
        if code == FENCED or name in self.fenced:
            self.workers.pop(name)
            return self._plan(now_s)
        left = self.stopping and code == 0 and worker.status is not Status.DONE
        if worker.status is Status.LEAVING or left:
            self.workers.pop(name)
            return [*self._without(name, now_s), *(self._closing() or self._plan(now_s))]
        if code == RESPAWN and name not in self.members:
            self.workers.pop(name)
            if worker.address is None and self.live:  # it never reached the coordinator: a cut link, say
                return self._plan(now_s)
            return self._died_fruitless(name, "it asked to be started again") or self._plan(now_s)
        if worker.status is Status.DONE and code <= 0:
            self.workers.pop(name)
            self.members = [m for m in self.members if m != name]
            self.finished = self.finished or (code == 0 and name == self.leader)
            return self._closing() if self.members or self.finished else self._begin_again(now_s)
        if code == RESPAWN:
            return self.lost(name, "it asked to be started again", now_s)
        if code > 0:
            return self.finish(code, note or f"worker {name} ended with exit code {code}")
        if code == 0:
            return self._ended_early(name)
        return self.lost(name, f"killed by signal {-code}", now_s)

    def failed(self, name: str, code: int, now_s: float) -> list[Instruction]:
        """The user's script raised in worker `name`: the job is over, once, with that exit code."""
        return self.finish(code, f"the script failed in worker {name}")

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: whether its process lives or not, it must not go on."""
        worker = self.workers.get(name)
        if worker is None or self.result is not None or worker.status in (Status.LEAVING, Status.DONE):
            return self.exited(name, 0 if worker and worker.status is Status.LEAVING else -9, now_s)
        self.calm_s = now_s + AWAY_S
        self.fruitless -= 1  # not the script's fault
        return [Fence(name), *self._give_up(name, now_s)]

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed: give up silent members, and let gathered newcomers join."""
        out: list[Instruction] = self._part(now_s) if self.reach.late(now_s) else []
        if self.ticked_s is not None and (gap_s := now_s - self.ticked_s) > 1.0:
            # The coordinator itself did not run (a suspended machine, say), so it heard no worker.
            for worker in self.workers.values():
                worker.seen_s += gap_s
        self.ticked_s = now_s
        for worker in links.silent(self, now_s) if self.result is None else []:
            out += [links.gone(self, worker, now_s), Fence(worker.name), *self._give_up(worker.name, now_s)]
        for worker in links.stuck(self, now_s):
            out += [Kill(worker.name), *self.exited(worker.name, -9, now_s)]
        out += links.overdue(self, now_s)
        return out or self._plan(now_s)

    def agent_connected(self, alive: list[str], now_s: float) -> list[Instruction]:
        """The launcher (re)connected and says which processes exist; it missed instructions until now."""
        if self.result is not None:  # the launcher was not connected when the job was finished
            return [*(Kill(name) for name in alive), self.result]
        out: list[Instruction] = []
        for name in alive:
            worker = self.workers.get(name)
            if worker is None or (worker.status is Status.LEAVING and name not in self.members):
                out.append(Kill(name))
        for worker in [w for w in self.workers.values() if w.name not in alive]:
            if worker.status is Status.STARTING and worker.address is None:
                out.append(Spawn(worker.name, worker.slot))
            elif worker.status is Status.LEAVING:
                # It may have been told to end before it was ever started; the engine waits for its slot.
                out += [Say("exited", {"worker": worker.name, "code": 0})]
                out += self.exited(worker.name, 0, now_s)
            else:
                out += [Say("exited", {"worker": worker.name, "code": -9})]
                out += self.lost(worker.name, "its process is gone", now_s)
        return [*out, *self._plan(now_s)]
