"""How many slots each team may use now: its own, and what others leave. Pure arithmetic on counts.

Two rules give every answer. *Entitlement* (`swell.domain.entitled`): a team is entitled to its quota; if the
cluster has fewer slots than all quotas together, to its part of them. *Borrowing*: slots that the entitled
teams do not use go to the teams that can use more, the highest class of priority first, and inside a class in
equal parts.
"""

from __future__ import annotations

import numpy as np

from swell.domain import IntArray
from swell.policies.fairness import water_fill


def share_slots(own: IntArray, demand: IntArray, capacity: int) -> IntArray:
    """The slots of each team.

    Args:
        own: what each team is entitled to, in sum no more than `capacity`.
        demand: teams x classes, the highest class first: the most slots that the jobs can use.
    """
    shares = np.minimum(own, demand.sum(axis=1))
    for wanted in np.cumsum(demand, axis=1).T:
        free = capacity - int(shares.sum())
        if free <= 0:
            break
        more = np.maximum(wanted - shares, 0)
        borrowed, level = water_fill(np.zeros(len(own), dtype=np.int64), more, free)
        rest = np.flatnonzero(more > level)[: free - int(borrowed.sum())]
        borrowed[rest] += 1
        shares = shares + borrowed
    return shares


def asking_order(own: IntArray, demand: IntArray) -> list[int]:
    """Teams in the order in which they are asked: those first that want the least of what is theirs.

    A team that is asked later can be given what those before it did not use after all.
    """
    pressure = demand.sum(axis=1) / np.maximum(own, 0.5)
    return [int(i) for i in np.argsort(pressure, kind="stable")]
