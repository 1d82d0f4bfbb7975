"""How long a job will still take if nobody says: from the jobs of its kind that have ended.

Jobs of one kind have the same model and, unless they adapt it, the same batch size. What is observed of a job
is its progress; when it ends, its progress was its length. From the lengths of a kind follows, for a job that
has done so much, the *Gittins index*: the most that it may bring per second of work, that is the chance to
end within some time over the time that it takes on average until then. Its inverse is what tide takes for the
work left. If all jobs of a kind are equally long it is exactly what is left; if most are short and some very
long, it is short at first and grows once a job has outlived the short ones (Gittins 1979; for a scheduler of
training jobs: Tiresias).

A kind of which no job has ended, or a job that has outlived all that have, is judged by all jobs that have
ended, in seconds on one GPU. But it is taken to be at least twice as long as the furthest job of its kind has
come (so of two long jobs the one that is further has less left, and the two do not take turns).

Where kinds say little about lengths (`trusted` is False), such guesses do more harm than good.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.policies._seen_models import Kind, kind_of
from swell.policies.memory import Memory
from swell.policies.snapshot import Snapshot

CLOSE = 0.25
"""A length is predicted well if it is within so much of the median of its kind, as a logarithm."""
REMEMBERED = 200
"""The last so many lengths of a kind, and of all kinds together, are remembered."""


@dataclass
class Lengths:
    """Lengths of the jobs that have ended, by kind, and the progress of those that have not."""

    _seen: Memory = field(
        default_factory=lambda: Memory(at_first=-1.0, done=0.0, rate=0.0, one=0.0, kind=-1.0, at_s=0.0)
    )
    """For each active job: the work left when it was first seen, and as of the last look its progress, its
    rate, its rate on one GPU, its kind and the moment."""
    _kinds: dict[Kind, int] = field(default_factory=dict)
    _ended: list[deque[float]] = field(default_factory=list)
    """By kind: the lengths of its ended jobs, in the unit of their curves."""
    _close: deque[bool] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """For each ended job of a kind that was known: whether its length was predicted well."""
    _all_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The lengths of all ended jobs, in seconds on one GPU."""

    @property
    def trusted(self) -> bool:
        """Whether most jobs that ended of late were about as long as those of their kind before them."""
        return 2 * sum(self._close) > len(self._close)

    def left_s(self, snapshot: Snapshot, one: FloatArray) -> FloatArray:
        """What each job is taken to have left, in seconds on one GPU; `one` are the rates there."""
        self._observe(snapshot, one)
        seen = self._seen
        kind, done = seen["kind"].astype(np.int64), seen["done"]
        rate = np.where(one > 0, one, 1.0)
        sizes = np.cumsum([0, *map(len, self._ended), len(self._all_s)])
        known = np.concatenate([np.sort(lengths) for lengths in (*self._ended, self._all_s)])
        left_s = gittins(known, sizes[kind], sizes[kind + 1], done) / rate
        pool = np.full(len(kind), len(self._ended))
        by_all = gittins(known, sizes[pool], sizes[pool + 1], done / rate)
        furthest = np.zeros(len(self._ended))
        np.maximum.at(furthest, kind, done)
        twice_s = (2 * furthest[kind] - done) / rate
        guess_s = np.maximum(np.where(np.isfinite(by_all), by_all, 0.0), twice_s)
        return np.where(np.isfinite(left_s), left_s, guess_s)

    def _observe(self, snapshot: Snapshot, one: FloatArray) -> None:
        """Note the lengths of the jobs that have ended since the last look, and how far the others are."""
        seen, now_s = self._seen, snapshot.now_s
        for gone in np.flatnonzero(~np.isin(seen.numbers, snapshot.numbers)).tolist():
            length = float(seen["done"][gone] + seen["rate"][gone] * (now_s - seen["at_s"][gone]))
            if length > 0:
                known = self._ended[int(seen["kind"][gone])]
                if known:
                    self._close.append(abs(math.log(length / float(np.median(known)))) < CLOSE)
                known.append(length)
                self._all_s.append(length / max(float(seen["one"][gone]), 1e-9))
        seen.follow(snapshot)
        for i in np.flatnonzero(seen["kind"] < 0).tolist():
            kind = kind_of(snapshot, i, snapshot.table.belief[snapshot.rows[i]])
            number = self._kinds.setdefault(kind, len(self._kinds))
            if number == len(self._ended):
                self._ended.append(deque(maxlen=REMEMBERED))
            seen["kind"][i] = number
        new = seen["at_first"] < 0
        seen["at_first"][new] = snapshot.remaining[new]
        seen["done"][:] = np.maximum(seen["at_first"] - snapshot.remaining, 0.0)
        seen["rate"][:] = np.where(snapshot.gpus > 0, snapshot.table.rate[snapshot.rows], 0.0)
        seen["one"][:], seen["at_s"][:] = one, now_s


@compiled
def gittins(lengths: FloatArray, first: IntArray, last: IntArray, done: FloatArray) -> FloatArray:
    """The inverse of the Gittins index of each job, which has `done` so much work.

    The lengths of job i's kind are `lengths[first[i] : last[i]]`, ascending. Infinite for a job that has
    outlived them all.
    """
    out = np.full(len(done), np.inf)
    for i in range(len(done)):
        begin = first[i]
        while begin < last[i] and lengths[begin] <= done[i]:
            begin += 1
        alive, below = last[i] - begin, 0.0
        for k in range(begin, last[i]):
            # Stop the job after as long as the k-th needs: the time that this takes per job that ends.
            left = lengths[k] - done[i]
            below += left
            ended = k - begin + 1
            out[i] = min(out[i], (below + (alive - ended) * left) / ended)
    return out
