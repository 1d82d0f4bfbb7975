"""OASiS (INFOCOM'18) and A_online: online admission by prices, primal-dual.

GPU time has a price that grows from L to U with the part of the cluster already reserved at that moment:
p = L (U/L)^(g/C). L and U are the smallest and the largest worth of a GPU-second over the jobs seen so far.
A newcomer looks for the schedule (GPUs in each slot) whose utility less its cost at present prices is
largest; a dynamic programme over slots and work done finds it. It comes in iff that is positive, keeps the
schedule, and so raises the price for those after it.

Utility never grows with the completion time: a sigmoid around the deadline, where a job has one (a schedule
beyond it is worth nothing), else r / (r + completion time), with r the run time on the job's smallest share.

Choices of ours:
- The slots are a newcomer's own: from now to its deadline, a quarter of its shortest run time at first and
  longer later, so that jobs of minutes and of days are cut equally fine. Only GPUs are a resource.
- Schedules pay for resizes, and keep the last share a little longer for pauses nobody planned.
- A job without deadline is never refused: it takes the best schedule there is, however dear.
- A job that was thrown off its schedule (by a lost node, a migration) buys another at any price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.perf.curves import powers_of_two
from swell.policies._bids import Bidder, best_schedule, utility
from swell.policies.base import ADMITTED, Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

SLACK_S = 1e-3
"""Schedules are planned to end this long before the deadline and kept this long after their end, so that
rounding decides nothing."""

UNPLANNED = 2
"""Pauses beyond the planned ones for which a schedule keeps its last share, within its last slot."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """GPUs from each start to the next, the last until the end."""

    start_s: FloatArray
    gpus: IntArray
    end_s: float

    def at(self, now_s: float) -> int:
        """GPUs at a moment."""
        step = int(np.searchsorted(self.start_s, now_s, side="right")) - 1
        return int(self.gpus[step]) if step >= 0 and now_s < self.end_s else 0

    def next_change_s(self, now_s: float) -> float:
        """When the GPUs change next, its end included; infinite after that."""
        step = int(np.searchsorted(self.start_s, now_s, side="right"))
        change_s = float(self.start_s[step]) if step < len(self.start_s) else self.end_s
        return change_s if change_s > now_s else math.inf


@dataclass(kw_only=True)
class Oasis(Policy):
    """Sell GPU time at prices that grow with the load to those who are worth it."""

    name: ClassVar[str] = "oasis"
    paper: ClassVar[str] = "OASiS, INFOCOM'18"
    goal: ClassVar[str] = "total utility: refuses what is not worth its price, and keeps to its schedules"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = False

    slots: int = 48
    """Slots that a newcomer's time is cut into."""
    steps: int = 128
    """Steps of work in the dynamic programme."""
    sharpness: float = 50.0
    """How steeply the utility falls at the deadline; 50: from 0.92 to 0.5 over the last 5% of the time."""
    worth: str = "job"
    """What a job is worth: 'job' for all the same, 'work' for the GPU-seconds it needs at least."""

    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False)
    """By row of the table."""
    _least: float = field(default=math.inf, init=False, repr=False)
    _most: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.worth not in ("job", "work"):
            raise InputError(f"oasis: worth must be 'job' or 'work', got '{self.worth}'", field="worth")
        for name in ("slots", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"oasis: {name} must be at least 1, got {getattr(self, name)}", field=name)

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit iff the best schedule is worth more than it costs."""
        deadline_s = float(snapshot.deadline_s[index])
        bidder = self._bidder(snapshot, index)
        if bidder is not None:
            self._learn_worth(bidder, snapshot.now_s)
        payoff = self._buy(snapshot, index, bidder)
        if math.isinf(deadline_s):
            return ADMITTED
        if payoff > 0:
            return Admission(True, finish_s=deadline_s)
        self._schedules.pop(int(snapshot.rows[index]), None)
        if math.isinf(payoff):
            return Admission(False, reason="no schedule on what is not yet reserved ends by its deadline")
        return Admission(False, reason="at the present load its GPU time costs more than it is worth")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """What the schedules say for now; whoever fell off his buys a new one."""
        rows = [int(row) for row in snapshot.rows]
        self._schedules = {row: self._schedules[row] for row in rows if row in self._schedules}
        gpus = self._shares(snapshot, rows)
        fell_off = False
        for i, row in enumerate(rows):
            schedule = self._schedules.get(row)
            if schedule is None or snapshot.now_s >= schedule.end_s:
                fell_off = True
                bidder = self._bidder(snapshot, i)
                if bidder is not None and math.isinf(self._buy(snapshot, i, bidder)):
                    self._buy(snapshot, i, bidder._replace(deadline_s=math.inf))
        return Decision(self._shares(snapshot, rows) if fell_off else gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next moment at which a schedule changes, or has ended though its job has not."""
        soonest_s = math.inf
        for row in snapshot.rows:
            schedule = self._schedules.get(int(row))
            if schedule is not None:
                soonest_s = min(soonest_s, schedule.next_change_s(snapshot.now_s))
        return soonest_s

    def _shares(self, snapshot: Snapshot, rows: list[int]) -> IntArray:
        """What the schedules say for now. Where GPUs are missing (a node was lost), the youngest wait."""
        gpus = np.zeros(len(rows), dtype=np.int64)
        free = snapshot.capacity
        for i, row in enumerate(rows):
            share = self._schedules[row].at(snapshot.now_s) if row in self._schedules else 0
            if share <= free:
                gpus[i] = share
                free -= share
        return gpus

    def _bidder(self, snapshot: Snapshot, index: int) -> Bidder | None:
        """A job's facts for the dynamic programme, or None if it can run on no share at all."""
        counts = np.append(0, powers_of_two(min(snapshot.capacity, snapshot.curves.max_gpus)))
        legal = (counts >= snapshot.min_gpus[index]) & (counts <= snapshot.max_gpus[index])
        rates = np.where(legal, snapshot.curves.rates[snapshot.curve[index], counts], 0.0)
        useful = np.append(True, rates[1:] > np.maximum.accumulate(rates)[:-1])
        rates, counts = rates[useful], counts[useful]
        if len(counts) < 2:
            return None
        work = max(float(snapshot.remaining[index]), 1e-9)
        held = np.flatnonzero(counts == snapshot.gpus[index])
        return Bidder(
            work=work,
            rates=rates,
            counts=counts,
            held=int(held[0]) if len(held) else 0,
            worth=1.0 if self.worth == "job" else float((counts[1:] * work / rates[1:]).min()),
            submit_s=float(snapshot.submit_s[index]),
            deadline_s=float(snapshot.deadline_s[index]),
            sharpness=self.sharpness,
            run_s=work / float(rates[1]),
        )

    def _learn_worth(self, job: Bidder, now_s: float) -> None:
        """Widen the range of prices to what this job may be worth by the GPU-second."""
        for gpus, rate in zip(job.counts[1:], job.rates[1:]):
            run_s = job.work / float(rate)
            if now_s + run_s <= job.deadline_s:
                worth = job.worth * utility(job, now_s + run_s) / (int(gpus) * run_s)
                self._most = max(self._most, worth)
                # The paper's quarter: an empty cluster is cheap even for the job worth the least.
                self._least = min(self._least, worth / 4)

    def _buy(self, snapshot: Snapshot, index: int, job: Bidder | None) -> float:
        """Find and keep the best schedule of a job; returns its payoff, minus infinity if there is none."""
        row, now_s, pause_s = int(snapshot.rows[index]), snapshot.now_s, snapshot.resize_cost_s
        self._schedules.pop(row, None)
        if job is None or not self._most:
            return -math.inf
        others = [self._schedules[int(r)] for r in snapshot.rows if int(r) in self._schedules]
        shortest_run_s = job.work / float(job.rates[-1])
        if math.isinf(job.deadline_s):
            until_s = max([now_s, *(s.end_s for s in others)]) + 2 * (shortest_run_s + pause_s)
        else:
            until_s = job.deadline_s - SLACK_S
        if until_s <= now_s:
            return -math.inf
        # A slot holds at least a pause: of two ways that are both still paused, the programme would keep the
        # cheaper one, which started later, and so on for ever.
        count = self.slots if pause_s == 0 else min(self.slots, max(int((until_s - now_s) / pause_s), 1))
        edges = _slots(now_s, until_s, max(shortest_run_s / 4, pause_s), count)
        used = _reserved(others, edges)
        prices = self._least * (self._most / self._least) ** (used / snapshot.capacity)
        payoff, end_s, gpus = best_schedule(job, edges, snapshot.capacity - used, prices, pause_s, self.steps)
        if math.isfinite(payoff):
            changes = np.append(True, gpus[1:] != gpus[:-1])
            kept_s = min(end_s + UNPLANNED * pause_s, float(edges[len(gpus)])) + SLACK_S
            self._schedules[row] = Schedule(edges[: len(gpus)][changes], gpus[changes], kept_s)
        return float(payoff)


