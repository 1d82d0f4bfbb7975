"""What the coordinator reads of a job of replicas, and what people ask of it, in numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swell.train.agent.generations import Finish, Instruction, Kill, Worker
from swell.train.agent.membership import Membership
from swell.train.agent.replicas.names import all_workers_of, check_multiple, replica_of, workers_of
from swell.train.agent.replicas.orders import for_workers
from swell.train.agent.replicas.roll import Roll
from swell.train.agent.slots import place


@dataclass(slots=True)
class InWorkers:
    """A `Membership` of replicas, seen as one of workers."""

    size: int
    """Workers of each replica."""
    inner: Membership
    roll: Roll = field(default_factory=Roll)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The slots of each replica, under the number by which `inner` knows them."""

    # ------------------------------------------------------------------ what the coordinator reads

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self.inner.generation

    @property
    def epoch(self) -> int:
        """The epoch that the members are in."""
        return self.inner.epoch

    @property
    def live(self) -> bool:
        """True if there is (or was a moment ago) a generation with live state."""
        return self.inner.live

    @property
    def step(self) -> int:
        """The last step that was reported."""
        return self.inner.step

    @property
    def result(self) -> Finish | None:
        """How the job ended; None while it runs."""
        return self.inner.result

    @property
    def confined(self) -> str:
        """Why the job may have fewer workers than it was started with, or ''."""
        return self.inner.confined

    @property
    def target(self) -> int:
        """Workers that the job should have."""
        return self.inner.target * self.size

    @property
    def minimum(self) -> int:
        """Fewest workers that the job may have."""
        return self.inner.minimum * self.size

    @property
    def maximum(self) -> int:
        """Most workers that the job may have."""
        return self.inner.maximum * self.size

    @property
    def members(self) -> list[str]:
        """The workers of the present generation, replica by replica."""
        return all_workers_of(self.inner.members, self.size)

    @property
    def workers(self) -> dict[str, Worker]:
        """Every worker of a replica that `inner` knows."""
        found = {}
        for name, replica in self.inner.workers.items():
            slots = self.groups.get(-1 if replica.slot is None else replica.slot)
            for position, worker in enumerate(workers_of(name, self.size)):
                known = self.roll.worker(worker, replica.seen_s)
                known.status = replica.status
                known.slot = slots[position] if slots is not None else None
                found[worker] = known
        return found

    # ------------------------------------------------------------------ requests

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, a whole number of replicas."""
        check_multiple(target, self.size)
        given = place(target, slots, self.slots)
        return self.out(
            self.inner.resize(target // self.size, now_s, None if given is None else self.group(given))
        )

    @property
    def slots(self) -> tuple[int, ...] | None:
        """The slots of the workers; None for a job without slots."""
        if self.inner.slots is None:
            return None
        return tuple(slot for number in self.inner.slots for slot in self.groups[number])

    def group(self, slots: Sequence[int]) -> list[int]:
        """Divide slots among replicas, and return the numbers of the groups.

        Groups that have all their slots stay. The other slots are grouped in ascending order, so that a
        replica is on one node where it can be.
        """
        given = set(slots)
        kept = [n for n in self.inner.slots or () if given >= set(self.groups[n])]
        rest = sorted(given - {slot for number in kept for slot in self.groups[number]})
        for at in range(0, len(rest), self.size):
            number = max(self.groups, default=-1) + 1
            self.groups[number] = tuple(rest[at : at + self.size])
            kept.append(number)
        used = {w.slot for w in self.inner.workers.values()}
        self.groups = {n: group for n, group in self.groups.items() if n in kept or n in used}
        return kept

    def confine(self, most: int, reason: str, now_s: float) -> list[Instruction]:
        """Allow no more than `most` workers from now on."""
        return self.out(self.inner.confine(max(most // self.size, 1), reason, now_s))

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end."""
        return self.out(self.inner.stop(now_s))

    def stopped(self) -> list[Instruction]:
        """The leader has written the state to disk."""
        return self.out(self.inner.stopped())

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job."""
        return self.out(self.inner.finish(code, reason))

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed."""
        return self.out(self.inner.tick(now_s))

    def out(self, instructions: list[Instruction]) -> list[Instruction]:
        """The instructions for workers; workers whose replica is no more are ended with it."""
        made = [one for i in instructions for one in for_workers(i, self.size, self.groups, self.roll)]
        for name in [n for n in self.roll.each if replica_of(n, self.size) not in self.inner.workers]:
            del self.roll.each[name]
            self.roll.forget([name])
            if Kill(name) not in made:
                made.append(Kill(name))
        return made
