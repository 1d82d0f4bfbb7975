"""Reservations of GPUs over time: the arithmetic under ElasticFlow (ASPLOS'23, sections 4.1 and 4.2).

Time is not cut into slots. The GPUs still free are a step function: `free[b]` from `times[b]` to
`times[b + 1]`, and the last one for ever. So plans are exact, and one for n jobs needs n + 1 breakpoints at
most. What a job has reserved is a list of steps (start, GPUs) and an end.

A share is a *level*: 0 for none, l for 2^(l-1) GPUs. Jobs come with two tables by level, `rates` and `gpus`:
the best rate with at most that level, and the GPUs it takes. So a curve that falls or has holes is no special
case. Taking up another share stops a job for `pause_s` at the start of the step, and the plan pays for it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled

BoolArray = npt.NDArray[np.bool_]

ROUNDING_S = 1e-4
"""A job this little behind its plan is on plan."""


class Jobs(NamedTuple):
    """The facts of the jobs to plan for, one entry each."""

    work: FloatArray
    due_s: FloatArray
    """When its reservation shall end; infinite for a job without deadline."""
    last_s: FloatArray
    """When it must end at the very latest, for a job that cannot make `due_s`."""
    held: IntArray
    """GPUs held now."""
    lag_s: FloatArray
    """How long a change under way still stops the job, if its share stays."""
    start_s: FloatArray
    """How long the job takes to start from nothing; a change of share takes `pause_s`."""
    rates: FloatArray
    """Jobs x levels."""
    gpus: IntArray
    """Jobs x levels."""


class Steps(NamedTuple):
    """GPUs from each start to the next one, the last until the end."""

    start_s: FloatArray
    gpus: IntArray
    end_s: float


class Plan(NamedTuple):
    """Who has reserved what, and what is free. Job i has the steps from `first[i]` up to `last[i]`."""

    times: FloatArray
    free: IntArray
    step_s: FloatArray
    step_gpus: IntArray
    first: IntArray
    last: IntArray
    end_s: FloatArray
    """When each job ends; infinite where nothing is reserved."""
    gpu_s: FloatArray
    """GPU-seconds reserved."""
    level: IntArray
    """The highest level a job's steps may use."""


def nothing_reserved(now_s: float, capacity: int, jobs: int) -> Plan:
    """The plan of a cluster on which nobody has reserved anything."""
    none = np.zeros(jobs, dtype=np.int64)
    return Plan(
        times=np.array([now_s]),
        free=np.array([capacity], dtype=np.int64),
        step_s=np.empty(0),
        step_gpus=np.empty(0, dtype=np.int64),
        first=none,
        last=none,
        end_s=np.full(jobs, np.inf),
        gpu_s=np.zeros(jobs),
        level=none,
    )


@compiled
def level_of(gpus: int) -> int:
    """The highest level that fits in so many GPUs."""
    level = 0
    while gpus > 0:
        level += 1
        gpus >>= 1
    return level


@compiled
def _fill(
    times: FloatArray,
    free: IntArray,
    own: Steps,
    jobs: Jobs,
    i: int,
    level: int,
    until_s: float,
    pause_s: float,
    out_s: FloatArray,
    out_gpus: IntArray,
) -> tuple[float, float, int]:
    """Let job i use at most `level` of what is free, and of what it has itself reserved, until it is done.

    Writes its steps to `out_s` and `out_gpus`. Returns its end (infinite if not done by `until_s`), the
    GPU-seconds and the number of steps.
    """
    rates, gpus = jobs.rates[i], jobs.gpus[i]
    left, share, lag = jobs.work[i], jobs.held[i], jobs.lag_s[i]
    at = level_of(share)
    rate = rates[at] if at < len(gpus) and gpus[at] == share else 0.0
    spent = 0.0
    steps = 0
    mine, m = 0, 0
    for b in range(len(times)):
        start = times[b]
        if start >= until_s:
            break
        span = min(times[b + 1] if b + 1 < len(times) else np.inf, until_s) - start
        while m < len(own.start_s) and own.start_s[m] <= start:
            mine = own.gpus[m]
            m += 1
        if start >= own.end_s:
            mine = 0
        usable = min(level, level_of(free[b] + mine))
        new, new_rate = gpus[usable], rates[usable]
        stay = new == share
        if 0 < share < new and rate > 0.0:
            # There is more, at the price of a pause: not now if staying does as much by the next step.
            if_stay = min(left, rate * max(span - lag, 0.0))
            if_move = min(left, new_rate * max(span - pause_s, 0.0))
            if if_stay == left and if_move == left:
                stay = lag + left / rate <= pause_s + left / new_rate
            else:
                stay = if_stay >= if_move
        if not stay:
            lag = 0.0 if new == 0 else pause_s if share > 0 else jobs.start_s[i]
            share, rate = new, new_rate
        if steps == 0 or out_gpus[steps - 1] != share:
            out_s[steps], out_gpus[steps] = start, share
            steps += 1
        if share > 0:
            run = span - lag
            if run > 0.0 and rate * run >= left:
                end = start + lag + left / rate
                return end, spent + share * (end - start), steps
            spent += share * span
            left -= rate * max(run, 0.0)
            lag = max(-run, 0.0)
    return np.inf, spent, steps


