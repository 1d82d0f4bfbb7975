"""tide: swell's own policy. Promises are kept, and everybody ends sooner. Ours; not in a paper.

Six ideas, explained with figures in docs/how/tide.md:

- *Prices.* A unit of a job's work is worth more the more jobs wait behind it. heSRPT (Berg et al., 2020)
  gives the exact prices if all jobs speed up alike, and they depend on the *rank* of a job by remaining work
  alone. A GPU goes where price times gain in speed is largest. Lengths that nobody says are guessed from
  ended jobs (`Lengths`).
- *Promises* are ElasticFlow's reservations with the plan in force (`_plan_in_force`). Spare GPUs go by price,
  to jobs with and without deadlines alike; a promised job takes them only if its reservation ends sooner.
- *Models.* A job that has not run yet is taken to be as fast as the jobs of its model before it
  (`SeenModels`), so it starts on the share that suits it.
- *Weights.* A job of weight w counts as w jobs, in prices and when promises have to be broken.
- *Not known yet.* On a live cluster a new script's speed and length are unknown. Such a job is taken to have
  as much work left as it has had, so it starts at once, and its rank falls the longer it stays unknown.
- *Changes cost.* A share other than the present one counts less by the part of the time ahead that the change
  would stop the job for, so a job stays where it is unless a change pays.

Shares are those that pack on nodes, in aligned blocks, so no job runs slower than its curve says.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import ClassVar, NamedTuple

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.perf._compiled import compiled
from swell.perf.belief import JobBelief
from swell.perf.sharing import promised_part
from swell.policies._plan_in_force import Moment, PlanInForce, keep_promises, plan_the_late
from swell.policies._reservations import (
    BoolArray,
    Jobs,
    Plan,
    Steps,
    book,
    fill_level,
    level_of,
    roomy,
    spend_spare,
    take,
)
from swell.policies.base import Decision, Knowledge, PlacerName
from swell.policies.elasticflow import ElasticFlow
from swell.policies.memory import JobMemory
from swell.policies.snapshot import Snapshot

# How fast a job is taken to be before it has run: as fast as the jobs of its model that ran before it.
#
# Jobs of one *kind* train the same model and, unless they adapt it, with the same batch size. For each kind
# the curve is remembered of the job that was seen on the most GPUs, as it was when the job was first seen
# there: later the gradient noise of a job grows, and its curve with it, so that a late curve would promise
# too much.
#
# A new job of a known kind starts on the share that suits it, and need not be resized once its speed is
# known. A new job of an unknown kind starts small.


FIRST_SHARE = 2
"""The most GPUs that a job of an unknown kind is given before anything is known of its speed."""
EXPLORE = 8
"""A job may have this many times the most GPUs that jobs of its kind have been seen on."""
UNSEEN_SCALING = 0.8
"""How a job of an unknown kind is taken to scale before it has been seen."""
KINDS_REMEMBERED = 200
"""So many kinds are remembered, the last ones seen first. On a live cluster every script is its own kind."""

Kind = tuple[str, int]


class Believed(NamedTuple):
    """What is believed of the speed of each job in a snapshot."""

    rates: FloatArray
    """Curves: those of the snapshot, and behind them those of jobs that have not been seen."""
    curve: IntArray
    """The row in `rates` of each job."""
    most: IntArray
    """The most GPUs that each job may have."""
    unseen: BoolArray
    """Jobs that nothing is known of, not even from other jobs of their kind."""


@dataclass
class SeenModels:
    """By kind: the most GPUs that a job of it was seen on, and the curve as it was then."""

    _seen: dict[Kind, tuple[int, FloatArray]] = field(default_factory=dict)

    def believed(self, snapshot: Snapshot) -> Believed:
        """The curves to decide with, after a look at what the running jobs have shown."""
        rates, beliefs = snapshot.curves.rates, snapshot.beliefs
        curve, most = snapshot.curve.copy(), snapshot.max_gpus.copy()
        unseen = np.zeros(len(curve), dtype=np.bool_)
        kinds = [None if belief is None else kind_of(snapshot, i, belief) for i, belief in enumerate(beliefs)]
        for i, (kind, belief) in enumerate(zip(kinds, beliefs, strict=True)):
            if kind is not None and belief is not None and belief.known:
                self._observe(kind, belief.most_gpus, rates[curve[i]])
        added = [np.arange(rates.shape[1]) ** UNSEEN_SCALING]
        for i, (kind, belief) in enumerate(zip(kinds, beliefs, strict=True)):
            if kind is None or belief is None:
                continue
            bound = min(int(most[i]), belief.limits.max_gpus)
            widest, shown = self._seen.get(kind, (0, None))
            if not belief.known and shown is not None and len(shown) == rates.shape[1]:
                curve[i], bound = len(rates) + len(added), min(bound, EXPLORE * widest)
                added.append(shown)
            elif not belief.known:
                curve[i], bound, unseen[i] = len(rates), min(bound, FIRST_SHARE), True
            elif belief.explores:
                bound = min(bound, max(EXPLORE * max(belief.most_gpus, widest), FIRST_SHARE))
            most[i] = max(bound, min(int(snapshot.min_gpus[i]), int(most[i])))
        return Believed(np.concatenate([rates, np.array(added)]), curve, most, unseen)

    def _observe(self, kind: Kind, gpus: int, curve: FloatArray) -> None:
        """Remember the curve of a running job if no job of its kind has been seen on as many GPUs."""
        if gpus > self._seen.get(kind, (0, None))[0]:
            self._seen.pop(kind, None)
            self._seen[kind] = gpus, curve.copy()
            if len(self._seen) > KINDS_REMEMBERED:
                del self._seen[next(iter(self._seen))]


def kind_of(snapshot: Snapshot, index: int, belief: JobBelief | None) -> Kind:
    """The kind of a job: its model and, unless it adapts it, its batch size."""
    spec = snapshot.table.specs[snapshot.rows[index]]
    adapts = belief is not None and belief.fixed_batch is None
    return spec.model, 0 if adapts else spec.batch_size


# How wrong beliefs about speed have turned out to be, and what that means for plans.
#
# A belief is compared with what a running job really does. Once a job has run, its own error is known, and
# its work is planned at the speed it really has. A job that has not run yet is planned with a margin that
# covers most of the errors of the jobs before it: measured, and nothing while beliefs are exact.


DEVIATIONS = 1.0
"""The margin of a job that has not run yet, in standard deviations of the errors seen."""
EXACT = 1e-6
"""Differences up to this are rounding."""


@dataclass
class SpeedErrors:
    """Believed over real speed, for the jobs that are running or have run."""

    numbers: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The active jobs whose speed has been seen, ascending."""
    ratios: FloatArray = field(default_factory=lambda: np.empty(0))
    """For each of them, believed over real speed."""
    jobs: int = 0
    """How many jobs have been seen, ended ones included."""
    squares: float = 0.0
    """The sum of their squared logarithmic errors."""

    def observe(self, snapshot: Snapshot) -> None:
        """Compare what is believed of the running jobs with what they do; forget jobs that are gone."""
        ratios, seen = self._known(snapshot)
        held = np.minimum(snapshot.gpus, snapshot.curves.max_gpus)
        real, least = snapshot.table.rate[snapshot.rows], snapshot.rate_at(held)
        # Where slots share GPUs, curves are those beside neighbours that fill the GPU. A job with other
        # neighbours is faster, up to its speed alone, but may have them later: that is no error.
        most = least / promised_part(snapshot.cluster.per_gpu)
        believed = np.clip(real, least, most)
        # A job whose row changed in this very moment may have lost GPUs: its rate is that of before.
        settled = snapshot.table.since_s[snapshot.rows] < snapshot.now_s
        runs = (snapshot.gpus > 0) & (real > 0) & (believed > 0) & settled
        now = np.divide(believed, real, out=np.ones(len(real)), where=runs)
        now[np.abs(now - 1) < EXACT] = 1.0
        first = runs & ~seen
        self.jobs += int(first.sum())
        self.squares += float((np.log(now[first]) ** 2).sum())
        keep = seen | runs
        self.numbers, self.ratios = snapshot.numbers[keep], np.where(runs, now, ratios)[keep]

    def factors(self, snapshot: Snapshot) -> FloatArray:
        """What to multiply each job's work with before it is planned with its believed curve."""
        ratios, seen = self._known(snapshot)
        deviation = math.sqrt(self.squares / self.jobs) if self.jobs else 0.0
        return np.where(seen, ratios, math.exp(DEVIATIONS * deviation))

    def _known(self, snapshot: Snapshot) -> tuple[FloatArray, BoolArray]:
        if not len(self.numbers):
            return np.ones(len(snapshot)), np.zeros(len(snapshot), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self.numbers, snapshot.numbers), len(self.numbers) - 1)
        seen = self.numbers[at] == snapshot.numbers
        return np.where(seen, self.ratios[at], 1.0), seen


