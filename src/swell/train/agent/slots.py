"""Helpers of `membership`: which slots workers get, which of the waiting ones are needed."""

from __future__ import annotations

from swell.train.agent.errors import Refused
from swell.train.agent.generations import Worker

PER_GPU = "SWELL_PER_GPU"
"""The variable that tells a worker how many workers share its GPU."""


def place(
    target: int, slots: list[int] | None, before: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """The slots of `target` workers; Refused if `slots` are not that many different ones.

    For a job that has slots, `slots` may be left out only if the number of workers does not grow.
    """
    if slots is not None:
        if len(set(slots)) != target or len(slots) != target:
            raise Refused(f"slots: got {slots}, need {target} different slots, one for each worker")
        return tuple(slots)
    if before is not None and len(before) < target:
        raise Refused(f"slots: this job has {len(before)}; to grow it to {target}, name {target} slots")
    return None if before is None else before[:target]


def open_slots(slots: tuple[int, ...] | None, members: list[Worker]) -> list[int] | None:
    """The slots without a member; None for a job without slots."""
    taken = {member.slot for member in members}
    return None if slots is None else [slot for slot in slots if slot not in taken]


def newcomers(
    present: list[Worker], free: list[int] | None, waiting: int, urgent: int
) -> tuple[list[int | None], list[Worker]]:
    """Which slots need a new worker, and which of the waiting workers to stop.

    `present`: workers started but not yet members, best prepared first. `free`: slots without a member, or
    None for a job without slots. Such a job may have `waiting` workers, and needs `urgent` of them now.
    """
    if free is None:
        # The youngest, least prepared workers are stopped first.
        return [None] * (urgent - len(present)), present[waiting:][::-1]
    too_many: list[Worker] = []
    still: list[int | None] = list(free)
    for worker in present:
        if worker.slot in still:
            still.remove(worker.slot)
        else:
            too_many.append(worker)
    return still, too_many


def age(name: str) -> int:
    """The number in a worker's name: the lower, the older."""
    return int(name[1:]) if name[1:].isdecimal() else 0


def ended_early(name: str, worker: Worker) -> str:
    """Why a job is over in which a worker's script ended before the others', and what to do about it."""
    if worker.address is None:
        return (
            f"the script ended in worker {name} without ever calling swell.elastic(model, optimizer), so "
            "nothing can be made elastic. Add the call (see docs/how/runtime.md), try --auto, or use plain "
            "python"
        )
    return (
        f"worker {name}'s script ended before training was over. Let every worker run the loop "
        "`for epoch in job.epochs(n)` to its end, or leave it on all of them together with "
        "`if job.agree(...): break`"
    )
