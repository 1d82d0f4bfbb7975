"""Helpers of several policies: fill a cluster in some order, find the least share, grow shares by gain.

The loops are compiled; they work on the arrays of a snapshot and know nothing of policies.
"""

from __future__ import annotations

import heapq

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.policies.snapshot import Snapshot


@compiled
def fill(order: IntArray, want: IntArray, most: IntArray, free: int, strict: bool) -> IntArray:
    """Give each job, in the given order, all the GPUs it wants or none.

    A job that does not fit is passed over; with `strict`, the jobs after it get nothing either. A job that
    wants no GPUs, or more than it can ever be given (`most`), is always passed over.
    """
    gpus = np.zeros(len(want), dtype=np.int64)
    for i in order:
        if want[i] <= free and want[i] <= most[i]:
            gpus[i] = want[i]
            free -= want[i]
            if free == 0:
                break
        elif strict and want[i] <= most[i]:
            break
    return gpus


ANY_SHARE: IntArray = np.empty(0, dtype=np.int64)
"""Passed in place of a table of legal shares where every share is legal."""


@compiled
def _least(rates: FloatArray, curve: IntArray, low: IntArray, high: IntArray, legal: IntArray) -> IntArray:
    found = np.zeros(len(curve), dtype=np.int64)
    for i in range(len(curve)):
        for k in range(max(low[i], 1), high[i] + 1):
            if rates[curve[i], k] > 0.0:
                if len(legal) == 0 or legal[k]:
                    found[i] = k
                    break
                if found[i] == 0:
                    found[i] = k  # unless there is a legal one
    return found


def least_share(snapshot: Snapshot, legal: IntArray = ANY_SHARE) -> IntArray:
    """The smallest legal share within each job's bounds on which it progresses; 0 if there is none.

    A job whose bounds contain no legal share gets the smallest of them all the same.
    """
    return _least(snapshot.curves.rates, snapshot.curve, snapshot.min_gpus, snapshot.max_gpus, legal)


@compiled
def _gain(now: float, more: float, weight: float, time: bool) -> float:
    if more <= now:
        return 0.0
    return weight * (1.0 / now - 1.0 / more) if time else weight * (more - now)


@compiled
def grow(
    rates: FloatArray,
    curve: IntArray,
    gpus: IntArray,
    most: IntArray,
    weight: FloatArray,
    free: int,
    time: bool,
    step: IntArray,
) -> IntArray:
    """Give `free` GPUs to the running job with the largest gain, `step` at a time, until no job gains.

    The gain of a job is `weight` times the rate that each further GPU adds or, if `time`, times the seconds
    that it takes off a unit of work. Ties go to the older job.
    """
    gpus = gpus.copy()
    heap = [(0.0, -1)]
    heap.pop()
    for i in range(len(gpus)):
        if 0 < gpus[i] <= most[i] - step[i]:
            gain = _gain(rates[curve[i], gpus[i]], rates[curve[i], gpus[i] + step[i]], weight[i], time)
            gain /= step[i]
            if gain > 0.0:
                heap.append((-gain, i))
    heapq.heapify(heap)
    while free > 0 and len(heap) > 0:
        i = heap[0][1]
        if step[i] > free:
            heapq.heappop(heap)
            continue
        gpus[i] += step[i]
        free -= step[i]
        gain = 0.0
        if gpus[i] <= most[i] - step[i]:
            gain = _gain(rates[curve[i], gpus[i]], rates[curve[i], gpus[i] + step[i]], weight[i], time)
            gain /= step[i]
        if gain > 0.0:
            heapq.heapreplace(heap, (-gain, i))
        else:
            heapq.heappop(heap)
    return gpus
