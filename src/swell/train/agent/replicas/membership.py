"""The membership of a job whose members are replicas: fixed groups of workers that share one model.

`Membership` decides about replicas as it decides about workers in other jobs. `Replicas` stands between it
and the coordinator: what happens to a worker becomes an event of its replica (ready when all its workers are,
lost when one is), and an instruction for a replica becomes one for each of its workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.membership import Fence, Instruction, Say, Turn
from swell.train.agent.protocol import Kill, Parted, Spawn, Status
from swell.train.agent.replicas.in_workers import InWorkers
from swell.train.agent.replicas.names import replica_of, replicas_of, workers_of


@dataclass(slots=True)
class Replicas(InWorkers):
    """What happens to workers, told to the `Membership` of their replicas."""

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
        return self.out(self.inner.hello(replica, first, status, generation, heard, now_s))

    def ready(self, name: str, epoch: int, now_s: float) -> list[Instruction]:
        """A newcomer is prepared for `epoch`; its replica is when all its workers are."""
        if self.inner.generation.live and epoch != self.inner.generation.epoch:
            self.roll.ready_in.pop(name, None)
            return [Turn(name, self.inner.generation.epoch)]
        self.roll.ready_in[name] = epoch
        replica = replica_of(name, self.size)
        if any(self.roll.ready_in.get(mate) != epoch for mate in workers_of(replica, self.size)):
            return []
        return self.out(self.inner.ready(replica, epoch, now_s))

    def at_epoch(self, epoch: int, now_s: float) -> list[Instruction]:
        """The members began `epoch`; workers that wait in an earlier one are told to go there."""
        if epoch == self.inner.generation.epoch:
            return []
        out = self.out(self.inner.at_epoch(epoch, now_s))
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
        return self.out(self.inner.switched(number, replicas_of(members, self.size), now_s, step))

    def broken(
        self, name: str, number: int, operation: int, now_s: float, lost: str = "", certain: bool = False
    ) -> list[Instruction]:
        """A worker's connections of generation `number` broke; a lost worker means a lost replica."""
        gone = replica_of(lost, self.size) if lost else ""
        replica = replica_of(name, self.size)
        return self.out(self.inner.broken(replica, number, operation, now_s, gone, certain))

    def left(self, name: str, number: int, now_s: float) -> list[Instruction]:
        """A worker leaves with its replica, because candidate `number` was agreed on without it."""
        return self.out(self.inner.left(replica_of(name, self.size), number, now_s))

    def done(self, name: str, operation: int, now_s: float) -> list[Instruction]:
        """A worker left the training loop; its replica has when all its workers have."""
        self.roll.through.add(name)
        replica = replica_of(name, self.size)
        if not self.roll.through.issuperset(workers_of(replica, self.size)):
            return []
        return self.out(self.inner.done(replica, operation, now_s))

    def suspect(self, name: str, other: str, now_s: float) -> list[Instruction]:
        """A worker's link to another one seems to be cut."""
        one, two = replica_of(name, self.size), replica_of(other, self.size)
        return self.out(self.inner.suspect(one, two, now_s))

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
            return [Say(Parted(tuple(mates))), *self.out(self.inner.vanished(replica, now_s))]
        return self.out(self.inner.checked(replica, number, sorted(cut), now_s))

    def waiting(self, step: int, others: list[str], now_s: float) -> list[Instruction]:
        """The step stands still, because these workers have not sent their part."""
        return self.out(self.inner.waiting(step, replicas_of(others, self.size), now_s))

    # ------------------------------------------------------------------ what becomes of processes

    def disconnected(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's connection closed."""
        if name in self.roll.each:
            self.roll.each[name].connected = False
        return self.out(self.inner.disconnected(replica_of(name, self.size), now_s))

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
        return [*said, *self.out(self.inner.exited(replica, code, now_s, note))]

    def vanished(self, name: str, now_s: float) -> list[Instruction]:
        """A worker's slot cannot be reached: its replica must not go on."""
        replica = replica_of(name, self.size)
        return self.out(self.inner.vanished(replica, now_s)) if replica in self.inner.workers else []

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
        out = self.out(self.inner.unstartable(replica, reason, cause, now_s))
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
        return [*out, *self.out(self.inner.agent_connected(whole, now_s))]
