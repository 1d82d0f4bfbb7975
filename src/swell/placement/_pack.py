"""The choice of nodes for network packing. It is compiled because every resize of an elastic job needs it."""

from __future__ import annotations

import numpy as np

from swell.domain import IntArray
from swell.perf._compiled import compiled


@compiled
def fullest(free: IntArray, allowed: IntArray, gpus: int, mine: IntArray) -> int:
    """The allowed node with the fewest free GPUs, at least `gpus`; ties go to `mine`, then to the first."""
    best = -1
    for node in range(len(free)):
        if allowed[node] and free[node] >= gpus and (best < 0 or free[node] < free[best]):
            best = node
    if best >= 0:
        for node in mine:
            if allowed[node] and free[node] == free[best]:
                return node
    return best


@compiled
def pack(free: IntArray, crossing: IntArray, gpus: int, mine: IntArray) -> tuple[IntArray, IntArray]:
    """Nodes for a share and how many GPUs on each; see `simple.Packed` for the rule."""
    allowed = np.ones(len(free), dtype=np.int64)
    node = fullest(free, allowed, gpus, mine)
    if node >= 0:
        return np.array([node]), np.array([gpus])
    order = np.argsort(-free, kind="mergesort")
    apart = np.array([n for n in order if crossing[n] == 0], dtype=np.int64)
    beside = np.array([n for n in order if crossing[n] > 0], dtype=np.int64)
    fewest, room = 0, 0
    while room < gpus:
        room += free[order[fewest]]
        fewest += 1
    # How many of the `fewest` nodes have to be shared ones, because the others are not enough.
    on_shared = max(0, fewest - len(apart))
    while free[apart[: fewest - on_shared]].sum() + free[beside[:on_shared]].sum() < gpus:
        on_shared += 1
    chosen = np.concatenate((apart[: fewest - on_shared], beside[:on_shared]))
    chosen = chosen[np.argsort(-free[chosen], kind="mergesort")]
    counts = free[chosen].copy()
    rest = gpus - counts[:-1].sum()
    # The rest goes on the fullest node of its kind that can hold it, so that emptier nodes stay whole.
    last = chosen[-1]
    for n in range(len(free)):
        allowed[n] = (crossing[n] > 0) == (crossing[last] > 0)
    for n in chosen[:-1]:
        allowed[n] = 0
    chosen[-1] = fullest(free, allowed, rest, mine)
    counts[-1] = rest
    return chosen, counts
