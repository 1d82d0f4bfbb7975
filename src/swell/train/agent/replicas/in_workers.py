"""What the coordinator reads of a job of replicas, and what people ask of it, in numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swell.train.agent.membership import Ending, Generation, Instruction, Membership, Scale, Worker, place
from swell.train.agent.protocol import Kill
from swell.train.agent.replicas.names import all_workers_of, check_multiple, replica_of, workers_of
from swell.train.agent.replicas.orders import for_workers
from swell.train.agent.replicas.roll import Roll


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
    def generation(self) -> Generation:
        """The present generation; its members are workers, replica by replica."""
        present = self.inner.generation
        leader = workers_of(present.leader, self.size)[0] if present.leader else ""
        return replace(present, members=all_workers_of(present.members, self.size), leader=leader)

    @property
    def scale(self) -> Scale:
        """How many workers the job may have and should have."""
        size, scale = self.size, self.inner.scale
        bounds = (scale.minimum * size, scale.maximum * size, scale.target * size)
        slots = None
        if scale.slots is not None:
            slots = tuple(slot for number in scale.slots for slot in self.groups[number])
        return Scale(*bounds, slots, scale.confined)

    @property
    def step(self) -> int:
        """The last step that was reported."""
        return self.inner.step

    @property
    def ending(self) -> Ending:
        """How the job comes to its end."""
        return self.inner.ending

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

    def story(self) -> list[str]:
        """The last events of replicas and what followed from each, the oldest first."""
        return self.inner.story()

    def wrong(self) -> str:
        """Which invariant does not hold; empty if all do."""
        return self.inner.wrong()

    # ------------------------------------------------------------------ requests

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, a whole number of replicas."""
        check_multiple(target, self.size)
        given = place(target, slots, self.scale.slots)
        if given is None:
            return self.out(self.inner.resize(target // self.size, now_s))
        numbers, groups = self.grouped(given)
        out = self.inner.resize(target // self.size, now_s, numbers)
        self.groups = groups  # the groups stay as they are if the target is refused
        return self.out(out)

    def grouped(self, slots: Sequence[int]) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """Divide slots among replicas: the numbers of their groups, and what is then in `groups`.

        Groups that have all their slots stay. The other slots are grouped in ascending order, so that a
        replica is on one node where it can be.
        """
        given, groups = set(slots), dict(self.groups)
        kept = [n for n in self.inner.scale.slots or () if given >= set(groups[n])]
        rest = sorted(given - {slot for number in kept for slot in groups[number]})
        for at in range(0, len(rest), self.size):
            number = max(groups, default=-1) + 1
            groups[number] = tuple(rest[at : at + self.size])
            kept.append(number)
        used = {w.slot for w in self.inner.workers.values()}
        return kept, {n: group for n, group in groups.items() if n in kept or n in used}

    def confine(self, most: int, reason: str, now_s: float) -> list[Instruction]:
        """Allow no more than `most` workers from now on."""
        return self.out(self.inner.confine(max(most // self.size, 1), reason, now_s))

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end."""
        return self.out(self.inner.stop(now_s))

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
