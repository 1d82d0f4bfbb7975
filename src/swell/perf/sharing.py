"""Several jobs on one GPU: when they train side by side and when in turns, and how fast each of them is then.

The decision is one function for the live runtime (`swell.train.turns`), which measures the speeds, and for
the simulator, which computes them from each job's *fill*: the part of a GPU's time that one of its workers
uses while it is alone there. A worker that fills 0.2 of a GPU leaves room for others; one that fills all of
it can only share.

This module imports nothing but the standard library, because workers import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WORTH = 1.05
"""Side by side, the jobs' speeds relative to alone must add up to this; in turns they add up to 1."""
LEAST_OF_TURN = 0.9
"""Side by side, each job must have at least this much of the speed that turns would give it."""
CONTENTION = 0.044
"""What each other job on a GPU costs a job that trains side by side, as a part of its speed alone.

Measured on one H200 without MPS (`python -m benchmarks.gpu_sharing`, docs/gpu.md): each of four small jobs
trains at 0.867 of its speed alone, and 1 - 3 x 0.044 = 0.868.
"""


class OnGpu(NamedTuple):
    """A job on one GPU."""

    fill: float
    """The part of a GPU's time that one worker of the job uses alone."""
    workers: int = 1
    """How many of the job's workers are on this GPU."""


def parts_in_turns(workers: Sequence[int]) -> list[float]:
    """Which part of the time each job on a GPU has in turns, by how many of its workers are there.

    A job's turn is as long as it has workers on the GPU. Else a job with two workers, which share the time of
    its turn, would be slower than promises count on.
    """
    total = sum(workers)
    return [count / total for count in workers]


def side_by_side(relative: Sequence[float], turns: Sequence[float]) -> bool:
    """Whether the jobs on a GPU stay side by side, else they take turns.

    `relative`: each job's speed side by side as a part of its speed alone. `turns`: the part of the time that
    each job has in turns.
    """
    if len(relative) < 2:
        return True
    slowed = any(speed < LEAST_OF_TURN * part for speed, part in zip(relative, turns, strict=True))
    return sum(relative) >= WORTH and not slowed


def promised_part(per_gpu: int) -> float:
    """The part of its speed alone that a job has at least on slots that are one of `per_gpu` on a GPU.

    Neighbours that fill the GPU may be on all the other slots, and side by side a job may have a little less
    than its turn.
    """
    return 1.0 if per_gpu == 1 else LEAST_OF_TURN / per_gpu


def alone_speed(job: OnGpu) -> float:
    """How fast each worker of a job is that has a GPU for itself, relative to a worker alone on a GPU.

    The job's own workers share the GPU. They run the same step at the same time, so they are not counted as
    contention.
    """
    return min(1.0, 1.0 / (job.fill * job.workers))


def fair_level(jobs: Sequence[OnGpu]) -> float:
    """The most of a GPU's time that a worker gets if it is shared max-min fairly (by water-filling)."""
    left, sharing = 1.0, sum(job.workers for job in jobs)
    for job in sorted(jobs):
        level = left / sharing
        if job.fill >= level:
            return level
        left -= job.fill * job.workers
        sharing -= job.workers
    return 1.0


def speeds_on_gpu(jobs: Sequence[OnGpu], contention: float = CONTENTION) -> list[float]:
    """How fast the workers of each job on a GPU are, relative to a worker that is alone on a GPU.

    Side by side, the GPU's time is shared max-min fairly among the workers, and each further job costs
    everybody `contention`. The jobs stay side by side or take turns by the rule of the live runtime.
    """
    alone = [alone_speed(job) for job in jobs]
    if len(jobs) == 1:
        return alone
    level, slowed = fair_level(jobs), max(1.0 - contention * (len(jobs) - 1), 0.0)
    beside = [min(1.0, level / job.fill) * slowed for job in jobs]
    turns = parts_in_turns([job.workers for job in jobs])
    if side_by_side([speed / own for speed, own in zip(beside, alone, strict=True)], turns):
        return beside
    return [own * part for own, part in zip(alone, turns, strict=True)]
