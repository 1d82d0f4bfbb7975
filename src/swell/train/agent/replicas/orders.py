"""An instruction for a replica becomes one for each of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, structs

from swell.train.agent.membership import Announce, Candidate, Check, Fence, Instruction, Say, Stop, Turn
from swell.train.agent.protocol import Kill, Spawn
from swell.train.agent.replicas.names import all_workers_of, workers_of
from swell.train.agent.replicas.roll import Roll


def for_workers(
    instruction: Instruction, size: int, groups: Mapping[int, tuple[int, ...]], roll: Roll
) -> list[Instruction]:
    """The instructions for workers that this one for a replica means.

    `groups`: the slots of each replica. A check begins anew for all workers, and a worker that is sent to
    another epoch is no longer ready, so `roll` changes with them.
    """
    match instruction:
        case Spawn(replica, slot):
            slots: Sequence[int | None] = [None] * size if slot is None else groups[slot]
            return [Spawn(*pair) for pair in zip(workers_of(replica, size), slots, strict=True)]
        case Kill(replica):
            return [Kill(w) for w in workers_of(replica, size) if w not in roll.ended]
        case Fence(replica):
            return [Fence(w) for w in workers_of(replica, size)]
        case Turn(replica, epoch):
            for worker in workers_of(replica, size):
                roll.ready_in.pop(worker, None)
            return [Turn(w, epoch) for w in workers_of(replica, size)]
        case Announce(candidate, to):
            return [Announce(_candidate(candidate, size), tuple(all_workers_of(to, size)))]
        case Stop(to):
            return [Stop(tuple(all_workers_of(to, size)))]
        case Check(number, to):
            roll.answers = {}
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
