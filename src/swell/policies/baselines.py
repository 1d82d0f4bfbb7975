"""Simple policies to compare with: two for rigid jobs, and max-min fairness.

Under the rigid ones a job gets all the GPUs it asked for, or none. A job that asks for more than it can ever
be given (because of its own bound, its curve or the present cluster) waits, and does not hold up other jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.domain import IntArray
from swell.policies._shares import fill, least_share
from swell.policies.base import Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot


@dataclass(kw_only=True)
class Fifo(Policy):
    """First come, first served; a running job is never preempted."""

    name: ClassVar[str] = "fifo"
    paper: ClassVar[str] = "-"
    goal: ClassVar[str] = "the order of arrival, without preemption"
    rigid: ClassVar[bool] = True
    placer: ClassVar[PlacerName] = "first-fit"
    changes_with_time: ClassVar[bool] = False

    backfill: bool = False
    """Let later jobs pass one that does not fit; by default they wait behind the first that does not fit."""

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Running jobs stay; the others start in order of arrival."""
        order = np.argsort(snapshot.gpus == 0, kind="stable")
        gpus = fill(order, snapshot.requested, snapshot.max_gpus, snapshot.capacity, not self.backfill)
        return Decision(gpus)


@dataclass(kw_only=True)
class Srtf(Policy):
    """Shortest remaining time first at the GPUs asked for; preemptive, and smaller jobs fill the gaps."""

    name: ClassVar[str] = "srtf"
    paper: ClassVar[str] = "-"
    goal: ClassVar[str] = "low average JCT for rigid jobs whose length is known"
    rigid: ClassVar[bool] = True
    knows: ClassVar[Knowledge] = "profiles"
    changes_with_time: ClassVar[bool] = False

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Run the jobs that would end soonest."""
        most = snapshot.max_gpus
        rate = snapshot.rate_at(np.minimum(snapshot.requested, most))
        left_s = np.divide(snapshot.remaining, rate, out=np.full(len(rate), np.inf), where=rate > 0)
        # A job that makes no progress on the GPUs it asked for would hold them for ever.
        want = np.where(rate > 0, snapshot.requested, 0)
        order = np.argsort(left_s, kind="stable")
        return Decision(fill(order, want, most, snapshot.capacity, False))


# Max-min fairness on GPUs: equal shares, except for jobs that cannot use as many.


def water_fill(low: IntArray, high: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Shares clip(level, low, high) for the highest level that fits in `capacity`, and that level."""
    below, above = 0, capacity + 1
    while above - below > 1:
        level = (below + above) // 2
        if int(np.clip(level, low, high).sum()) <= capacity:
            below = level
        else:
            above = level
    return np.clip(below, low, high), below


@dataclass(kw_only=True)
class MaxMin(Policy):
    """Give every job the same share, by water-filling, but no GPUs that would not make it faster.

    If the GPUs do not divide evenly, the rest goes one each to jobs that already hold more than the common
    share (so that they are not resized), then to the oldest. With more jobs than GPUs the oldest jobs have
    one each: jobs do not take turns.
    """

    name: ClassVar[str] = "max-min"
    paper: ClassVar[str] = "-"
    goal: ClassVar[str] = "equal shares"
    knows: ClassVar[Knowledge] = "profiles"
    changes_with_time: ClassVar[bool] = False

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Raise all shares together until the GPUs are spent."""
        least, capacity = least_share(snapshot), snapshot.capacity
        low = fill(np.arange(len(least)), least, snapshot.max_gpus, capacity, False)
        high = np.minimum(snapshot.curves.best_gpus[snapshot.curve], snapshot.max_gpus)
        high = np.where(low > 0, np.maximum(high, low), 0)
        gpus, level = water_fill(low, high, capacity)
        more = np.flatnonzero((gpus == level) & (gpus < high))
        more = more[np.argsort(snapshot.gpus[more] <= level, kind="stable")]
        gpus[more[: capacity - int(gpus.sum())]] += 1
        return Decision(_without_waste(snapshot, gpus, low))


def _without_waste(snapshot: Snapshot, gpus: IntArray, low: IntArray) -> IntArray:
    """Take back GPUs from jobs that are no slower without them (a curve may dip, or be 0 at some counts)."""
    while True:
        fewer = np.maximum(gpus - 1, 0)
        wasted = (gpus > low) & (snapshot.rate_at(fewer) >= snapshot.rate_at(gpus))
        if not wasted.any():
            return gpus
        gpus = np.where(wasted, fewer, gpus)