@compiled
def _cut(times: FloatArray, free: IntArray, size: int, at_s: float) -> int:
    """Make `at_s` a breakpoint; returns the number of breakpoints."""
    b = np.searchsorted(times[:size], at_s)
    if b < size and times[b] == at_s:
        return size
    for i in range(size, b, -1):
        times[i] = times[i - 1]
        free[i] = free[i - 1]
    times[b] = at_s
    free[b] = free[b - 1]
    return size + 1


@compiled
def take(times: FloatArray, free: IntArray, size: int, steps: Steps, sign: int) -> int:
    """Take steps that begin on breakpoints out of what is free (sign 1), or put them back (sign -1).

    Returns the number of breakpoints; the arrays must have room for one more.
    """
    size = _cut(times, free, size, steps.end_s)
    b = 0
    for s in range(len(steps.start_s)):
        stop = steps.start_s[s + 1] if s + 1 < len(steps.start_s) else steps.end_s
        while b < size and times[b] < steps.start_s[s]:
            b += 1
        while b < size and times[b] < stop:
            free[b] -= sign * steps.gpus[s]
            b += 1
    return size


@compiled
def _append(buffer: Any, used: int, values: Any) -> Any:
    """Write values behind what is used of a buffer, in a larger one if need be."""
    count = len(values)
    if used + count > len(buffer):
        larger = np.empty(2 * (used + count), buffer.dtype)
        larger[:used] = buffer[:used]
        buffer = larger
    buffer[used : used + count] = values
    return buffer


@compiled
def _roomy(values: Any, room: int) -> Any:
    """A copy with so much room behind."""
    copy = np.empty(len(values) + room, values.dtype)
    copy[: len(values)] = values
    return copy


@compiled
def reserve_in_order(plan: Plan, jobs: Jobs, order: IntArray, pause_s: float) -> tuple[Plan, int]:
    """Minimum satisfactory shares by progressive filling, one job after the other, on top of a plan.

    A job that cannot be satisfied reserves nothing. Returns the plan and how many those are.
    """
    levels = jobs.rates.shape[1]
    size, used = len(plan.times), len(plan.step_s)
    times, free = _roomy(plan.times, len(order)), _roomy(plan.free, len(order))
    step_s, step_gpus = _roomy(plan.step_s, 4 * len(order)), _roomy(plan.step_gpus, 4 * len(order))
    first, last = plan.first.copy(), plan.last.copy()
    ends, gpu_s, level = plan.end_s.copy(), plan.gpu_s.copy(), plan.level.copy()
    out_s, out_gpus = np.empty(len(times)), np.empty(len(times), np.int64)
    now_s = times[0]
    nothing = Steps(out_s[:0], out_gpus[:0], now_s)
    missed = 0
    for i in order:
        end, spent, steps, j = np.inf, 0.0, 0, 0
        for until_s in (jobs.due_s[i], jobs.last_s[i]):
            for j in range(1, levels):
                most = jobs.rates[i, j] * (until_s - now_s)
                if jobs.gpus[i, j] > jobs.gpus[i, j - 1] and most >= jobs.work[i]:
                    end, spent, steps = _fill(
                        times[:size], free[:size], nothing, jobs, i, j, until_s, pause_s, out_s, out_gpus
                    )
                    if end < np.inf:
                        break
            if end < np.inf:
                break
        if end == np.inf:
            missed += 1
            continue
        size = take(times, free, size, Steps(out_s[:steps], out_gpus[:steps], end), 1)
        step_s, step_gpus = _append(step_s, used, out_s[:steps]), _append(step_gpus, used, out_gpus[:steps])
        first[i], last[i] = used, used + steps
        ends[i], gpu_s[i], level[i] = end, spent, j
        used += steps
    return (
        Plan(times[:size], free[:size], step_s[:used], step_gpus[:used], first, last, ends, gpu_s, level),
        missed,
    )


