"""The compiled part of tide: what a GPU is worth to each job, and who gets the next one.

`prices` says how urgent a unit of each job's work is, `values` what each share is worth to each job, and
`share_out` gives GPUs away one step at a time, each step where it is worth the most per GPU. Promised jobs
start from what they have reserved and step along ElasticFlow's levels, so that every promise stands.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.policies._reservations import (
    BoolArray,
    Jobs,
    Plan,
    Steps,
    book,
    fill_level,
    level_of,
    roomy,
    take,
)

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
