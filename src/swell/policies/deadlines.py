"""Earliest deadline first, the baseline of ElasticFlow (ASPLOS'23, section 6), with and without admission.

As in the authors' simulator, a job is scaled out as far as its curve was measured (at most `widest` GPUs),
even where that is slower than a smaller share, and takes the largest power of two that is left where there
are fewer. Without admission nobody is refused, and a job that is already late keeps its place at the head:
that is why plain EDF collapses under load. With admission a newcomer comes in iff playing the schedule
forward ends it, and everybody promised before, in time.

Unlike theirs, ours plays forward with the resize cost, and a job that is late all the same does not make
every newcomer refused. Best-effort jobs come last, oldest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.perf.curves import powers_of_two
from swell.policies._reservations import Steps, level_of, roomy, take, usable_level
from swell.policies.base import ADMITTED, Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot


@dataclass(kw_only=True)
class Edf(Policy):
    """The most urgent job first, on as many GPUs as it can use at all."""

    name: ClassVar[str] = "edf"
    paper: ClassVar[str] = "baseline of ElasticFlow, ASPLOS'23"
    goal: ClassVar[str] = "the baseline for deadlines: optimal on one machine, and only without overload"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = False

    widest: int = 64
    """Most GPUs to scale a job out to."""

    def allocate(self, snapshot: Snapshot) -> Decision:
        """In order of deadline the widest share that is left for each."""
        _, gpus = self._tables(snapshot)
        return Decision(_give(gpus, _urgency(snapshot), snapshot.capacity))

    def _tables(self, snapshot: Snapshot) -> tuple[FloatArray, IntArray]:
        """By job and level (0, 1, 2, 4, ... GPUs): the rate on that much, and the share taken of it."""
        most = min(snapshot.widest, snapshot.curves.max_gpus, self.widest)
        bounds = np.minimum(snapshot.table.max_gpus[snapshot.rows], most)
        counts = np.append(0, powers_of_two(most))
        rates = snapshot.curves.rates[snapshot.curve[:, None], counts]
        # A curve is flat beyond its last measured point: going there is not scaling out.
        scales = (rates > 0) & (np.diff(rates, axis=1, prepend=0) != 0)
        scales &= (counts >= snapshot.min_gpus[:, None]) & (counts <= bounds[:, None])
        level = np.maximum.accumulate(np.where(scales, np.arange(len(counts)), 0), axis=1)
        rates, gpus = np.take_along_axis(rates, level, axis=1), counts[level]
        for i in np.flatnonzero(gpus[:, -1] == 0):
            least, bound = int(snapshot.min_gpus[i]), int(bounds[i])
            level_below = level_of(least)
            if 1 << (level_below - 1) < least <= bound < 1 << level_below:  # no power of two is within bounds
                rate = snapshot.curves.rates[snapshot.curve[i], least]
                gpus[i, level_below:], rates[i, level_below:] = (least, rate) if rate > 0 else (0, 0.0)
        return rates, gpus


@dataclass(kw_only=True)
class EdfAdmission(Edf):
    """Earliest deadline first behind a gate: only what will be in time comes in."""

    name: ClassVar[str] = "edf-admission"
    paper: ClassVar[str] = "baseline of ElasticFlow, ASPLOS'23"
    goal: ClassVar[str] = "what admission control alone is worth: EDF that refuses what it would be late with"

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit iff, played forward, the job and all that were in time without it are in time."""
        deadline_s = float(snapshot.deadline_s[index])
        if math.isinf(deadline_s):
            return ADMITTED
        order = _urgency(snapshot)
        in_time = self._ends_s(snapshot, order) <= snapshot.deadline_s
        if not in_time[index]:
            return Admission(False, reason="behind the more urgent jobs it would end after its deadline")
        if not in_time.all():
            others = order[order != index]
            broken = (self._ends_s(snapshot, others) <= snapshot.deadline_s) & ~in_time
            broken[index] = False
            if broken.any():
                job = snapshot.table.specs[snapshot.rows[int(np.argmax(broken))]].job_id
                return Admission(False, reason=f"it would make job '{job}' miss its deadline")
        return Admission(True, finish_s=deadline_s)

    def allocate(self, snapshot: Snapshot) -> Decision:
        """As without admission, on what promises count on; then what services have lent, job by job.

        A job with a deadline keeps lent GPUs, but it does not grow by them: that would cost it a pause, and
        another one when the service wants them back.
        """
        _, gpus = self._tables(snapshot)
        order = _urgency(snapshot)
        given = _give(gpus, order, snapshot.capacity - snapshot.lent)
        if not snapshot.lent:
            return Decision(given)
        most = np.where(np.isfinite(snapshot.deadline_s), snapshot.gpus, snapshot.capacity)
        more = _lend(gpus, order, given.copy(), snapshot.capacity, most)
        return Decision(more, lent=more - given)

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Jobs that end after their deadline if the schedule is played forward."""
        return np.flatnonzero(self._ends_s(snapshot, _urgency(snapshot)) > snapshot.deadline_s)

    def _ends_s(self, snapshot: Snapshot, order: IntArray) -> FloatArray:
        """When each job in this order ends if the schedule is played forward."""
        rates, gpus = self._tables(snapshot)
        lag_s = np.maximum(snapshot.table.paused_until_s[snapshot.rows] - snapshot.now_s, 0.0)
        return _play_forward(
            snapshot.ahead.times,
            snapshot.ahead.gpus,
            order,
            snapshot.remaining,
            rates,
            gpus,
            snapshot.gpus,
            lag_s,
            snapshot.resize_cost_s,
        )


def _urgency(snapshot: Snapshot) -> IntArray:
    """Job indices by deadline, then by age; best effort last."""
    return np.argsort(snapshot.deadline_s, kind="stable")


@compiled
def _give(gpus: IntArray, order: IntArray, capacity: int) -> IntArray:
    """One job after the other the largest share that is left for it."""
    given = np.zeros(len(order), np.int64)
    free = capacity
    for i in order:
        if free == 0:
            break
        given[i] = gpus[i, usable_level(gpus[i], gpus.shape[1] - 1, free)]
        free -= given[i]
    return given


@compiled
def _lend(gpus: IntArray, order: IntArray, given: IntArray, capacity: int, most: IntArray) -> IntArray:
    """One job after the other the largest share that what is left adds up to, and at most `most`."""
    free = capacity - given.sum()
    for i in order:
        share = gpus[i, usable_level(gpus[i], gpus.shape[1] - 1, min(free + given[i], most[i]))]
        if share > given[i]:
            free -= share - given[i]
            given[i] = share
    return given


@compiled
def _play_forward(
    begin_s: FloatArray,
    capacity: IntArray,
    order: IntArray,
    work: FloatArray,
    rates: FloatArray,
    gpus: IntArray,
    held: IntArray,
    lag_s: FloatArray,
    pause_s: float,
) -> FloatArray:
    """When each job ends if nobody else comes: in strict order everyone takes what the more urgent leave."""
    size = len(begin_s)
    n = len(order) + size
    times, free = roomy(begin_s, len(order) + 1), roomy(capacity, len(order) + 1)
    ends = np.full(len(work), np.inf)
    step_s = np.empty(n + 2)
    step_gpus = np.empty(n + 2, np.int64)
    for i in order:
        left, share, lag = work[i], held[i], lag_s[i]
        for b in range(size):
            level = usable_level(gpus[i], gpus.shape[1] - 1, free[b])
            if gpus[i, level] != share:
                share = gpus[i, level]
                lag = pause_s
            step_s[b], step_gpus[b] = times[b], share
            span = times[b + 1] - times[b] if b + 1 < size else np.inf
            run = span - lag
            if share > 0 and run > 0.0 and rates[i, level] * run >= left:
                ends[i] = times[b] + lag + left / rates[i, level]
                size = take(times, free, size, Steps(step_s[: b + 1], step_gpus[: b + 1], ends[i]), 1)
                break
            if share > 0:
                left -= rates[i, level] * max(run, 0.0)
                lag = max(-run, 0.0)
    return ends
