"""Optimus (EuroSys'18, section 4.1): GPUs go where they shorten the remaining time the most.

This is the variant that the Pollux authors ran as "Optimus+Oracle". It has all-reduce instead of parameter
servers, so that GPUs are the only resource, and it knows the true step times and remaining iterations. The
other half of the paper, which predicts the remaining steps from the loss, is `swell.perf.length`. The
paper's placement is the order given here (smallest jobs first) with the most-free placer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.policies._shares import fill, grow, least_share
from swell.policies.base import Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot


@dataclass(kw_only=True)
class Optimus(Policy):
    """One GPU each in order of arrival, then one at a time by the remaining time it saves."""

    name: ClassVar[str] = "optimus"
    paper: ClassVar[str] = "Optimus, EuroSys'18"
    goal: ClassVar[str] = "low average JCT by marginal gain"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "most-free"

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give each job its least share, then the rest greedily by marginal gain."""
        most = snapshot.max_gpus
        least = least_share(snapshot)
        # The jobs with the smallest minimum come first; equal ones, the usual case, in order of arrival.
        gpus = fill(np.argsort(least, kind="stable"), least, most, snapshot.capacity, False)
        free = snapshot.capacity - int(gpus.sum())
        rates, curve, left = snapshot.curves.rates, snapshot.curve, snapshot.remaining
        gpus = grow(rates, curve, gpus, most, left, free, True, snapshot.per_replica)
        return Decision(gpus, order=np.argsort(gpus, kind="stable"))
