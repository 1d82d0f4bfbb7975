"""The members of a job that is resized by save and restart: a pure state machine, like `membership`.

Such a job runs any program (docs/guides/any-command.md). swell cannot change the membership of a program that
it knows nothing of, so each generation is a set of new processes:

    begin --> running --(resize, stop)--> saving --all ended--> begin again, or stopped
                 |  \\--(a worker dies: the others are ended)--> begin again, from the program's last save
                 \\--(rank 0 ends with code 0)--> finished

A worker that was asked to save ends with `SAVED`. Whatever a program does, no state lasts for ever: who does
not end in time after it was asked to is killed, and the next generation goes on from the last save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swell.train.agent.errors import RESPAWN
from swell.train.agent.membership import (
    FINISHED,
    MAX_FRUITLESS_DEATHS,
    STOPPED,
    Begin,
    Ending,
    Instruction,
    KnownWorker,
    Names,
    Save,
    Say,
    Scale,
)
from swell.train.agent.protocol import Exited, Kill, Recovery, Spawn, Status, Switch

SAVED = RESPAWN
"""Exit code of a program that has saved its state and wants to go on later (EX_TEMPFAIL, 75)."""
SAVE_S = 50.0
"""How long workers may take to save and end; an engine that stops a job waits a little longer."""
SAVE_ALONE_S = 10.0
"""The same once a worker has died meanwhile: the others may wait for it in vain."""
FAULT_S = 1.5
"""How long a failure waits for the news of a death that explains it: survivors often fail first."""
FINISH_S = 10.0
"""How long the other workers may go on after rank 0 has finished."""
MISSING_S = 2.0
"""After a restart of the coordinator: how long the exit code of a worker that is gone may take to arrive."""
SILENT_S = 5.0
"""A resize of a program that reports nothing counts as over this long after the new workers were started."""
FRUITFUL_S = 10.0
"""A generation that lived this long counts as one that did something, even if it reported nothing."""


@dataclass(slots=True)
class ProgramGeneration:
    """The processes that were started together last."""

    number: int = 0
    members: list[str] = field(default_factory=list)
    """The workers by rank, those included that have ended."""
    placed: Sequence[int] | None = None
    """The slots of the workers; None for a job without slots."""
    began_s: float = 0.0
    reported: bool = False
    """Whether the generation has reported progress."""


@dataclass(slots=True)
class Restarts:
    """The job's membership. Invariant: workers of two generations never run at the same time."""

    scale: Scale
    generation: ProgramGeneration = field(default_factory=ProgramGeneration)
    workers: dict[str, KnownWorker] = field(default_factory=dict)
    """Workers of the present generation whose process has not ended."""
    names: Names = field(default_factory=Names)
    done: float = 0.0
    """The progress that the program reported."""
    ending: Ending = field(default_factory=Ending)
    end_by_s: float | None = None
    """When workers that were asked to save, or may still go on after the end, are killed."""
    standing: tuple[type[Switch] | type[Recovery], float] | None = None
    """The event of the pause under way, and when it began."""
    fault: tuple[int, str, float] | None = None
    """Exit code, reason and time of a failure that ends the job unless a death explains it."""

    # ------------------------------------------------------------------ events

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, on these slots if the job has slots."""
        self.scale.resize(target, slots, over=self.ending.over)
        if not self.generation.number or self._as_wanted():
            return []
        return self._save(now_s)

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the program save its state and end; it can be started again."""
        self.ending.stopping = True
        return self._save(now_s) if self.workers else self._settle(now_s)

    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended with `code` (negative: killed by that signal)."""
        worker = self.workers.pop(name, None)
        if worker is None or self.ending.over:
            return []
        code = 128 - code if 128 < code < 160 else code  # a shell says it so
        ended_by_us = worker.status is Status.LEAVING
        out: list[Instruction] = []
        if code == 0 and name == self.generation.members[0]:
            self.ending.finished, self.end_by_s, self.fault = True, now_s + FINISH_S, None
        elif self.saving or self.ending.finished or ended_by_us or code == 0:
            if code < 0 and not ended_by_us and self.end_by_s is not None:
                self.end_by_s = min(self.end_by_s, now_s + SAVE_ALONE_S)
        elif code == SAVED:
            out += self._save(now_s)
        elif code < 0:
            out += self._lost(name, f"killed by signal {-code}", now_s)
        elif self.fault is None:
            self.fault = (code, note or f"worker {name} ended with exit code {code}", now_s)
        return [*out, *self._settle(now_s)]

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached; that is not the program's fault."""
        if self.workers.pop(name, None) is None or self.ending.over:
            return []
        self.ending.fruitless -= 1
        return [*self._lost(name, "its slot cannot be reached", now_s), *self._settle(now_s)]

    def unstartable(self, name: str, reason: str, cause: str, now_s: float) -> list[Instruction]:
        """A worker cannot be started on its node: the program begins again without that slot.

        If its process ended before it ran the program, the node is the reason only if the program ran before.
        """
        worker = self.workers.pop(name, None)
        if worker is None or self.ending.over:
            return []
        if cause == "process" and self.generation.number == 1:
            return self.finish(1, f"worker {name} cannot be started: {reason}")
        self.scale.shut_out(worker.slot, cause, now_s)
        self.fault, self.standing = None, (Recovery, now_s)
        return [*self._kill_all(), *self._settle(now_s)]

    def said(self, done: float, now_s: float) -> list[Instruction]:
        """Rank 0 reported its progress."""
        if done > self.done:
            self.ending.fruitless = 0
        self.done, self.generation.reported = done, True
        return self._pause_is_over(now_s)

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed: kill who is late, and let failures take effect."""
        if self.ending.over:
            return []
        out: list[Instruction] = []
        if self.fault is not None and now_s >= self.fault[2] + FAULT_S:
            return self.finish(self.fault[0], self.fault[1])
        if self.end_by_s is not None and now_s >= self.end_by_s:
            out += self._kill_all()
        for worker in [w for w in self.workers.values() if w.status is Status.STARTING]:
            if now_s >= worker.seen_s + MISSING_S:
                out += [
                    Say(Exited(worker.name, -9)),
                    *self.vanished(worker.name, now_s),
                ]
        if not self.generation.reported and now_s >= self.generation.began_s + SILENT_S:
            out += self._pause_is_over(self.generation.began_s)
        return [*out, *self._settle(now_s)]

    def agent_connected(self, alive: list[str], now_s: float) -> list[Instruction]:
        """The launcher (re)connected and says which processes exist; it missed instructions until now."""
        if self.ending.result is not None:  # the launcher was not connected when the job was finished
            return [*(Kill(name) for name in alive), self.ending.result]
        out: list[Instruction] = [Kill(name) for name in alive if name not in self.workers]
        for worker in self.workers.values():
            if worker.name not in alive:  # its exit code is on its way, or it was never started
                worker.status, worker.seen_s = Status.STARTING, now_s
            elif worker.status is Status.LEAVING:
                out.append(Kill(worker.name))
        if self.saving and self.workers:
            out.append(Save(self.generation.number))
        return [*out, *self._settle(now_s)]

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job; later calls change nothing."""
        over = self.ending.finish(code, reason)
        return [*self._kill_all(), *over] if over else []

    # ------------------------------------------------------------------ what others ask

    def story(self) -> list[str]:
        """Where the job is; its history says how it came there."""
        workers = ", ".join(f"{w.name} {w.status}" for w in self.workers.values())
        return [f"generation {self.generation.number}: {workers or 'no workers'}; {self.ending}"]

    def wrong(self) -> str:
        """Which invariant does not hold; empty if all do."""
        scale, others = self.scale, self.workers.keys() - set(self.generation.members)
        invariants = (
            (bool(others), "a worker of another generation runs"),
            (not scale.minimum <= scale.target <= scale.maximum, "the target is out of bounds"),
        )
        return next((what for broken, what in invariants if broken), "")

    @property
    def step(self) -> int:
        """The whole part of the progress."""
        return int(self.done)

    @property
    def saving(self) -> bool:
        """Whether the workers were asked to save and end."""
        return self.end_by_s is not None and not self.ending.finished

    def rank(self, worker: str) -> int | None:
        """The rank of a worker of the present generation."""
        return self.generation.members.index(worker) if worker in self.generation.members else None

    # ------------------------------------------------------------------ decisions

    def _as_wanted(self) -> bool:
        """Whether the present workers are what the target asks for."""
        if self.saving or self.ending.finished or not self.workers:
            return True  # the next generation, if there is one, will be
        placed, slots = self.generation.placed, self.scale.slots
        if slots is None or placed is None:
            return len(self.generation.members) == self.scale.target
        return set(placed) == set(slots)

    def _save(self, now_s: float) -> list[Instruction]:
        if self.end_by_s is not None or not self.generation.number:
            return []
        self.end_by_s = now_s + SAVE_S
        self.standing = self.standing or (Switch, now_s)
        return [Save(self.generation.number)]

    def _lost(self, name: str, reason: str, now_s: float) -> list[Instruction]:
        """A worker died: end the others, which may wait for it for ever, and begin again."""
        self.fault = None
        self.standing = (Recovery, now_s)
        if not self.generation.reported and now_s < self.generation.began_s + FRUITFUL_S:
            self.ending.fruitless += 1
        if (deaths := self.ending.fruitless) > MAX_FRUITLESS_DEATHS:
            last = f"the last was {name} ({reason})"
            return self.finish(1, f"workers died {deaths} times without any progress; {last}")
        return self._kill_all()

    def _kill_all(self) -> list[Instruction]:
        for worker in self.workers.values():
            worker.status = Status.LEAVING
        return [Kill(name) for name in self.workers]

    def _settle(self, now_s: float) -> list[Instruction]:
        """What comes next once no worker is left."""
        if self.ending.over or self.workers or self.fault is not None:
            return []
        if self.ending.finished:
            return self.finish(0, FINISHED)
        if self.ending.stopping:
            return self.finish(0, STOPPED)
        return self._begin(now_s)

    def _begin(self, now_s: float) -> list[Instruction]:
        placed = self.scale.open(now_s)
        slots: list[int | None] = [None] * self.scale.target if placed is None else [*placed]
        if len(slots) < self.scale.minimum:
            return []  # the job may be given other slots
        members = [self.names.new() for _ in slots]
        self.workers = {
            name: KnownWorker(name, Status.MEMBER, now_s, slot=slot) for name, slot in zip(members, slots)
        }
        self.generation = ProgramGeneration(self.generation.number + 1, members, placed, now_s)
        self.end_by_s = self.fault = None
        spawns = [Spawn(worker.name, worker.slot) for worker in self.workers.values()]
        return [Begin(self.generation.number, tuple(members)), *spawns]

    def _pause_is_over(self, now_s: float) -> list[Instruction]:
        ending = any(w.status is Status.LEAVING for w in self.workers.values())  # and not yet silent
        if self.standing is None or self.saving or ending:
            return []
        (event, since_s), self.standing = self.standing, None
        pause_s, world = round(max(now_s - since_s, 0.0), 6), len(self.generation.members)
        return [Say(event(pause_s, world))]
