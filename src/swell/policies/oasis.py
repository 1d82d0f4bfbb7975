"""OASiS (INFOCOM'18) and A_online: online admission by prices, primal-dual.

GPU time has a price that grows from L to U with the part of the cluster already reserved at that moment:
p = L (U/L)^(g/C). L and U are the smallest and the largest worth of a GPU-second over all admitted jobs and
the new one.
For a new job, a dynamic programme over time slots and work done finds the schedule (GPUs in each time slot)
with the largest utility minus cost at present prices. The job is admitted if and only if that difference is
positive. It then keeps the schedule, which raises the price for later jobs.

Utility never grows with the completion time. For a job with a deadline it is a sigmoid around the deadline (a
schedule that ends later is worth nothing); for any other it is r / (r + completion time), with r the run time
on the job's smallest share.

Our own choices:
- Each new job has its own time slots, from now to its deadline. The first is a quarter of the job's shortest
  run time and later ones are longer, so that short and long jobs are divided equally finely. GPUs are the
  only resource.
- Schedules pay for resizes, and keep the last share a little longer in case of pauses that were not planned.
- A job without a deadline is never refused: it takes the best schedule there is, at any price.
- A job that can no longer follow its schedule (after a lost node or a migration) buys another at any price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from swell.domain import FloatArray, InputError, IntArray, SlotsAhead
from swell.perf._compiled import compiled
from swell.perf.curves import powers_of_two
from swell.policies.base import Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

# The dynamic programme of OASiS: it finds the schedule of one job with the largest utility minus cost.


class Bidder(NamedTuple):
    """A job that looks for a schedule."""

    work: float
    rates: FloatArray
    counts: IntArray
    """The shares (in GPUs) the job may use: first 0, then each faster than the one before."""
    held: int
    """Index in `counts` of the share that the job holds now."""
    worth: float
    """The factor on the job's utility: what finishing at once would be worth."""
    submit_s: float
    deadline_s: float
    sharpness: float
    run_s: float
    """Run time on the job's smallest share."""


@compiled
def utility(job: Bidder, end_s: float) -> float:
    """What finishing at `end_s` is worth, from 0 to 1: a sigmoid at the deadline, or falling with time."""
    if job.deadline_s < np.inf:
        late = job.sharpness * (end_s - job.deadline_s) / (job.deadline_s - job.submit_s)
        return 1.0 / (1.0 + math.exp(min(late, 700.0)))
    return job.run_s / (job.run_s + end_s - job.submit_s)


@compiled
def best_schedule(
    job: Bidder, edges: FloatArray, free: IntArray, prices: FloatArray, pause_s: float, steps: int
) -> tuple[float, float, IntArray]:
    """The payoff of the best schedule (minus infinity without one), its end, and its GPUs in each slot.

    A state of the programme is the work done, rounded to one of `steps` parts, and the share in the slot
    before (a change costs a pause). Of all ways to reach a state only the cheapest is kept, together with the
    exact work done on that way, so that rounding errors do not add up.
    """
    work, rates, counts = job.work, job.rates, job.counts
    slots, shares = len(free), len(counts)
    cost = np.full((steps, shares), np.inf)
    done = np.zeros((steps, shares))
    cost[0, job.held] = 0.0
    came_step = np.zeros((slots, steps, shares), np.int32)
    came_share = np.zeros((slots, steps, shares), np.int8)
    best, best_end = -np.inf, np.inf
    best_slot, best_step, best_before, best_share = -1, 0, 0, 0
    for b in range(slots):
        start, span = edges[b], edges[b + 1] - edges[b]
        next_cost = np.full((steps, shares), np.inf)
        next_done = np.zeros((steps, shares))
        for q in range(steps):
            for before in range(shares):
                spent = cost[q, before]
                if spent == np.inf:
                    continue
                for share in range(shares):
                    if counts[share] > free[b]:
                        break
                    then = done[q, before]
                    total = spent
                    if share > 0:
                        lag = 0.0 if share == before else pause_s
                        left = work - then
                        run = span - lag
                        if run > 0.0 and rates[share] * run >= left:
                            end = start + lag + left / rates[share]
                            total += prices[b] * counts[share] * (end - start)
                            gain = job.worth * utility(job, end) - total
                            if gain > best:
                                best, best_end = gain, end
                                best_slot, best_step, best_before, best_share = b, q, before, share
                            continue
                        total += prices[b] * counts[share] * span
                        then += rates[share] * run  # negative while the pause lasts longer than the slot
                    part = min(max(int(then / work * steps), 0), steps - 1)
                    if total < next_cost[part, share]:
                        next_cost[part, share] = total
                        next_done[part, share] = then
                        came_step[b, part, share] = q
                        came_share[b, part, share] = before
        cost, done = next_cost, next_done
    chosen = np.zeros(best_slot + 1, np.int64)
    if best_slot >= 0:
        chosen[best_slot] = counts[best_share]
        q, share = best_step, best_before
        for b in range(best_slot - 1, -1, -1):
            chosen[b] = counts[share]
            q, share = came_step[b, q, share], came_share[b, q, share]
    return best, best_end, chosen


