"""Schedulers of the time before elasticity: a job gets the GPUs it asked for, all of them or none.

A job that asks for more than it can ever be given (its own bound, its curve, the cluster as it is now) waits
without standing in anybody's way.
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
    """First come, first served, and nobody is ever sent away."""

    name: ClassVar[str] = "fifo"
    paper: ClassVar[str] = "-"
    goal: ClassVar[str] = "the order of arrival, without preemption"
    placer: ClassVar[PlacerName] = "first-fit"
    changes_with_time: ClassVar[bool] = False

    backfill: bool = False
    """Let later jobs pass one that does not fit; by default the first that does not fit holds up the rest."""

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
    knows: ClassVar[Knowledge] = "profiles"
    changes_with_time: ClassVar[bool] = False

    def allocate(self, snapshot: Snapshot) -> Decision:
        """The jobs that would be done soonest run."""
        most = snapshot.max_gpus
        rate = snapshot.rate_at(np.minimum(snapshot.requested, most))
        left_s = np.divide(snapshot.remaining, rate, out=np.full(len(rate), np.inf), where=rate > 0)
        # A job that makes no progress on what it asked for would hold its GPUs for ever.
        want = np.where(rate > 0, snapshot.requested, 0)
        order = np.argsort(left_s, kind="stable")
        return Decision(fill(order, want, most, snapshot.capacity, False))
