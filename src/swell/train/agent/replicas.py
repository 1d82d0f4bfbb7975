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

from msgspec import Struct, structs

from swell.train.agent.errors import FENCED, RESPAWN, Refused
from swell.train.agent.membership import (
    Announce,
    Candidate,
    Check,
    Ending,
    Fence,
    Generation,
    Instruction,
    KnownWorker,
    Membership,
    Say,
    Scale,
    Stop,
    Turn,
    place,
)
from swell.train.agent.protocol import Kill, Parted, Spawn, Status

# ---------------------------------------------------------------------- names, and numbers of replicas


def number_of(worker: str) -> int:
    """The number in a worker's name; Refused for another name."""
    if not worker[:1] == "w" or not worker[1:].isdecimal():
        raise Refused(f"worker: got {worker!r}, names are w0, w1, ...")
    return int(worker[1:])


def replica_of(worker: str, size: int) -> str:
    """The replica that a worker belongs to."""
    return f"r{number_of(worker) // size}"


def replicas_of(workers: Iterable[str], size: int) -> list[str]:
    """The replicas that these workers belong to, each once."""
    return list(dict.fromkeys(replica_of(worker, size) for worker in workers))


def workers_of(replica: str, size: int) -> tuple[str, ...]:
    """The workers of a replica, by position."""
    first = int(replica[1:]) * size
    return tuple(f"w{first + position}" for position in range(size))


def all_workers_of(replicas: Iterable[str], size: int) -> list[str]:
    """The workers of several replicas, replica by replica."""
    return [worker for replica in replicas for worker in workers_of(replica, size)]


def check_multiple(count: int, size: int, what: str = "workers") -> int:
    """How many replicas `count` workers are; Refused if that is no whole number."""
    if count % size:
        raise Refused(
            f"{what}: got {count}, must be a multiple of {size}, because {size} workers share a replica"
        )
    return count // size


# ---------------------------------------------------------------------- the machine


@dataclass(slots=True)
class Roll:
    """The workers of all replicas, one by one."""

    each: dict[str, KnownWorker] = field(default_factory=dict)
    """Every worker process; its status is that of its replica."""
    ready_in: dict[str, int] = field(default_factory=dict)
    """By prepared worker: the epoch that it waits in."""
    through: set[str] = field(default_factory=set)
    """Workers that left the training loop."""
    ended: set[str] = field(default_factory=set)
    """Workers whose process ended as it should, while others of their replica still run."""
    answers: dict[str, set[str]] = field(default_factory=dict)
    """By worker that answered the present check: the replicas that it cannot reach."""

    def worker(self, name: str, now_s: float) -> KnownWorker:
        """What is known of this worker, from now on if it is new."""
        return self.each.setdefault(name, KnownWorker(name, Status.STARTING, now_s))

    def forget(self, workers: Iterable[str]) -> None:
        """These workers are no more."""
        for name in workers:
            self.ready_in.pop(name, None)
            self.answers.pop(name, None)
            self.through.discard(name)
            self.ended.discard(name)


