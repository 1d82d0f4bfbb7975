"""The membership of a job whose members are replicas: fixed groups of workers that share one model.

`Membership` decides about replicas as it decides about workers in other jobs. `Replicas` stands between it
and the coordinator: what happens to a worker becomes an event of its replica (ready when all its workers are,
lost when one is), and an instruction for a replica becomes one for each of its workers.

With R workers for each, worker wN belongs to replica rK with K = N // R, at position N % R, so a name says
where a worker belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.generations import (
    Announce,
    Candidate,
    Check,
    Fence,
    Finish,
    Instruction,
    Kill,
    Say,
    Spawn,
    Status,
    Stop,
    Turn,
    Worker,
)
from swell.train.agent.membership import Membership
from swell.train.agent.slots import place


def number_of(worker: str) -> int:
    """The number in a worker's name; ValueError for another name."""
    if not worker[:1] == "w" or not worker[1:].isdigit():
        raise ValueError(f"worker: got {worker!r}, names are w0, w1, ...")
    return int(worker[1:])


def replica_of(worker: str, size: int) -> str:
    """The replica that a worker belongs to."""
    return f"r{number_of(worker) // size}"


def workers_of(replica: str, size: int) -> tuple[str, ...]:
    """The workers of a replica, by position."""
    first = int(replica[1:]) * size
    return tuple(f"w{first + position}" for position in range(size))


def check_multiple(count: int, size: int, what: str = "workers") -> int:
    """How many replicas `count` workers are; ValueError if that is no whole number."""
    if count % size:
        raise ValueError(
            f"{what}: got {count}, must be a multiple of {size}, because {size} workers share a replica"
        )
    return count // size


