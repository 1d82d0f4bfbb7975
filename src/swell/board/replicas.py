"""Shares of jobs whose GPUs come in replicas: a decision is rounded to whole ones before it is placed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from swell.domain import IntArray
from swell.policies import Decision


def in_replicas(decision: Decision, size: IntArray, most: IntArray) -> Decision:
    """The decision with every share a multiple of its job's `size`, and in sum no larger than before.

    Shares are rounded down. What that frees completes a replica for those that lacked least, within `most`.
    A policy that names nodes takes the rest from the nodes on which a job has fewest.
    """
    rest = decision.gpus % size
    if not rest.any():
        return decision
    if decision.per_node is not None:
        per_node = decision.per_node.copy()
        for i in np.flatnonzero(rest).tolist():
            for node in np.argsort(np.where(per_node[i] > 0, per_node[i], np.iinfo(np.int64).max)).tolist():
                cut = min(int(rest[i]), int(per_node[i, node]))
                per_node[i, node] -= cut
                rest[i] -= cut
        return replace(decision, gpus=per_node.sum(axis=1), per_node=per_node)
    gpus, free = decision.gpus - rest, int(rest.sum())
    for i in np.argsort(size - rest, kind="stable").tolist():
        if rest[i] and size[i] <= free and gpus[i] + size[i] <= most[i]:
            gpus[i] += size[i]
            free -= int(size[i])
    return replace(decision, gpus=gpus)