SLACK_S = 1e-3
"""Schedules are planned to end this long before the deadline and are kept this long after their end, so that
rounding errors do not matter."""

UNPLANNED = 2
"""A schedule keeps its last share for this many pauses longer than planned, within its last time slot."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A job's GPUs over time: `gpus[i]` from `start_s[i]` to the next start, the last until `end_s`."""

    start_s: FloatArray
    gpus: IntArray
    end_s: float

    def at(self, now_s: float) -> int:
        """The number of GPUs at a moment."""
        step = int(np.searchsorted(self.start_s, now_s, side="right")) - 1
        return int(self.gpus[step]) if step >= 0 and now_s < self.end_s else 0

    def next_change_s(self, now_s: float) -> float:
        """When the number of GPUs changes next or the schedule ends; infinite after its end."""
        step = int(np.searchsorted(self.start_s, now_s, side="right"))
        change_s = float(self.start_s[step]) if step < len(self.start_s) else self.end_s
        return change_s if change_s > now_s else math.inf


@dataclass(frozen=True, slots=True)
class PriceRange:
    """The smallest and the largest worth of a GPU-second; prices lie between them."""

    least: float = math.inf
    most: float = 0.0

    def with_job(self, job: Bidder, now_s: float) -> PriceRange:
        """The range widened to include what a GPU-second may be worth to this job."""
        least, most = self.least, self.most
        for gpus, rate in zip(job.counts[1:], job.rates[1:]):
            run_s = job.work / float(rate)
            if now_s + run_s <= job.deadline_s:
                worth = job.worth * utility(job, now_s + run_s) / (int(gpus) * run_s)
                most = max(most, worth)
                # As in the paper, a quarter: so an empty cluster is cheap even for the job of least worth.
                least = min(least, worth / 4)
        return PriceRange(least, most)

    def at(self, load: FloatArray) -> FloatArray:
        """The price of a GPU-second at a moment when this part of the cluster (0 to 1) is reserved."""
        return np.asarray(self.least * (self.most / self.least) ** load)


@dataclass(frozen=True, slots=True)
class BestSchedule:
    """The best schedule of a job and its payoff; without a schedule the payoff is minus infinity."""

    payoff: float = -math.inf
    schedule: Schedule | None = None
    prices: PriceRange = PriceRange()
    """The range of prices that the schedule was found at."""


