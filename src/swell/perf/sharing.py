"""How fast several jobs on one GPU are.

Jobs that share a GPU always train side by side. The simulator computes their speeds from each job's *fill*:
the part of a GPU's time that one of its workers uses while it is alone there. A worker that fills 0.2 of a
GPU leaves room for others; one that fills all of it can only share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_OF_SHARE = 0.9
"""Promises count on this part of an equal share of the GPU's time."""
CONTENTION = 0.044
"""Part of its speed alone that a job loses to each other job on a GPU with room for all of them.

Measured on one H200 without MPS (`python -m benchmarks.gpu_sharing`, docs/lab/shared-gpus.md): each of four
small jobs trains at 0.867 of its speed alone, and 1 - 3 x 0.044 = 0.868. Four jobs that fill the GPU make
together what one of them makes alone, so where the GPU's time is used up, contention costs nothing more.
"""


class OnGpu(NamedTuple):
    fill: float
    """The part of a GPU's time that one worker of the job uses alone."""
    workers: int = 1
    """How many of the job's workers are on this GPU."""


def promised_part(per_gpu: int) -> float:
    """The part of its speed alone that a job has at least on slots that are one of `per_gpu` on a GPU.

    Neighbours that fill the GPU may be on all the other slots, and the driver may give a job a little less
    than an equal share of the time.
    """
    return 1.0 if per_gpu == 1 else LEAST_OF_SHARE / per_gpu


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

    The GPU's time is shared max-min fairly among the workers. Where it is not used up, each further job costs
    all workers `contention`, but no worker gets less than an equal share.
    """
    if len(jobs) == 1:
        return [alone_speed(jobs[0])]
    equal_share = 1.0 / sum(job.workers for job in jobs)
    slowed = max(1.0 - contention * (len(jobs) - 1), equal_share)
    level = fair_level(jobs)
    return [min(level / job.fill, slowed) for job in jobs]
