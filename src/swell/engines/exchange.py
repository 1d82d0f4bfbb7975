"""Which job gives way when jobs wait for each other's slots in a circle. Pure.

A job keeps its slots until it has others, so jobs that exchange all of their slots would wait for ever. Then
one job gives way. If it can, it shrinks: it keeps whole replicas, if possible on slots that nobody in the
circle waits for. Only where no job can shrink by enough, one saves its state and stops, and is started again
on the slots that it is to have. Once a job of the circle is on slots that it is to have, it never leaves them
for another one, so each turn of this brings at least one job nearer, and a circle has an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swell.domain import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanger:
    """A job that runs, the slots it was last told to use, and those it is to have."""

    job_id: str
    told: Placement
    wanted: Placement
    """Those of its wanted slots that workers can be on."""
    size: int = 1
    """How many workers a replica has: the fewest that the job can go on with."""
    able: bool = True
    """Whether it can be told anything now."""


def give_way(jobs: Sequence[Exchanger]) -> tuple[str, Placement] | None:
    """The job that gives way, and the slots that it keeps; () if it has to stop. None without a circle.

    `jobs`: those that are on none of the slots that they are to have.
    """
    circle = _circle(jobs)
    asked = {slot for job in circle for slot in job.wanted}
    able = [job for job in circle if job.able and asked.intersection(job.told)]
    if not able:
        return None
    smaller: list[tuple[Exchanger, Placement]] = [(job, _kept(job, circle)) for job in able]
    shrink = [(job, keeps) for job, keeps in smaller if len(keeps) < len(job.told)]
    stop: list[tuple[Exchanger, Placement]] = [
        (job, ()) for job in sorted(able, key=lambda job: len(job.told))
    ]
    helpful = (option for option in [*shrink, *stop] if _helps(*option, circle))
    job, keeps = next(helpful, stop[0])
    return job.job_id, keeps


def _circle(jobs: Sequence[Exchanger]) -> list[Exchanger]:
    """The jobs that wait for slots of each other and of nobody else: none of them can ever move."""
    holders = {slot: job.job_id for job in jobs for slot in job.told}
    stuck = {job.job_id: job for job in jobs if job.wanted}
    while True:
        moving = [
            job
            for job in stuck.values()
            if sum(holders.get(slot) not in stuck for slot in job.wanted) >= min(job.size, len(job.wanted))
        ]
        if not moving:
            return sorted(stuck.values(), key=lambda job: job.job_id)
        for job in moving:
            del stuck[job.job_id]


def _kept(job: Exchanger, circle: Sequence[Exchanger]) -> Placement:
    """What a job keeps that shrinks as far as the others need it."""
    asked = {slot for other in circle if other is not job for slot in other.wanted}
    first = sorted(job.told, key=lambda slot: slot in asked)
    spare = sum(slot not in asked for slot in job.told)
    return tuple(sorted(first[: max(spare - spare % job.size, job.size)]))


def _helps(job: Exchanger, keeps: Placement, circle: Sequence[Exchanger]) -> bool:
    """Whether another job of the circle can move once this one keeps no more than that."""
    held = {slot for other in circle if other is not job for slot in other.told} | set(keeps)
    return any(
        sum(slot not in held for slot in other.wanted) >= min(other.size, len(other.wanted))
        for other in circle
        if other is not job
    )
