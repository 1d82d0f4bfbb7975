"""Where workers shall be, and who of those not yet in a generation is needed: helpers of `membership`."""

from __future__ import annotations

from swell.train.generations import Worker


def place(
    target: int, slots: list[int] | None, before: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """The slots of `target` workers; ValueError if they are not that many different ones.

    Whoever wants another number of a job that has slots has to say which, unless it is fewer.
    """
    if slots is not None:
        if len(set(slots)) != target or len(slots) != target:
            raise ValueError(f"slots: got {slots}, need {target} different ones, one for each worker")
        return tuple(slots)
    if before is not None and len(before) < target:
        raise ValueError(f"slots: which {target} slots is not said, and this job has {len(before)}")
    return None if before is None else before[:target]


def newcomers(
    present: list[Worker], free: list[int] | None, waiting: int, urgent: int
) -> tuple[list[int | None], list[Worker]]:
    """Slots to start somebody on, and who of those not in yet is one too many.

    `present` are they, the best prepared first; `free` the slots no member is on. None: slots do not matter;
    then there may be `waiting` of them, and so many as are `urgent` are started now.
    """
    if free is None:
        # The youngest, unprepared ones go first.
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
    return int(name[1:]) if name[1:].isdigit() else 0