# How long a job will still take if nobody says: from the jobs of its kind that have ended.
#
# Jobs of one kind have the same model and, unless they adapt it, the same batch size. What is observed of a
# job is its progress; when it ends, its progress was its length. From the lengths of a kind follows, for a
# job that has done so much, the *Gittins index*: the most that it may bring per second of work, that is the
# chance to end within some time over the time that it takes on average until then. Its inverse is what tide
# takes for the work left. If all jobs of a kind are equally long it is exactly what is left; if most are
# short and some very long, it is short at first and grows once a job has outlived the short ones (Gittins
# 1979; for a scheduler of training jobs: Tiresias).
#
# A kind of which no job has ended, or a job that has outlived all that have, is judged by all jobs that
# have ended, in seconds on one GPU. But it is taken to be at least twice as long as the furthest job of its
# kind has come (so of two long jobs the one that is further has less left, and the two do not take turns).
#
# Where kinds say little about lengths (`trusted` is False), such guesses do more harm than good.


CLOSE = 0.25
"""A length is predicted well if it is within so much of the median of its kind, as a logarithm."""
REMEMBERED = 200
"""The last so many lengths of a kind, and of all kinds together, are remembered."""


@dataclass
class Lengths:
    """Lengths of the jobs that have ended, by kind, and the progress of those that have not."""

    _seen: JobMemory = field(
        default_factory=lambda: JobMemory(at_first=-1.0, done=0.0, rate=0.0, one=0.0, kind=-1.0, at_s=0.0)
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


# The compiled part of tide: what a GPU is worth to each job, and who gets the next one.
#
# `prices` says how urgent a unit of each job's work is, `values` what each share is worth to each job, and
# `share_out` gives GPUs away one step at a time, each step where it is worth the most per GPU. Promised jobs
# start from what they have reserved and step along ElasticFlow's levels, so that every promise stands.


EFFORT = 5_000_000
"""About how many steps of reservations a decision looks at beyond what promises need. So with thousands of
promised jobs only the longest lend, and only those with the most to gain grow beyond their reservation."""

FIRST_GPUS = 100.0
"""With unknown lengths, a job's first share is worth this much more than any step after it."""


@lru_cache
def legal_sizes(gpus_per_node: int, most: int) -> IntArray:
    """Shares that pack well on nodes, ascending from 0: powers of two, factors and multiples of a node."""
    k = np.arange(most + 1)
    power = (k & (k - 1)) == 0
    inside = (k <= gpus_per_node) & (gpus_per_node % np.maximum(k, 1) == 0)
    return np.flatnonzero(power | inside | (k % gpus_per_node == 0))


@compiled
def odd_shares(
    rates: FloatArray, curve: IntArray, least: IntArray, most: IntArray, sizes: IntArray
) -> IntArray:
    """For a job whose least share that it can run on is none of `sizes`, that share; else 0."""
    out = np.zeros(len(curve), np.int64)
    for i in range(len(curve)):
        row = rates[curve[i]]
        for k in range(max(least[i], 1), min(most[i], len(row) - 1) + 1):
            if row[k] > 0.0:
                at = np.searchsorted(sizes, k)
                if at == len(sizes) or sizes[at] != k:
                    out[i] = k
                break
    return out


@compiled
def prices(longest_first: IntArray, weight: FloatArray, scaling: float) -> FloatArray:
    """The worth of a unit of each job's work, by rank (heSRPT): the longest job delays itself alone.

    With n jobs, the one that is i-th from the longest delays all that are longer. If all jobs speed up like
    k ** scaling, these are the exact prices of work in the schedule of least total completion time. A job
    of weight w counts as w jobs, so a rank is a sum of weights.
    """
    out = np.empty(len(longest_first))
    power = 1.0 / (1.0 - scaling)
    rank = 0.0
    for i in longest_first:
        rank += weight[i]
        # rank ** power - (rank - weight) ** power, without powers that overflow for many jobs
        part = -np.expm1(power * np.log1p(-weight[i] / rank)) if rank > weight[i] else 1.0
        out[i] = rank * part ** (1.0 - scaling)
    return out


@compiled
def values(
    rates: FloatArray,
    curve: IntArray,
    price: FloatArray,
    first: FloatArray,
    stop: FloatArray,
    held: IntArray,
    least: IntArray,
    most: IntArray,
    kept: FloatArray,
    sizes: IntArray,
    odd: IntArray,
    is_odd: BoolArray,
    flatness: float,
) -> FloatArray:
    """Jobs x sizes: the worth of each share, 0 for none and below 0 for one that is not legal.

    Sizes that are odd (`is_odd`) are legal only for the jobs whose `odd` share they are.

    Worth is price times the speed-up over one GPU to the power `flatness`, or its logarithm above `first`
    if that is positive. A share other than the present one counts only `kept[i]` of its speed, and any share
    is worth `stop[i]` more than none.
    """
    n = len(curve)
    out = np.full((n, len(sizes)), -1.0)
    for i in range(n):
        out[i, 0] = 0.0
        row = rates[curve[i]]
        one = one_gpu(row)
        if one <= 0.0:
            continue
        for s in range(1, len(sizes)):
            k = sizes[s]
            if k < least[i]:
                continue
            if k > most[i] or k >= len(row):
                break
            if row[k] > 0.0 and (not is_odd[s] or odd[i] == k):
                speed = row[k] / one * (1.0 if k == held[i] else kept[i])
                if first[i] > 0.0:
                    out[i, s] = first[i] + price[i] * np.log(speed)
                else:
                    out[i, s] = price[i] * speed**flatness + stop[i]
    return out


@compiled
def one_gpu(row: FloatArray) -> float:
    """The rate on one GPU, or per GPU of the smallest share that works."""
    for k in range(1, len(row)):
        if row[k] > 0.0:
            return row[k] / k
    return 0.0


@compiled
def one_gpu_rates(rates: FloatArray, curve: IntArray) -> FloatArray:
    """`one_gpu` for each job."""
    found = np.empty(len(rates))
    for c in range(len(rates)):
        found[c] = one_gpu(rates[c])
    return found[curve]


@compiled
def _best_step(value: FloatArray, sizes: IntArray, at: int, free: int) -> tuple[float, int]:
    """The step up from size number `at` that is worth the most per GPU, and that worth."""
    best, to = 0.0, at
    for s in range(at + 1, len(sizes)):
        more = sizes[s] - sizes[at]
        if more > free:
            break
        gain = (value[s] - value[at]) / more
        if gain > best * (1.0 + 1e-9):
            best, to = gain, s
    return best, to


@compiled
def lend(jobs: Jobs, plan: Plan, order: IntArray) -> Plan:
    """Postpone reservations, in this order, as far as promises allow: what they leave now can be lent.

    A job keeps its level, so it needs no more GPU-time later than now, and it stays as covered as it was.
    """
    size, used = len(plan.times), len(plan.step_s)
    times, free = roomy(plan.times, len(order) + 1), roomy(plan.free, len(order) + 1)
    step_s, step_gpus = plan.step_s, plan.step_gpus
    first, last = plan.first.copy(), plan.last.copy()
    ends, gpu_s = plan.end_s.copy(), plan.gpu_s.copy()
    room = len(times)
    later, out_s, out_gpus = np.empty(room, np.int64), np.empty(room), np.empty(room, np.int64)
    none = Steps(out_s[:0], out_gpus[:0], plan.times[0])
    effort = 0
    for i in order:
        if effort > EFFORT:
            break
        if last[i] <= first[i] or step_gpus[first[i]] == 0:
            continue
        own = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
        cover_s = jobs.cover_s[i] if plan.covered[i] else 0.0
        size = take(times, free, size, own, -1)
        low, high = 0, np.searchsorted(times[:size], jobs.last_s[i])
        best, best_spent, best_steps = np.inf, 0.0, 0
        while high - low > 1:  # the reservation may begin at breakpoint `low`; not at `high`
            middle = (low + high) // 2
            effort += size
            later[:middle] = 0
            later[middle:size] = free[middle:size]
            end, spent, steps = fill_level(
                times[:size],
                later[:size],
                none,
                jobs,
                i,
                plan.level[i],
                jobs.last_s[i],
                cover_s,
                out_s,
                out_gpus,
            )
            if end < np.inf:
                low, best, best_spent, best_steps = middle, end, spent, steps
                kept_s, kept_gpus = out_s[:steps].copy(), out_gpus[:steps].copy()
            else:
                high = middle
        if best_steps == 0:
            size = take(times, free, size, own, 1)
            continue
        new = Steps(kept_s, kept_gpus, best)
        size, step_s, step_gpus = book(times, free, size, step_s, step_gpus, used, none, new)
        first[i], last[i] = used, used + best_steps
        ends[i], gpu_s[i] = best, best_spent
        used += best_steps
    return Plan(
        times[:size],
        free[:size],
        step_s[:used],
        step_gpus[:used],
        first,
        last,
        ends,
        gpu_s,
        plan.level,
        plan.covered,
    )


@compiled
def share_out(
    jobs: Jobs, plan: Plan, promised: BoolArray, value: FloatArray, sizes: IntArray
) -> tuple[Plan, IntArray]:
    """Give away what is free now, a step at a time, where a step is worth the most per GPU.

    A promised job keeps at least its reserved share; a step must end its reservation sooner by more than a
    pause, and takes only what nobody has reserved, as in ElasticFlow. All other jobs live on the rest, and
    reserve nothing. Returns the plan and everybody's GPUs now.
    """
    n, levels = jobs.rates.shape
    size, used = len(plan.times), len(plan.step_s)
    room = int(promised.sum()) * levels + 1
    times, free = roomy(plan.times, room), roomy(plan.free, room)
    step_s, step_gpus = plan.step_s, plan.step_gpus
    first, last = plan.first.copy(), plan.last.copy()
    ends, gpu_s, level = plan.end_s.copy(), plan.gpu_s.copy(), plan.level.copy()
    out_s, out_gpus = np.empty(len(times)), np.empty(len(times), np.int64)
    number = np.zeros(sizes[-1] + 1, np.int64)
    for s in range(len(sizes)):
        number[sizes[s]] = s
    given = np.zeros(n, np.int64)
    spare = free[0]
    lent = 0
    heap = [(0.0, -1, 0)]
    heap.pop()
    for i in range(n):
        if promised[i]:  # so it has a place in the plan
            given[i] = step_gpus[first[i]]
        worth, to = _best_step(value[i], sizes, number[given[i]], spare)
        if worth > 0.0:
            heap.append((-worth, i, to))
    heapify(heap)
    effort = 0
    while len(heap) > 0 and spare > 0:
        _, i, to = heappop(heap)
        at = number[given[i]]
        if sizes[to] - given[i] > spare:  # others took them: what is the best step now?
            worth, to = _best_step(value[i], sizes, at, spare)
            if worth > 0.0:
                heappush(heap, (-worth, i, to))
            continue
        if promised[i] and effort > EFFORT:
            continue
        if not promised[i]:
            spare -= sizes[to] - given[i]
            lent += sizes[to] - given[i]
            given[i] = sizes[to]
        else:
            # The plan does not know of GPUs that best-effort jobs were given just now: hide those from it.
            j = min(level_of(sizes[to]), levels - 1)
            own = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
            cover_s = jobs.cover_s[i] if plan.covered[i] else 0.0
            effort += size
            free[0] -= lent
            end, spent, steps = fill_level(
                times[:size], free[:size], own, jobs, i, j, np.inf, cover_s, out_s, out_gpus
            )
            free[0] += lent
            more = out_gpus[0] - given[i] if steps > 0 else 0
            if more <= 0 or end + jobs.pause_s >= ends[i]:
                for s in range(at + 1, to + 1):  # no use to this job: larger steps may be
                    value[i, s] = value[i, at]
                worth, to = _best_step(value[i], sizes, at, spare)
                if worth > 0.0:
                    heappush(heap, (-worth, i, to))
                continue
            new = Steps(out_s[:steps], out_gpus[:steps], end)
            size, step_s, step_gpus = book(times, free, size, step_s, step_gpus, used, own, new)
            first[i], last[i] = used, used + steps
            ends[i], gpu_s[i], level[i], given[i] = end, spent, j, out_gpus[0]
            used += steps
            spare = free[0] - lent
        worth, to = _best_step(value[i], sizes, number[given[i]], spare)
        if worth > 0.0:
            heappush(heap, (-worth, i, to))
    return (
        Plan(
            times[:size],
            free[:size],
            step_s[:used],
            step_gpus[:used],
            first,
            last,
            ends,
            gpu_s,
            level,
            plan.covered,
        ),
        given,
    )


@compiled
def run_beside(value: FloatArray, sizes: IntArray, given: IntArray, spare: int) -> IntArray:
    """Give jobs that have been given nothing what is still spare; returns everybody's GPUs now.

    A promised job among them has reserved GPUs for later, and no larger reservation from now on would end
    sooner. Until then it runs beside its reservation, which stays as it is: taking it up costs a running job
    a resize, in place of the start that was planned, which costs no less (`Jobs.start_s`).
    """
    given = given.copy()
    heap = [(0.0, -1, 0)]
    heap.pop()
    for i in range(len(given)):
        if given[i] == 0:
            worth, to = _best_step(value[i], sizes, 0, spare)
            if worth > 0.0:
                heap.append((-worth, i, to))
    heapify(heap)
    while len(heap) > 0 and spare > 0:
        _, i, to = heappop(heap)
        at = np.searchsorted(sizes, given[i])
        if sizes[to] - given[i] <= spare:
            spare -= sizes[to] - given[i]
            given[i], at = sizes[to], to
        worth, to = _best_step(value[i], sizes, at, spare)
        if worth > 0.0:
            heappush(heap, (-worth, i, to))
    return given


SCALING = 0.8
"""How well jobs are taken to scale when their work is priced, as in k ** SCALING."""
FLATNESS = 0.7
"""The power of the speed-up that counts. Below 1, equal jobs share instead of taking turns, which costs."""
FREE_FLATNESS = 0.9
"""The same where a resize costs nothing, so that taking turns does not either."""
LASTS_S = 900.0
"""How long a share is taken to last, at most, when a change is weighed against its cost."""
STOP = 1.0
"""How much the start counts that a running job will need if it is stopped now, in times its cost."""
UNSEEN_S = 60.0
"""The length that a job is taken to have before its speed is known: short, so that it becomes known."""
PATIENCE = 5.0
"""A job that will take this many times as long as on one GPU of its own, because it waits, becomes urgent."""
LEARN_S = 60.0
"""While speeds are being learned, the policy decides at least this often."""
SERVICE_QUEUE_GPU_S = 3600.0
"""With unknown lengths, jobs wait in queues by attained service; each is twice as long as the one before."""
CROWDED = 0.9
"""If promises need more than this part of the cluster until half of them are kept, GPU-time is short, and
spare GPUs go where they cost the least of it."""


@dataclass(kw_only=True)
class Tide(ElasticFlow):
    """Keep every promise, then give each GPU to the job where it saves the most waiting, all jobs counted."""

    name: ClassVar[str] = "tide"
    paper: ClassVar[str] = "swell's own"
    goal: ClassVar[str] = "guaranteed deadlines and low average JCT together, at the true cost of a resize"
    knows: ClassVar[Knowledge] = "fitted"
    adaptive_batch: ClassVar[bool] = True
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = True
    serves: ClassVar[str] = "promised jobs first, then those with the least work left for their weight"

    length: str = "known"
    """'known' if jobs say how long they train; 'unknown' if they do not, and it is guessed from jobs of the
    same kind that have ended, where that helps; 'blind' to guess nothing. Deadlines need it all the same."""

    _errors: SpeedErrors = field(default_factory=SpeedErrors, init=False, repr=False)
    _models: SeenModels = field(default_factory=SeenModels, init=False, repr=False)
    _lengths: Lengths = field(default_factory=Lengths, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.length not in ("known", "unknown", "blind"):
            raise InputError(
                f"length must be 'known', 'unknown' or 'blind', got '{self.length}'", field="length"
            )

    def allocate(self, snapshot: Snapshot) -> Decision:
        """What promises need now, then the rest by price."""
        self._errors.observe(snapshot)
        now = self._moment(snapshot)
        promised = np.isfinite(snapshot.deadline_s)
        plan, crowded = now.empty, False
        if promised.any():
            plan, now = keep_promises(now, self._in_force, now.can_be_kept(), self.rounds)
            plan = plan_the_late(now, plan, self.rounds)
            promised &= np.isfinite(plan.end_s)
            crowded = _load(plan, now.empty) > CROWDED
            if not crowded:
                plan = lend(now.jobs, plan, _longest_first(now.jobs, promised))
        still = now.jobs.still_s > snapshot.now_s
        value, sizes = self._values(snapshot, still)

        def give(jobs: Jobs, plan: Plan) -> tuple[Plan, IntArray]:
            if crowded:
                plan, gpus = spend_spare(jobs, plan)
                spare = int(plan.free[0])
            else:
                plan, gpus = share_out(jobs, plan, promised, value.copy(), sizes)
                spare = int(plan.free[0] - gpus[~promised].sum())
            return plan, run_beside(value, sizes, gpus, spare) if spare > 0 else gpus

        plan, decision = now.spend(plan, give)
        self._in_force = PlanInForce(plan, snapshot.numbers)
        return decision

    def _moment(self, snapshot: Snapshot, newcomer: int | None = None) -> Moment:
        """The snapshot in the planner's terms, with every job at the speed it has shown."""
        now = super()._moment(snapshot, newcomer)
        work = now.jobs.work * self._errors.factors(snapshot)
        return Moment.of(snapshot, now.jobs._replace(work=work, cover_s=now.full_cover_s))

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next planned change of a promised share; soon, while the speed of a job is being learned."""
        learning = any(belief is not None for belief in snapshot.beliefs)
        soon_s = snapshot.now_s + LEARN_S if learning else math.inf
        return min(soon_s, super().next_wakeup_s(snapshot, decision))

    def _values(self, snapshot: Snapshot, still: BoolArray) -> tuple[FloatArray, IntArray]:
        """What each share is worth to each job, and the shares: jobs x shares, and GPUs of each share.

        A job that must keep still gets no more than it holds.
        """
        rates, curve, most, unseen = self._models.believed(snapshot)
        held, least = snapshot.gpus, np.maximum(snapshot.min_gpus, 1)
        most = np.where(still, np.minimum(most, held), most)
        one, weight = one_gpu_rates(rates, curve), snapshot.weight
        stop, flatness = np.zeros(len(one)), FLATNESS if snapshot.resize_cost_s > 0 else FREE_FLATNESS
        left_s = self._left_s(snapshot, one, unseen)
        if left_s is not None:
            now = rates[curve, np.minimum(held, rates.shape[1] - 1)]
            speed = np.divide(now, one, out=np.ones(len(one)), where=(held > 0) & (one > 0))
            lasts_s = np.clip(left_s / np.maximum(speed, 1e-9), 1.0, LASTS_S)
            lasts_s[~snapshot.known] = LASTS_S
            price = prices(np.argsort(-left_s / weight, kind="stable"), weight, SCALING)
            price *= _impatience(snapshot, left_s)
            first = np.zeros(len(one))
            start_s = STOP * snapshot.start_cost_s
            stop[held > 0] = (price * speed**flatness * start_s / (lasts_s + start_s + 1e-9))[held > 0]
        else:
            lasts_s, price = np.full(len(one), LASTS_S), weight
            queue = np.floor(np.log2(1 + snapshot.attained_gpu_s / SERVICE_QUEUE_GPU_S))
            first = FIRST_GPUS * weight * (1 + 1 / (1 + queue))
        kept = np.where(held > 0, lasts_s / (lasts_s + snapshot.resize_cost_s), 1.0)
        legal = legal_sizes(snapshot.cluster.gpus_per_node, min(snapshot.capacity, snapshot.curves.max_gpus))
        odd = odd_shares(rates, curve, least, most, legal)
        sizes = np.union1d(legal, odd)
        is_odd = ~np.isin(sizes, legal)
        worth = values(
            rates, curve, price, first, stop, held, least, most, kept, sizes, odd, is_odd, flatness
        )  # fmt: skip
        return worth, sizes

    def _left_s(self, snapshot: Snapshot, one: FloatArray, unseen: BoolArray) -> FloatArray | None:
        """What each job is taken to have left, in seconds on one GPU; None if nothing can be said.

        `one` are the rates on one GPU, and `unseen` the jobs that nothing is known of.
        """
        if self.length == "blind":
            return None
        if self.length == "unknown":
            left_s = self._lengths.left_s(snapshot, one)
            if not self._lengths.trusted:
                return None
        else:
            left_s = np.divide(snapshot.remaining, one, out=np.full(len(one), UNSEEN_S), where=one > 0)
        left_s[unseen] = UNSEEN_S
        return np.where(snapshot.known, left_s, snapshot.attained_gpu_s)


@dataclass(kw_only=True)
class TideFixed(Tide):
    """tide for jobs that keep their batch size and whose true profiles are known, as most policies assume."""

    name: ClassVar[str] = "tide-fixed"
    goal: ClassVar[str] = "tide with the knowledge of elasticflow and afs-l: true profiles, fixed batch sizes"
    knows: ClassVar[Knowledge] = "profiles"
    adaptive_batch: ClassVar[bool] = False
    changes_with_time: ClassVar[bool] = False


def _impatience(snapshot: Snapshot, left_s: FloatArray) -> FloatArray:
    """At least 1, and more for a job that has waited for long next to the time it has run and needs.

    The factor grows for as long as the job waits, so in the end it gets GPUs, whatever comes in.
    """
    run_s = snapshot.run_s
    slowed = 1 + (snapshot.age_s - run_s) / np.maximum(run_s + left_s, UNSEEN_S)
    return np.maximum(slowed / PATIENCE, 1.0)


def _longest_first(jobs: Jobs, promised: BoolArray) -> IntArray:
    """The promised jobs, the one that would take the longest at its best first."""
    at = np.flatnonzero(promised)
    best = jobs.rates[at].max(axis=1)
    left_s = np.divide(jobs.work[at], best, out=np.zeros(len(at)), where=best > 0)
    return at[np.argsort(-left_s, kind="stable")]


def _load(plan: Plan, empty: Plan) -> float:
    """The part of the cluster that is reserved, on average, until half of the promised jobs have ended."""
    ends_s = plan.end_s[np.isfinite(plan.end_s)]
    if not len(ends_s):
        return 0.0
    until_s = float(np.median(ends_s))
    spans_s = np.diff(np.append(np.minimum(plan.times, until_s), until_s))
    there = empty.free[np.searchsorted(empty.times, plan.times, side="right") - 1]
    total_gpu_s = float(there @ spans_s)
    return 1 - float(plan.free @ spans_s) / total_gpu_s if total_gpu_s > 0 else 0.0
