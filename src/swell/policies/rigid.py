"""Schedulers for rigid jobs: a job gets all the GPUs it asked for, or none.

A job that asks for more than it can ever be given (because of its own bound, its curve or the present
cluster) waits, and does not hold up other jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.policies._shares import fill
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