@compiled
def earliest_end(plan: Plan, jobs: Jobs, i: int, pause_s: float) -> float:
    """When job i could end at best on what the plan leaves free."""
    out_s, out_gpus = np.empty(len(plan.times)), np.empty(len(plan.times), np.int64)
    nothing = Steps(out_s[:0], out_gpus[:0], plan.times[0])
    best = np.inf
    for j in range(1, jobs.rates.shape[1]):
        if jobs.gpus[i, j] > jobs.gpus[i, j - 1]:
            end, _, _ = _fill(plan.times, plan.free, nothing, jobs, i, j, np.inf, pause_s, out_s, out_gpus)
            best = min(best, end)
    return best


@compiled
def _follow(steps: Steps, jobs: Jobs, i: int, pause_s: float) -> tuple[float, float, int]:
    """When job i ends if it follows these steps, its GPU-seconds, and the highest level in them."""
    rates, gpus = jobs.rates[i], jobs.gpus[i]
    left, share, lag = jobs.work[i], jobs.held[i], jobs.lag_s[i]
    spent, top, end = 0.0, 0, np.inf
    count = len(steps.start_s)
    for s in range(count):
        start = steps.start_s[s]
        span = (steps.start_s[s + 1] if s + 1 < count else np.inf) - start
        if steps.gpus[s] != share:
            lag = pause_s if share > 0 else jobs.start_s[i]
            share = steps.gpus[s]
        at = level_of(share)
        if at >= len(gpus) or gpus[at] != share:
            return np.inf, spent, top  # its curve or the cluster changed: no legal share any more
        top = max(top, at)
        if share > 0 and end == np.inf:
            run = span - lag
            if run > 0.0 and rates[at] * run >= left:
                end = start + lag + left / rates[at]
                spent += share * (end - start)
            else:
                spent += share * span
                left -= rates[at] * max(run, 0.0)
                lag = max(-run, 0.0)
    return end, spent, top


@compiled
def carry_over(
    now_s: float, capacity: int, jobs: Jobs, old: Plan, where: IntArray, order: IntArray, pause_s: float
) -> Plan:
    """What is left of an earlier plan, for those of the jobs in `order` that are on plan and fit.

    `where[i]` is the place of job i in the old plan, or -1.
    """
    n = len(jobs.work)
    room = len(old.step_s) + 2 * n
    times, free = _roomy(np.array([now_s]), room), _roomy(np.array([capacity]), room)
    size, used = 1, 0
    step_s, step_gpus = np.empty(room), np.empty(room, np.int64)
    first, last = np.zeros(n, np.int64), np.zeros(n, np.int64)
    ends, gpu_s, level = np.full(n, np.inf), np.zeros(n), np.zeros(n, np.int64)
    for i in order:
        o = where[i]
        if o < 0 or not now_s < old.end_s[o] < np.inf:
            continue
        begin = used
        for s in range(old.first[o], old.last[o]):
            stop = old.step_s[s + 1] if s + 1 < old.last[o] else old.end_s[o]
            if stop > now_s:
                step_s[used], step_gpus[used] = max(old.step_s[s], now_s), old.step_gpus[s]
                used += 1
        steps = Steps(step_s[begin:used], step_gpus[begin:used], old.end_s[o])
        end, spent, top = _follow(steps, jobs, i, pause_s)
        if end <= min(jobs.last_s[i], steps.end_s) + ROUNDING_S:
            for start in steps.start_s:
                size = _cut(times, free, size, start)
            size = take(times, free, size, steps, 1)
            if free[:size].min() >= 0:
                first[i], last[i] = begin, used
                ends[i], gpu_s[i], level[i] = steps.end_s, spent, top
                continue
            take(times, free, size, steps, -1)
        used = begin
    return Plan(times[:size], free[:size], step_s[:used], step_gpus[:used], first, last, ends, gpu_s, level)


