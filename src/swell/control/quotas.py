"""Quotas: how many slots and running jobs one user may have, whatever the policy.

A policy decides within the quotas and does not know of them. Of a user's jobs it is shown only those that may
run now, with bounds on their slots that add up to no more than the user's quota. Jobs that were promised a
finish come first, then those that run, then the others by age.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swell.control.limits import Limits
from swell.control.model import JobRecord
from swell.domain import IntArray, many
from swell.policies import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A job that wants slots."""

    job_id: str
    owner: str
    least: int
    most: int
    promised: bool = False
    """Whether it was promised a finish."""
    running: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """What a user has apart from the contenders: profiling runs."""

    jobs: int = 0
    slots: int = 0


NOTHING = Use()


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the quotas allow."""

    most: Mapping[str, int]
    """The most slots of each job that may run now."""
    why_not: Mapping[str, str]
    """For each job that may not: which quota keeps it waiting."""


def contender(record: JobRecord, widest: int, asked: str | None = None) -> Contender:
    """A job as it contends for its owner's quota. The deadline of the job `asked` is being decided on."""
    request = record.request
    return Contender(
        job_id=record.job_id,
        owner=record.owner,
        least=request.min_workers,
        most=max(record.max_workers or widest, request.min_workers),
        promised=record.promise.guaranteed_s is not None
        or (record.job_id == asked and request.deadline_s is not None),
        running=bool(record.wanted),
    )


def used_by(runs: Iterable[tuple[str, int]]) -> dict[str, Use]:
    """By user: what profiling runs use, given as owner and slots."""
    used: dict[str, Use] = {}
    for owner, slots in runs:
        before = used.get(owner, NOTHING)
        used[owner] = Use(before.jobs + 1, before.slots + slots)
    return used


def left_by(promised: Sequence[JobRecord], limits: Limits, capacity: int) -> int:
    """The slots that a user's promised jobs leave of the user's quota."""
    if limits.running is not None and len(promised) >= limits.running:
        return 0
    slots = capacity if limits.slots is None else limits.slots
    return max(slots - sum(len(record.wanted) for record in promised), 0)


def share_out(jobs: Sequence[Contender], limits: Limits, used: Mapping[str, Use]) -> Allowed:
    """Share out each user's quota among the user's jobs, which are given oldest first."""
    by_owner: dict[str, list[Contender]] = {}
    for job in jobs:
        by_owner.setdefault(job.owner, []).append(job)
    most: dict[str, int] = {}
    why_not: dict[str, str] = {}
    for owner, mine in by_owner.items():
        mine.sort(key=lambda job: (not job.promised, not job.running))
        use = used.get(owner, NOTHING)
        chosen, reason = _choose(owner, mine, limits, use)
        why_not |= {job.job_id: reason for job in mine[len(chosen) :]}
        most |= _divide(chosen, None if limits.slots is None else limits.slots - use.slots)
    return Allowed(most, why_not)


def within(decision: Decision, most: IntArray) -> Decision:
    """The decision with no job above its bound: some policies keep to plans made when it was higher."""
    if not (decision.gpus > most).any():
        return decision
    per_node = decision.per_node
    if per_node is not None:
        # From the left, as many as are still allowed on each node.
        before = np.cumsum(per_node, axis=1) - per_node
        per_node = np.clip(most[:, None] - before, 0, per_node)
    return replace(decision, gpus=np.minimum(decision.gpus, most), per_node=per_node)


def _choose(owner: str, jobs: Sequence[Contender], limits: Limits, use: Use) -> tuple[list[Contender], str]:
    """The first jobs that may run together, and why the next one may not."""
    slots = use.slots
    for count, job in enumerate(jobs):
        if limits.running is not None and use.jobs + count >= limits.running:
            return list(jobs[:count]), f"{owner} may have {many(limits.running, 'running job')} at most"
        slots += job.least
        if limits.slots is not None and slots > limits.slots:
            return list(jobs[:count]), f"{owner} may have {many(limits.slots, 'slot')} at most"
    return list(jobs), ""


def _divide(jobs: Iterable[Contender], slots: int | None) -> dict[str, int]:
    """Bounds that add up to no more than `slots`; jobs with a promise get all that they can use first."""
    if slots is None:
        return {job.job_id: job.most for job in jobs}
    jobs = list(jobs)
    bounds = {job.job_id: job.least for job in jobs}
    spare = slots - sum(bounds.values())
    for job in jobs:
        if job.promised:
            more = min(max(job.most - job.least, 0), spare)
            bounds[job.job_id] += more
            spare -= more
    # One slot at a time, always to the job with the lowest bound.
    open_ = [(job.least, i) for i, job in enumerate(jobs) if not job.promised and job.most > job.least]
    heapq.heapify(open_)
    while spare > 0 and open_:
        bound, i = heapq.heappop(open_)
        bounds[jobs[i].job_id] = bound + 1
        spare -= 1
        if bound + 1 < jobs[i].most:
            heapq.heappush(open_, (bound + 1, i))
    return bounds
