"""Optimus (EuroSys'18, section 4.1): GPUs go where they shorten the remaining time the most.

As the Pollux authors ran it ("Optimus+Oracle"): all-reduce instead of parameter servers, so a GPU is the one
resource, and the true step times and remaining iterations instead of fitted ones. The paper's other half, the
prediction of the steps left from the loss, is `swell.perf.convergence`; its placement is the order given here
(smallest jobs first) with the most-free placer.
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
        """The marginal-gain greedy."""
        most = snapshot.max_gpus
        least = least_share(snapshot)
        # The smallest minimum first; among equals, which is the rule, the order of arrival.
        gpus = fill(np.argsort(least, kind="stable"), least, most, snapshot.capacity, False)
        free = snapshot.capacity - int(gpus.sum())
        gpus = grow(snapshot.curves.rates, snapshot.curve, gpus, most, snapshot.remaining, free, True)
        return Decision(gpus, order=np.argsort(gpus, kind="stable"))