def _slots(now_s: float, until_s: float, first_s: float, count: int) -> FloatArray:
    """Edges of slots that grow geometrically from `first_s`, or are all equal where that suffices."""
    span_s = until_s - now_s
    low, high = 0.0, 1.0
    if first_s * count < span_s:
        for _ in range(30):
            growth = (low + high) / 2
            if first_s * ((1 + growth) ** count - 1) / growth < span_s:
                low = growth
            else:
                high = growth
    i = np.arange(count + 1)
    parts = ((1 + high) ** i - 1) / ((1 + high) ** count - 1) if low > 0 else i / count
    return np.asarray(now_s + span_s * parts, dtype=np.float64)


def _reserved(schedules: list[Schedule], edges: FloatArray) -> IntArray:
    """The most GPUs that these schedules use at once within each slot."""
    if not schedules:
        return np.zeros(len(edges) - 1, dtype=np.int64)
    at_s = np.concatenate([np.append(s.start_s, s.end_s) for s in schedules])
    change = np.concatenate([np.diff(s.gpus, prepend=0, append=0) for s in schedules])
    at_s, where = np.unique(at_s, return_inverse=True)
    total = np.cumsum(np.bincount(where, weights=change, minlength=len(at_s))).round().astype(np.int64)
    first = np.searchsorted(at_s, edges[:-1], side="right") - 1  # the step under way as each slot begins
    last = np.searchsorted(at_s, edges[1:], side="left")
    steps = np.append(0, total)  # nothing before the first
    return np.array([steps[a + 1 : b + 1].max(initial=0) for a, b in zip(first, last)], dtype=np.int64)