@dataclass(slots=True)
class Replicas:
    """A `Membership` of replicas, seen as one of workers: what the coordinator reads, asks and receives."""

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
    def workers(self) -> dict[str, KnownWorker]:
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
            return self._out(self.inner.resize(target // self.size, now_s))
        numbers, groups = self.grouped(given)
        out = self.inner.resize(target // self.size, now_s, numbers)
        self.groups = groups  # the groups stay as they are if the target is refused
        return self._out(out)

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
        return self._out(self.inner.confine(max(most // self.size, 1), reason, now_s))

    def stop(self, now_s: float) -> list[Instruction]:
        """Have the job save its state and end."""
        return self._out(self.inner.stop(now_s))

    def finish(self, code: int, reason: str) -> list[Instruction]:
        """End the job."""
        return self._out(self.inner.finish(code, reason))

    def tick(self, now_s: float) -> list[Instruction]:
        """Time passed."""
        return self._out(self.inner.tick(now_s))

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
        if replica in self.inner.given_up.fenced:
            return [Fence(name)]
        worker = self.roll.worker(name, now_s)
        worker.address, worker.connected, worker.seen_s = address, True, now_s
        worker.status = Status(status)
        mates = [self.roll.worker(mate, now_s) for mate in workers_of(replica, self.size)]
        if status == Status.DONE:
            self.roll.through.add(name)
        if not all(mate.connected for mate in mates):
            return []
        if status == Status.DONE and not all(mate.name in self.roll.through for mate in mates):
            status = Status.MEMBER
        first = mates[0].address
        assert first is not None
        heard = replicas_of(members, self.size)
        return self._out(self.inner.hello(replica, first, status, generation, heard, now_s))

    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`; its replica is when all its workers are."""
        if self.inner.generation.live and epoch != self.inner.generation.epoch:
            self.roll.ready_in.pop(name, None)
            return [Turn(name, self.inner.generation.epoch)]
        self.roll.ready_in[name] = epoch
        replica = replica_of(name, self.size)
        if any(self.roll.ready_in.get(mate) != epoch for mate in workers_of(replica, self.size)):
            return []
        return self._out(self.inner.ready(replica, epoch, now_s))

    def at_epoch(self, epoch: int, now_s: float) -> list[Instruction]:
        """The members began `epoch`; workers that wait in an earlier one are told to go there."""
        if epoch == self.inner.generation.epoch:
            return []
        out = self._out(self.inner.at_epoch(epoch, now_s))
        told = {i.worker for i in out if isinstance(i, Turn)}
        for name in [n for n in self.roll.ready_in if n not in told and self.inner.generation.live]:
            del self.roll.ready_in[name]
            replica = self.inner.workers.get(replica_of(name, self.size))
            if replica is not None and replica.status is Status.STARTING:
                out.append(Turn(name, epoch))
        return out

    def beat(self, name: str, step: int, now_s: float) -> None:
        """A worker is alive. Its replica was heard when the worker was that was silent for longest."""
        self.roll.worker(name, now_s).seen_s = now_s
        replica = self.inner.workers.get(replica_of(name, self.size))
        if replica is not None:
            mates = workers_of(replica.name, self.size)
            heard_s = min(self.roll.worker(mate, now_s).seen_s for mate in mates)
            self.inner.beat(replica.name, step, max(heard_s, replica.seen_s))

    def switched(
        self, number: int, members: list[str], now_s: float, step: int | None = None
    ) -> list[Instruction]:
        """A worker entered generation `number`, at `step`."""
        return self._out(self.inner.switched(number, replicas_of(members, self.size), now_s, step))

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
        self.roll.through.add(name)
        replica = replica_of(name, self.size)
        if not self.roll.through.issuperset(workers_of(replica, self.size)):
            return []
        return self._out(self.inner.done(replica, operation, now_s))

    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut."""
        one, two = replica_of(name, self.size), replica_of(other, self.size)
        return self._out(self.inner.suspect(one, two, now_s))

    def checked(self, name: str, number: int, unreachable: list[str], now_s: float) -> list[Instruction]:
        """A worker says whom it cannot reach; its replica has answered when all its workers have."""
        if number != self.inner.reach.number:
            return []
        replica = replica_of(name, self.size)
        self.roll.answers[name] = set(replicas_of(unreachable, self.size))
        mates = workers_of(replica, self.size)
        if not all(mate in self.roll.answers for mate in mates):
            return []
        cut = set().union(*(self.roll.answers[mate] for mate in mates))
        if replica in cut:  # its own workers do not reach each other
            return [Say(Parted(tuple(mates))), *self._out(self.inner.vanished(replica, now_s))]
        return self._out(self.inner.checked(replica, number, sorted(cut), now_s))

    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return self._out(self.inner.waiting(step, replicas_of(others, self.size), now_s))

    # ------------------------------------------------------------------ what becomes of processes

    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed."""
        if name in self.roll.each:
            self.roll.each[name].connected = False
        return self._out(self.inner.disconnected(replica_of(name, self.size), now_s))

    def exited(self, name: str, code: int, now_s: float, note: str = "") -> list[Instruction]:
        """A worker's process ended: the end of its replica, unless all its workers end in turn."""
        replica = replica_of(name, self.size)
        known, mates = self.inner.workers.get(replica), workers_of(replica, self.size)
        self.roll.each.pop(name, None)
        if self.inner.ending.over:
            return []
        if known is None:  # its replica was given up; still, a script that failed would fail again
            failed = code > 0 and code not in (RESPAWN, FENCED)
            return self.finish(code, note or f"worker {name} ended with exit code {code}") if failed else []
        over = name in self.roll.through and (code == 0 or name != mates[0])
        if known.status is Status.LEAVING or over or (self.inner.ending.stopping and code == 0):
            self.roll.ended.add(name)
            if not self.roll.ended.issuperset(mates):
                return []  # its slots are free once all have ended
            code = 0
        self.roll.forget(mates)
        said: list[Instruction] = []
        if code == RESPAWN and known.status is Status.MEMBER:
            said = [Say(Parted(tuple(mates), name))]
        note = note or (f"worker {name} ended with exit code {code}" if code > 0 else "")
        return [*said, *self._out(self.inner.exited(replica, code, now_s, note))]

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: its replica must not go on."""
        replica = replica_of(name, self.size)
        return self._out(self.inner.vanished(replica, now_s)) if replica in self.inner.workers else []

    def unstartable(self, name: str, reason: str, cause: str, now_s: float) -> list[Instruction]:
        """A worker cannot be started on its node: its replica cannot either."""
        replica = replica_of(name, self.size)
        known = self.inner.workers.get(replica)
        if known is None or known.status is Status.LEAVING:
            return self.exited(name, 0, now_s)
        mates = workers_of(replica, self.size)
        for mate in mates:
            self.roll.each.pop(mate, None)
        self.roll.forget(mates)
        out = self._out(self.inner.unstartable(replica, reason, cause, now_s))
        return [*(Kill(mate) for mate in mates if mate != name), *out]

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
            self.roll.ended |= set(missing) if ends else set()
            whole.append(name)
        return [*out, *self._out(self.inner.agent_connected(whole, now_s))]

    # ------------------------------------------------------------------ instructions

    def _out(self, instructions: list[Instruction]) -> list[Instruction]:
        """The instructions for workers; workers whose replica is no more are ended with it."""
        made = [one for i in instructions for one in self._for_workers(i)]
        for name in [n for n in self.roll.each if replica_of(n, self.size) not in self.inner.workers]:
            del self.roll.each[name]
            self.roll.forget([name])
            if Kill(name) not in made:
                made.append(Kill(name))
        return made

    def _for_workers(self, instruction: Instruction) -> list[Instruction]:
        """The instructions for workers that this one for a replica means.

        A check begins anew for all workers, and a worker that is sent to another epoch is no longer ready.
        """
        size = self.size
        match instruction:
            case Spawn(replica, slot):
                slots: Sequence[int | None] = [None] * size if slot is None else self.groups[slot]
                return [Spawn(*pair) for pair in zip(workers_of(replica, size), slots, strict=True)]
            case Kill(replica):
                return [Kill(w) for w in workers_of(replica, size) if w not in self.roll.ended]
            case Fence(replica):
                return [Fence(w) for w in workers_of(replica, size)]
            case Turn(replica, epoch):
                for worker in workers_of(replica, size):
                    self.roll.ready_in.pop(worker, None)
                return [Turn(w, epoch) for w in workers_of(replica, size)]
            case Announce(candidate, to):
                return [Announce(_candidate(candidate, size), tuple(all_workers_of(to, size)))]
            case Stop(to):
                return [Stop(tuple(all_workers_of(to, size)))]
            case Check(number, to):
                self.roll.answers = {}
                return [Check(number, tuple(all_workers_of(to, size)))]
            case Say(event):
                return _happened(event, size)
        return [instruction]


def _candidate(candidate: Candidate | None, size: int) -> Candidate | None:
    if candidate is None:
        return None
    return replace(candidate, members=tuple(all_workers_of(candidate.members, size)))


def _happened(event: Struct, size: int) -> list[Instruction]:
    """The event for each worker of the replica that it is about."""
    fields = structs.asdict(event)
    lists = {key: all_workers_of(fields[key], size) for key in ("by", "workers") if fields.get(key)}
    event = structs.replace(event, **{key: tuple(names) for key, names in lists.items()})
    if "worker" not in fields:
        return [Say(event)]
    own = [workers_of(fields[key], size) for key in ("worker", "instead_of") if key in fields]
    return [Say(structs.replace(event, **dict(zip(("worker", "instead_of"), names)))) for names in zip(*own)]