@dataclass(kw_only=True)
class Oasis(Policy):
    """Sell GPU time, at prices that grow with the load, to the jobs for which it is worth the price."""

    name: ClassVar[str] = "oasis"
    paper: ClassVar[str] = "OASiS, INFOCOM'18"
    goal: ClassVar[str] = "total utility: refuses jobs not worth their price, and keeps to its schedules"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = False

    slots: int = 48
    """The number of time slots in the schedule of a new job."""
    steps: int = 128
    """Steps of work in the dynamic programme."""
    sharpness: float = 50.0
    """How steeply the utility falls at the deadline; 50: from 0.92 to 0.5 over the last 5% of the time."""
    worth: str = "job"
    """What a job is worth: 'job' for the same worth each, 'work' for the GPU-seconds it needs at least."""

    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False)
    """Schedules by job number."""
    _prices: PriceRange = field(default_factory=PriceRange, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.worth not in ("job", "work"):
            raise InputError(f"oasis: worth must be 'job' or 'work', got '{self.worth}'", field="worth")
        for name in ("slots", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"oasis: {name} must be at least 1, got {getattr(self, name)}", field=name)

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit the job if its best schedule is worth more than it costs, or if it has no deadline."""
        deadline_s = float(snapshot.deadline_s[index])
        bidder = self._bidder(snapshot, index)
        prices = self._prices if bidder is None else self._prices.with_job(bidder, snapshot.now_s)
        offer = self._best_offer(snapshot, index, bidder, prices)
        if math.isinf(deadline_s):
            return Admission(True, plan=offer)
        if offer.payoff > 0:
            return Admission(True, finish_s=deadline_s, plan=offer)
        if math.isinf(offer.payoff):
            return Admission(False, reason="no schedule on the unreserved GPUs ends by its deadline")
        return Admission(False, reason="at the present load its GPU time costs more than it is worth")

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """Keep the schedule that the job was admitted with, and the range of prices widened by the job."""
        assert isinstance(admission.plan, BestSchedule)
        self._prices = admission.plan.prices
        self._keep(int(snapshot.numbers[index]), admission.plan)

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give each job what its schedule says for now; a job whose schedule has ended buys a new one."""
        numbers = snapshot.numbers.tolist()
        self._schedules = {n: self._schedules[n] for n in numbers if n in self._schedules}
        gpus = self._shares(snapshot, numbers)
        bought = False
        for i, number in enumerate(numbers):
            schedule = self._schedules.get(number)
            if schedule is None or snapshot.now_s >= schedule.end_s:
                bought = True
                bidder = self._bidder(snapshot, i)
                if bidder is None:
                    continue
                offer = self._best_offer(snapshot, i, bidder, self._prices)
                if offer.schedule is None:
                    late = bidder._replace(deadline_s=math.inf)
                    offer = self._best_offer(snapshot, i, late, self._prices)
                self._keep(number, offer)
        return Decision(self._shares(snapshot, numbers) if bought else gpus)

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Jobs with deadlines whose schedules do not fit beside those of older jobs."""
        fitting, late = list[Schedule](), list[int]()
        for i, number in enumerate(snapshot.numbers.tolist()):
            schedule = self._schedules.get(number)
            if schedule is None or schedule.end_s <= snapshot.now_s:
                continue
            changes = [np.append(one.start_s, one.end_s) for one in (*fitting, schedule)]
            at_s = np.concatenate([snapshot.ahead.times, *changes])
            edges = np.unique(np.clip(at_s, snapshot.now_s, schedule.end_s))
            if (_reserved([*fitting, schedule], edges) <= _least(snapshot.ahead, edges)).all():
                fitting.append(schedule)
            elif np.isfinite(snapshot.deadline_s[i]):
                late.append(i)
        return np.array(late, dtype=np.int64)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next moment at which a schedule changes or ends."""
        soonest_s = math.inf
        for number in snapshot.numbers.tolist():
            schedule = self._schedules.get(number)
            if schedule is not None:
                soonest_s = min(soonest_s, schedule.next_change_s(snapshot.now_s))
        return soonest_s

    def _shares(self, snapshot: Snapshot, numbers: list[int]) -> IntArray:
        """What the schedules say for now. If GPUs are short (a node was lost), the youngest jobs wait."""
        gpus = np.zeros(len(numbers), dtype=np.int64)
        free = snapshot.capacity
        for i, number in enumerate(numbers):
            share = self._schedules[number].at(snapshot.now_s) if number in self._schedules else 0
            if share <= free:
                gpus[i] = share
                free -= share
        return gpus

    def _bidder(self, snapshot: Snapshot, index: int) -> Bidder | None:
        """The job as input of the dynamic programme, or None if it cannot run on any share."""
        most = min(snapshot.widest, snapshot.curves.max_gpus)
        counts = np.append(0, powers_of_two(most))
        bound = min(most, int(snapshot.table.max_gpus[snapshot.rows[index]]))
        legal = (counts >= snapshot.min_gpus[index]) & (counts <= bound)
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

    def _best_offer(
        self, snapshot: Snapshot, index: int, job: Bidder | None, prices: PriceRange
    ) -> BestSchedule:
        """The best schedule of a job on the GPUs that other schedules leave, at prices in this range."""
        none = BestSchedule(prices=prices)
        now_s, pause_s = snapshot.now_s, snapshot.resize_cost_s
        if job is None or not prices.most:
            return none
        numbers = np.delete(snapshot.numbers, index).tolist()
        others = [self._schedules[n] for n in numbers if n in self._schedules]
        shortest_run_s = job.work / float(job.rates[-1])
        if math.isinf(job.deadline_s):
            until_s = max([now_s, *(s.end_s for s in others)]) + 2 * (shortest_run_s + pause_s)
        else:
            until_s = job.deadline_s - SLACK_S
        if until_s <= now_s:
            return none
        # A time slot is at least as long as a pause. In shorter ones, of two schedules that are both still
        # paused, the programme would keep the cheaper one, which started later, and never come to run.
        count = self.slots if pause_s == 0 else min(self.slots, max(int((until_s - now_s) / pause_s), 1))
        edges = _slots(now_s, until_s, max(shortest_run_s / 4, pause_s), count)
        used = _reserved(others, edges)
        there = _least(snapshot.ahead, edges)
        free, price = there - used, prices.at(used / np.maximum(there, 1))
        payoff, end_s, gpus = best_schedule(job, edges, free, price, pause_s, self.steps)
        if math.isinf(payoff):
            return none
        changes = np.append(True, gpus[1:] != gpus[:-1])
        kept_s = min(end_s + UNPLANNED * pause_s, float(edges[len(gpus)])) + SLACK_S
        schedule = Schedule(edges[: len(gpus)][changes], gpus[changes], kept_s)
        return BestSchedule(float(payoff), schedule, prices)

    def _keep(self, number: int, offer: BestSchedule) -> None:
        """Replace the job's schedule by the one of the offer."""
        self._schedules.pop(number, None)
        if offer.schedule is not None:
            self._schedules[number] = offer.schedule


def _slots(now_s: float, until_s: float, first_s: float, count: int) -> FloatArray:
    """Edges of time slots that grow geometrically from `first_s`, or are equal if they cover the time."""
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


def _least(ahead: SlotsAhead, edges: FloatArray) -> IntArray:
    """The fewest GPUs that there are within each time slot."""
    first = np.searchsorted(ahead.times, edges[:-1], side="right") - 1
    last = np.searchsorted(ahead.times, edges[1:], side="left")
    return np.array([ahead.gpus[a : max(b, a + 1)].min() for a, b in zip(first, last)], dtype=np.int64)


def _reserved(schedules: list[Schedule], edges: FloatArray) -> IntArray:
    """The most GPUs that these schedules use at once within each time slot."""
    if not schedules:
        return np.zeros(len(edges) - 1, dtype=np.int64)
    at_s = np.concatenate([np.append(s.start_s, s.end_s) for s in schedules])
    change = np.concatenate([np.diff(s.gpus, prepend=0, append=0) for s in schedules])
    at_s, where = np.unique(at_s, return_inverse=True)
    total = np.cumsum(np.bincount(where, weights=change, minlength=len(at_s))).round().astype(np.int64)
    first = np.searchsorted(at_s, edges[:-1], side="right") - 1  # the step in force as each slot begins
    last = np.searchsorted(at_s, edges[1:], side="left")
    steps = np.append(0, total)  # nothing is reserved before the first step
    return np.array([steps[a + 1 : b + 1].max(initial=0) for a, b in zip(first, last)], dtype=np.int64)