@dataclass(slots=True)
class Replicas:
    """A `Membership` of replicas, with the interface of one of workers."""

    size: int
    """Workers of each replica."""
    inner: Membership
    each: dict[str, Worker] = field(default_factory=dict)
    """What is known of every worker process; its status is that of its replica."""
    ready_in: dict[str, int] = field(default_factory=dict)
    """By prepared worker: the epoch that it waits in."""
    through: set[str] = field(default_factory=set)
    """Workers that left the training loop."""
    ended: set[str] = field(default_factory=set)
    """Workers whose process ended as it should, while others of their replica still run."""
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The slots of each replica, under the number by which `inner` knows them."""
    answers: dict[str, set[str]] = field(default_factory=dict)
    """By worker that answered the present check: the replicas that it cannot reach."""

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
        return self._all(self.inner.members)

    @property
    def workers(self) -> dict[str, Worker]:
        """Every worker of a replica that `inner` knows."""
        found = {}
        for name, replica in self.inner.workers.items():
            slots = self.groups.get(-1 if replica.slot is None else replica.slot)
            for position, worker in enumerate(workers_of(name, self.size)):
                known = self._worker(worker, replica.seen_s)
                known.status = replica.status
                known.slot = slots[position] if slots is not None else None
                found[worker] = known
        return found

    # ------------------------------------------------------------------ requests

    def resize(self, target: int, now_s: float, slots: list[int] | None = None) -> list[Instruction]:
        """Change the number of workers to `target`, a whole number of replicas."""
        check_multiple(target, self.size)
        given = place(target, slots, self.slots)
        return self._out(
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
        return self._out(self.inner.confine(max(most // self.size, 1), reason, now_s))

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end."""
        return self._out(self.inner.stop(now_s))

    def stopped(self) -> list[Instruction]:
        """The leader has written the state to disk."""
        return self._out(self.inner.stopped())

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job."""
        return self._out(self.inner.finish(code, reason))

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
        """A worker (re)connected; its replica has, once all its workers are connected."""
        replica = replica_of(name, self.size)
        if replica in self.inner.fenced:
            return [Fence(name)]
        worker = self._worker(name, now_s)
        worker.address, worker.connected, worker.seen_s = address, True, now_s
        worker.status = Status(status)
        mates = [self._worker(mate, now_s) for mate in workers_of(replica, self.size)]
        if status == Status.DONE:
            self.through.add(name)
        if not all(mate.connected for mate in mates):
            return []
        if status == Status.DONE and not all(mate.name in self.through for mate in mates):
            status = Status.MEMBER
        first = mates[0].address
        assert first is not None
        heard = self._replicas(members)
        return self._out(self.inner.hello(replica, first, status, generation, heard, now_s))

    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`; its replica is when all its workers are."""
        if self.inner.live and epoch != self.inner.epoch:
            self.ready_in.pop(name, None)
            return [Turn(name, self.inner.epoch)]
        self.ready_in[name] = epoch
        replica = replica_of(name, self.size)
        if any(self.ready_in.get(mate) != epoch for mate in workers_of(replica, self.size)):
            return []
        return self._out(self.inner.ready(replica, epoch, now_s))

    def at_epoch(self, epoch: int, now_s: float) -> list[Instruction]:
        """The members began `epoch`; workers that wait in an earlier one are told to go there."""
        if epoch == self.inner.epoch:
            return []
        out = self._out(self.inner.at_epoch(epoch, now_s))
        told = {i.worker for i in out if isinstance(i, Turn)}
        for name in [n for n in self.ready_in if n not in told and self.inner.live]:
            del self.ready_in[name]
            replica = self.inner.workers.get(replica_of(name, self.size))
            if replica is not None and replica.status is Status.STARTING:
                out.append(Turn(name, epoch))
        return out

    def beat(self, name: str, step: int, now_s: float) -> None:
        """A worker is alive. Its replica was heard when the worker was that was silent for longest."""
        self._worker(name, now_s).seen_s = now_s
        replica = self.inner.workers.get(replica_of(name, self.size))
        if replica is not None:
            mates = workers_of(replica.name, self.size)
            heard_s = min(self._worker(mate, now_s).seen_s for mate in mates)
            self.inner.beat(replica.name, step, max(heard_s, replica.seen_s))

    def switched(self, number: int, members: list[str], now_s: float) -> list[Instruction]:
        """A worker entered generation `number`."""
        return self._out(self.inner.switched(number, self._replicas(members), now_s))

    def broken(
        self, name: str, number: int, operation: int, now_s: float, lost: str = "", certain: bool = False
    ) -> list[Instruction]:
        """A worker's connections of generation `number` broke; a lost worker means a lost replica."""
        gone = replica_of(lost, self.size) if lost else ""
        replica = replica_of(name, self.size)
        return self._out(self.inner.broken(replica, number, operation, now_s, gone, certain))

    def left(self, name: str, number: int, now_s: float) -> list[Instruction]:
        """A worker leaves with its replica, because candidate `number` was agreed on without it."""
        return self._out(self.inner.left(replica_of(name, self.size), number, now_s))

    def done(self, name: str, operation: int, now_s: float) -> list[Instruction]:
        """A worker left the training loop; its replica has when all its workers have."""
        self.through.add(name)
        replica = replica_of(name, self.size)
        if not self.through.issuperset(workers_of(replica, self.size)):
            return []
        return self._out(self.inner.done(replica, operation, now_s))

    def failed(self, name: str, code: int, now_s: float) -> list[Instruction]:
        """The user's script raised in worker `name`."""
        return self._out(self.inner.failed(name, code, now_s))

    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut."""
        one, two = replica_of(name, self.size), replica_of(other, self.size)
        return self._out(self.inner.suspect(one, two, now_s))

    def checked(self, name: str, number: int, unreachable: list[str], now_s: float) -> list[Instruction]:
        """A worker says whom it cannot reach; its replica has answered when all its workers have."""
        if number != self.inner.reach.number:
            return []
        replica = replica_of(name, self.size)
        self.answers[name] = set(self._replicas(unreachable))
        mates = workers_of(replica, self.size)
        if not all(mate in self.answers for mate in mates):
            return []
        cut = set().union(*(self.answers[mate] for mate in mates))
        if replica in cut:  # its own workers do not reach each other
            return self._out(self.inner.vanished(replica, now_s))
        return self._out(self.inner.checked(replica, number, sorted(cut), now_s))

    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return self._out(self.inner.waiting(step, self._replicas(others), now_s))

    # ------------------------------------------------------------------ what becomes of processes

    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed."""
        if name in self.each:
            self.each[name].connected = False
        return self._out(self.inner.disconnected(replica_of(name, self.size), now_s))

    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended: the end of its replica, unless all its workers end in turn."""
        replica = replica_of(name, self.size)
        known, mates = self.inner.workers.get(replica), workers_of(replica, self.size)
        self.each.pop(name, None)
        if self.inner.result is not None:
            return []
        if known is None:  # its replica was given up; still, a script that failed would fail again
            failed = code > 0 and code not in (RESPAWN, FENCED)
            return self.finish(code, note or f"worker {name} ended with exit code {code}") if failed else []
        over = name in self.through and (code == 0 or name != mates[0])
        if known.status is Status.LEAVING or over or (self.inner.stopping and code == 0):
            self.ended.add(name)
            if not self.ended.issuperset(mates):
                return []  # its slots are free once all have ended
            code = 0
        self._forget(mates)
        note = note or (f"worker {name} ended with exit code {code}" if code > 0 else "")
        return self._out(self.inner.exited(replica, code, now_s, note))

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: its replica must not go on."""
        replica = replica_of(name, self.size)
        return self._out(self.inner.vanished(replica, now_s)) if replica in self.inner.workers else []

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed."""
        return self._out(self.inner.tick(now_s))

    def agent_connected(self, alive: list[str], now_s: float) -> list[Instruction]:
        """The launcher (re)connected and says which processes exist."""
        out: list[Instruction] = []
        whole = []
        for name in {replica_of(worker, self.size): None for worker in alive}:
            mates, replica = workers_of(name, self.size), self.inner.workers.get(name)
            missing = [mate for mate in mates if mate not in alive]
            ends = replica is not None and replica.status in (Status.LEAVING, Status.DONE)
            if replica is not None and replica.status is Status.STARTING and replica.address is None:
                slots = self.groups.get(-1 if replica.slot is None else replica.slot)
                out += [Spawn(mate, None if slots is None else slots[mates.index(mate)]) for mate in missing]
            elif missing and not ends:
                out += [Kill(mate) for mate in mates if mate in alive]
                continue
            self.ended |= set(missing) if ends else set()
            whole.append(name)
        return [*out, *self._out(self.inner.agent_connected(whole, now_s))]

    # ------------------------------------------------------------------ from replicas to workers

    def _worker(self, name: str, now_s: float) -> Worker:
        return self.each.setdefault(name, Worker(name, Status.STARTING, now_s))

    def _forget(self, workers: Iterable[str]) -> None:
        for name in workers:
            self.ready_in.pop(name, None)
            self.answers.pop(name, None)
            self.through.discard(name)
            self.ended.discard(name)

    def _all(self, replicas: Iterable[str]) -> list[str]:
        return [worker for replica in replicas for worker in workers_of(replica, self.size)]

    def _replicas(self, workers: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(replica_of(worker, self.size) for worker in workers))

    def _out(self, instructions: list[Instruction]) -> list[Instruction]:
        """The instructions for workers; workers whose replica is no more are ended with it."""
        out = [made for instruction in instructions for made in self._for_workers(instruction)]
        for name in [n for n in self.each if replica_of(n, self.size) not in self.inner.workers]:
            del self.each[name]
            self._forget([name])
            if Kill(name) not in out:
                out.append(Kill(name))
        return out

    def _for_workers(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case Spawn(replica, slot):
                slots: Sequence[int | None] = [None] * self.size if slot is None else self.groups[slot]
                return [Spawn(*pair) for pair in zip(workers_of(replica, self.size), slots, strict=True)]
            case Kill(replica):
                return [Kill(w) for w in workers_of(replica, self.size) if w not in self.ended]
            case Fence(replica):
                return [Fence(w) for w in workers_of(replica, self.size)]
            case Turn(replica, epoch):
                for worker in workers_of(replica, self.size):
                    self.ready_in.pop(worker, None)
                return [Turn(w, epoch) for w in workers_of(replica, self.size)]
            case Announce(candidate, to):
                return [Announce(self._candidate(candidate), tuple(self._all(to)))]
            case Stop(to):
                return [Stop(tuple(self._all(to)))]
            case Check(number, to):
                self.answers = {}
                return [Check(number, tuple(self._all(to)))]
            case Say(event, fields):
                return self._said(event, fields)
        return [instruction]

    def _candidate(self, candidate: Candidate | None) -> Candidate | None:
        return None if candidate is None else replace(candidate, members=tuple(self._all(candidate.members)))

    def _said(self, event: str, fields: dict[str, Any]) -> list[Instruction]:
        """The event for each worker of the replica that it is about."""
        lists = {k: self._all(fields[k]) for k in ("by", "workers") if k in fields}
        if "worker" not in fields:
            return [Say(event, fields | lists)]
        told: list[Instruction] = []
        for position, worker in enumerate(workers_of(fields["worker"], self.size)):
            own: dict[str, Any] = {"worker": worker}
            if "instead_of" in fields:
                own["instead_of"] = workers_of(fields["instead_of"], self.size)[position]
            told.append(Say(event, fields | lists | own))
        return told