@compiled
def spend_spare(jobs: Jobs, plan: Plan, pause_s: float) -> tuple[Plan, IntArray]:
    """Give away what is free now, a level at a time, where a step costs the least extra GPU-time per GPU.

    First come jobs without any, late ones with a promise before all, then those that would lose GPUs they
    hold, then the rest. A step must bring the job's end forward by more than a pause. It takes only what
    nobody has reserved, so every promise stands. Returns the plan and everybody's GPUs now.
    """
    n, levels = jobs.rates.shape
    size, used = len(plan.times), len(plan.step_s)
    room = n * levels + 1
    times, free = _roomy(plan.times, room), _roomy(plan.free, room)
    step_s, step_gpus = plan.step_s, plan.step_gpus
    first, last = plan.first.copy(), plan.last.copy()
    ends, gpu_s, level = plan.end_s.copy(), plan.gpu_s.copy(), plan.level.copy()
    out_s, out_gpus = np.empty(len(times)), np.empty(len(times), np.int64)
    given = np.zeros(n, np.int64)
    for i in range(n):
        if last[i] > first[i]:
            given[i] = step_gpus[first[i]]

    heap = [(0, -np.inf, i) for i in range(n)]  # tier, cost, job; these are lower bounds until weighed
    heapify(heap)
    while len(heap) > 0 and free[0] > 0:
        _, _, i = heappop(heap)
        j = level[i] + 1
        while j < levels and jobs.gpus[i, j] == jobs.gpus[i, level[i]]:
            j += 1
        if j >= levels or jobs.gpus[i, min(j, level_of(free[0] + given[i]))] <= given[i]:
            continue
        own = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
        end, spent, steps = _fill(
            times[:size], free[:size], own, jobs, i, j, np.inf, pause_s, out_s, out_gpus
        )
        more = out_gpus[0] - given[i]
        if more <= 0 or end + pause_s >= ends[i]:
            continue
        if given[i] == 0:
            late = ends[i] == np.inf and jobs.last_s[i] < np.inf
            entry = (0, jobs.last_s[i] - 1e18 if late else spent, i)
        else:
            entry = (1 if out_gpus[0] <= jobs.held[i] else 2, (spent - gpu_s[i]) / more, i)
        if len(heap) > 0 and entry > heap[0]:
            heappush(heap, entry)
            continue
        if len(own.start_s) > 0:
            size = take(times, free, size, own, -1)
        size = take(times, free, size, Steps(out_s[:steps], out_gpus[:steps], end), 1)
        step_s, step_gpus = _append(step_s, used, out_s[:steps]), _append(step_gpus, used, out_gpus[:steps])
        first[i], last[i] = used, used + steps
        ends[i], gpu_s[i], level[i], given[i] = end, spent, j, out_gpus[0]
        used += steps
        heappush(heap, (0, -np.inf, i))
    return (
        Plan(times[:size], free[:size], step_s[:used], step_gpus[:used], first, last, ends, gpu_s, level),
        given,
    )


@compiled
def next_step_s(plan: Plan, promised: BoolArray) -> float:
    """When a promised job's share changes next, unless a running job ends then: that is an event anyway."""
    soonest = np.inf
    for i in range(len(promised)):
        if promised[i] and plan.last[i] - plan.first[i] > 1:
            soonest = min(soonest, plan.step_s[plan.first[i] + 1])
    for i in range(len(promised)):
        if promised[i] and plan.last[i] - plan.first[i] == 1 and plan.end_s[i] == soonest:
            return np.inf
    return soonest
