"""Reservations of GPUs over time: the arithmetic under ElasticFlow (ASPLOS'23, sections 4.1 and 4.2).

Time is not cut into slots. The GPUs still free are a step function: `free[b]` from `times[b]` to
`times[b + 1]`, and the last one for ever. So plans are exact, and one for n jobs needs n + 1 breakpoints at
most. What a job has reserved is a list of steps (start, GPUs) and an end.

A share is a *level*: 0 for none, l for 2^(l-1) GPUs. Jobs come with two tables by level, `rates` and `gpus`:
the best rate with at most that level, and the GPUs it takes. So a curve that falls or has holes is no special
case. Taking up another share stops a job for `pause_s` at the start of the step, and the plan pays for it.

A reservation is *covered* if it also pays for a stop of `cover_s` that nobody planned, whenever it comes. At
worst such a stop hits the job at its highest share, so a covered reservation has room for the work that the
job would do on that share in `cover_s`.
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
    """The facts of the jobs to plan for, one entry each, and what a change of share costs."""

    work: FloatArray
    last_s: FloatArray
    """When the job must have ended; infinite for a job without deadline."""
    weight: FloatArray
    """How many jobs this one counts as when not all promises can be kept."""
    held: IntArray
    """GPUs held now."""
    lag_s: FloatArray
    """How long a change under way still stops the job, whatever its share becomes."""
    start_s: FloatArray
    """How long the job takes to start from nothing."""
    rates: FloatArray
    """Jobs x levels."""
    gpus: IntArray
    """Jobs x levels."""
    cover_s: FloatArray
    """How long a stop that nobody planned must not break the job's promise."""
    still_s: FloatArray
    """Before this moment the job gets no more GPUs than it holds."""
    pause_s: float
    """How long a change of share stops a running job."""


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
    covered: BoolArray
    """Whether the job's reservation also pays for a stop of `cover_s` that nobody planned."""


@compiled
def nothing_reserved(times: FloatArray, capacity: IntArray, jobs: Jobs) -> Plan:
    """The plan of a cluster on which no job has reserved anything; `capacity[b]` GPUs from `times[b]` on."""
    n, size = len(jobs.work), len(times)
    times, free = roomy(times, 1), roomy(capacity, 1)
    if n > 0 and jobs.still_s.max() > times[0]:
        size = cut(times, free, size, jobs.still_s.max())
    none = np.zeros(n, np.int64)
    return Plan(
        times[:size],
        free[:size],
        np.empty(0),
        np.empty(0, np.int64),
        none,
        none,
        np.full(n, np.inf),
        np.zeros(n),
        none,
        np.zeros(n, np.bool_),
    )


@compiled
def shares_by_level(
    rates: FloatArray, curve: IntArray, least: IntArray, most: IntArray, capacity: int
) -> tuple[FloatArray, IntArray]:
    """Jobs x levels: the best rate with at most that level, and the GPUs it takes.

    `rates` are the curves, `curve[i]` says which one is job i's; its share is from `least[i]` to `most[i]`
    GPUs, and at most `capacity`. If no power of two is in these bounds, the level below them is the least
    share itself: a job that must have three of three GPUs gets them.
    """
    n, top = len(curve), level_of(capacity)
    best, gpus = np.zeros((n, top + 1)), np.zeros((n, top + 1), np.int64)
    for i in range(n):
        for level in range(1, top + 1):
            count = 1 << (level - 1)
            if count < least[i] <= min(most[i], capacity) < 2 * count:
                count = least[i]
            best[i, level], gpus[i, level] = best[i, level - 1], gpus[i, level - 1]
            if least[i] <= count <= most[i] and rates[curve[i], count] > best[i, level]:
                best[i, level], gpus[i, level] = rates[curve[i], count], count
    return best, gpus


@compiled
def ends_alone(now_s: float, jobs: Jobs) -> FloatArray:
    """When each job would end at best if it had the cluster to itself; infinite if it cannot run."""
    n, levels = jobs.rates.shape
    ends = np.full(n, np.inf)
    for i in range(n):
        change_s = max(jobs.lag_s[i], jobs.pause_s if jobs.held[i] > 0 else jobs.start_s[i])
        for j in range(1, levels):
            if jobs.gpus[i, j] > jobs.gpus[i, j - 1]:
                stop_s = jobs.lag_s[i] if jobs.gpus[i, j] == jobs.held[i] else change_s
                ends[i] = min(ends[i], now_s + stop_s + jobs.work[i] / jobs.rates[i, j])
    return ends


@compiled
def ends_alone_over(empty: Plan, jobs: Jobs) -> FloatArray:
    """As `ends_alone`, on a cluster whose GPUs change with time, and with the cover that the jobs have."""
    ends = np.full(len(jobs.work), np.inf)
    for i in range(len(ends)):
        ends[i] = earliest_end(empty, jobs, i)
    return ends


@compiled
def level_of(gpus: int) -> int:
    """The highest level that fits in so many GPUs."""
    level = 0
    while gpus > 0:
        level += 1
        gpus >>= 1
    return level


@compiled
def usable_level(gpus: IntArray, level: int, free: int) -> int:
    """The highest level up to `level` whose share fits in so many GPUs."""
    level = min(level, level_of(free))
    while gpus[level] > free:
        level -= 1
    return level


@compiled
def fill_level(
    times: FloatArray,
    free: IntArray,
    own: Steps,
    jobs: Jobs,
    i: int,
    level: int,
    until_s: float,
    cover_s: float,
    out_s: FloatArray,
    out_gpus: IntArray,
) -> tuple[float, float, int]:
    """Let job i use at most `level` of what is free, and of what it has itself reserved, until it is done.

    Writes its steps to `out_s` and `out_gpus`. Returns its end (infinite if not done by `until_s`), the
    GPU-seconds and the number of steps.
    """
    rates, gpus, pause_s = jobs.rates[i], jobs.gpus[i], jobs.pause_s
    left, share, lag = jobs.work[i] + cover_s * rates[level], jobs.held[i], jobs.lag_s[i]
    at, still_s = level_of(share), jobs.still_s[i]
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
        usable = usable_level(gpus, level, free[b] + mine)
        if start < still_s:
            usable = min(usable, at)
        new, new_rate = gpus[usable], rates[usable]
        stay = new == share
        if 0 < share < new and rate > 0.0:
            # There is more, at the price of a pause: not now if staying does as much by the next step.
            if_stay = min(left, rate * max(span - lag, 0.0))
            move_s = max(lag, pause_s)
            if_move = min(left, new_rate * max(span - move_s, 0.0))
            if if_stay == left and if_move == left:
                stay = lag + left / rate <= move_s + left / new_rate
            else:
                stay = if_stay >= if_move
        if not stay:
            if new > 0:
                lag = max(lag, pause_s if share > 0 else jobs.start_s[i])
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
        lag = max(lag - span, 0.0)
    return np.inf, spent, steps


@compiled
def cut(times: FloatArray, free: IntArray, size: int, at_s: float) -> int:
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
    size = cut(times, free, size, steps.end_s)
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
def append(buffer: Any, used: int, values: Any) -> Any:
    """Write values behind what is used of a buffer, in a larger one if need be."""
    count = len(values)
    if used + count > len(buffer):
        larger = np.empty(2 * (used + count), buffer.dtype)
        larger[:used] = buffer[:used]
        buffer = larger
    buffer[used : used + count] = values
    return buffer


@compiled
def roomy(values: Any, room: int) -> Any:
    """A copy with so much room behind."""
    copy = np.empty(len(values) + room, values.dtype)
    copy[: len(values)] = values
    return copy


@compiled
def book(
    times: FloatArray,
    free: IntArray,
    size: int,
    step_s: FloatArray,
    step_gpus: IntArray,
    used: int,
    old: Steps,
    new: Steps,
) -> tuple[int, FloatArray, IntArray]:
    """Reserve the steps `new` in place of `old`, and write them behind what is used of the plan's steps.

    Returns the number of breakpoints, and the plan's steps, which may have moved to larger arrays.
    """
    if len(old.start_s) > 0:
        size = take(times, free, size, old, -1)
    size = take(times, free, size, new, 1)
    return size, append(step_s, used, new.start_s), append(step_gpus, used, new.gpus)


@compiled
def least_share(
    times: FloatArray,
    free: IntArray,
    always_free: int,
    own: Steps,
    jobs: Jobs,
    i: int,
    cover_s: float,
    out_s: FloatArray,
    out_gpus: IntArray,
) -> tuple[float, float, int, int]:
    """The minimum satisfactory share of job i: the lowest level that ends it in time.

    At every moment at least `always_free` GPUs are free. Returns what `fill_level` returns (an infinite end
    if no level is enough), and the level.
    """
    for j in range(1, jobs.rates.shape[1]):
        most = jobs.rates[i, j] * (jobs.last_s[i] - times[0] - cover_s)
        if jobs.gpus[i, j] <= jobs.gpus[i, j - 1] or most < jobs.work[i]:
            continue
        if jobs.gpus[i, j] <= always_free and _takes_at_once(times[0], jobs, i, j):
            end = _end_at_level(times[0], jobs, i, j, cover_s)
            if end <= jobs.last_s[i]:
                out_s[0], out_gpus[0] = times[0], jobs.gpus[i, j]
                return end, jobs.gpus[i, j] * (end - times[0]), 1, j
            continue
        end, spent, steps = fill_level(times, free, own, jobs, i, j, jobs.last_s[i], cover_s, out_s, out_gpus)
        if end < np.inf:
            return end, spent, steps, j
    return np.inf, 0.0, 0, 0


@compiled
def _takes_at_once(now_s: float, jobs: Jobs, i: int, level: int) -> bool:
    """Whether job i, if it may have this level, takes it up now and not at a later step of the plan."""
    held, share = jobs.held[i], jobs.gpus[i, level]
    return held >= share or (held == 0 and jobs.still_s[i] <= now_s)


@compiled
def _end_at_level(now_s: float, jobs: Jobs, i: int, level: int, cover_s: float) -> float:
    """When job i ends if it has this level from now on."""
    held, rate, lag_s = jobs.held[i], jobs.rates[i, level], jobs.lag_s[i]
    if held != jobs.gpus[i, level]:
        lag_s = max(lag_s, jobs.pause_s if held > 0 else jobs.start_s[i])
    return now_s + lag_s + (jobs.work[i] + cover_s * rate) / rate


@compiled
def reserve_in_order(plan: Plan, jobs: Jobs, order: IntArray) -> Plan:
    """Minimum satisfactory shares by progressive filling, one job after the other, on top of a plan.

    Covered where there is room for that. A job that cannot be satisfied at all reserves nothing, and one that
    has a place in the plan already only changes it for a covered one.
    """
    size, used = len(plan.times), len(plan.step_s)
    times, free = roomy(plan.times, len(order)), roomy(plan.free, len(order))
    step_s, step_gpus = roomy(plan.step_s, 4 * len(order)), roomy(plan.step_gpus, 4 * len(order))
    first, last = plan.first.copy(), plan.last.copy()
    ends, gpu_s, level = plan.end_s.copy(), plan.gpu_s.copy(), plan.level.copy()
    covered = plan.covered.copy()
    out_s, out_gpus = np.empty(len(times)), np.empty(len(times), np.int64)
    always_free = free[:size].min()  # or less: the minimum is computed anew only when it may matter
    for i in order:
        own = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
        cover_s = jobs.cover_s[i]
        if always_free < jobs.gpus[i, -1]:
            always_free = free[:size].min()
        end, spent, steps, j = least_share(
            times[:size], free[:size], always_free, own, jobs, i, cover_s, out_s, out_gpus
        )
        if end == np.inf and cover_s > 0.0 and len(own.start_s) == 0:
            cover_s = 0.0
            end, spent, steps, j = least_share(
                times[:size], free[:size], always_free, own, jobs, i, cover_s, out_s, out_gpus
            )
        if end == np.inf:
            continue
        new = Steps(out_s[:steps], out_gpus[:steps], end)
        size, step_s, step_gpus = book(times, free, size, step_s, step_gpus, used, own, new)
        always_free -= new.gpus.max()
        first[i], last[i] = used, used + steps
        ends[i], gpu_s[i], level[i], covered[i] = end, spent, j, cover_s == jobs.cover_s[i]
        used += steps
    return Plan(
        times[:size], free[:size], step_s[:used], step_gpus[:used], first, last, ends, gpu_s, level, covered
    )


@compiled
def earliest_end(plan: Plan, jobs: Jobs, i: int) -> float:
    """When a covered reservation of job i could end at best on what the plan leaves free."""
    out_s, out_gpus = np.empty(len(plan.times)), np.empty(len(plan.times), np.int64)
    nothing = Steps(out_s[:0], out_gpus[:0], plan.times[0])
    best = np.inf
    for j in range(1, jobs.rates.shape[1]):
        if jobs.gpus[i, j] > jobs.gpus[i, j - 1]:
            end, _, _ = fill_level(
                plan.times, plan.free, nothing, jobs, i, j, np.inf, jobs.cover_s[i], out_s, out_gpus
            )
            best = min(best, end)
    return best


@compiled
def spend_spare(jobs: Jobs, plan: Plan) -> tuple[Plan, IntArray]:
    """Give away what is free now, a level at a time, where a step costs the least extra GPU-time per GPU.

    First come jobs without any, late ones with a promise before all, then those that would lose GPUs they
    hold, then the rest. A step must bring the job's end forward by more than a pause. It takes only what
    nobody has reserved, and a covered reservation stays covered, so every promise stands.
    Returns the plan and everybody's GPUs now.
    """
    n, levels = jobs.rates.shape
    size, used = len(plan.times), len(plan.step_s)
    room = n * levels + 1
    times, free = roomy(plan.times, room), roomy(plan.free, room)
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
    while len(heap) > 0:
        _, _, i = heappop(heap)
        j = level[i]
        while j < levels and jobs.gpus[i, j] == jobs.gpus[i, level[i]]:
            j += 1
        if j >= levels or jobs.gpus[i, usable_level(jobs.gpus[i], j, free[0] + given[i])] <= given[i]:
            continue
        own = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
        cover_s = jobs.cover_s[i] if plan.covered[i] else 0.0
        end, spent, steps = fill_level(
            times[:size], free[:size], own, jobs, i, j, np.inf, cover_s, out_s, out_gpus
        )
        more = out_gpus[0] - given[i]
        if more <= 0 or end + jobs.pause_s >= ends[i]:
            continue
        if given[i] == 0:
            late = ends[i] == np.inf and jobs.last_s[i] < np.inf
            entry = (0, jobs.last_s[i] - 1e18 if late else spent, i)
        else:
            entry = (1 if out_gpus[0] <= jobs.held[i] else 2, (spent - gpu_s[i]) / more, i)
        if len(heap) > 0 and entry > heap[0]:
            heappush(heap, entry)
            continue
        new = Steps(out_s[:steps], out_gpus[:steps], end)
        size, step_s, step_gpus = book(times, free, size, step_s, step_gpus, used, own, new)
        first[i], last[i] = used, used + steps
        ends[i], gpu_s[i], level[i], given[i] = end, spent, j, out_gpus[0]
        used += steps
        heappush(heap, (0, -np.inf, i))
    steps_s, steps_gpus = step_s[:used], step_gpus[:used]
    return (
        Plan(times[:size], free[:size], steps_s, steps_gpus, first, last, ends, gpu_s, level, plan.covered),
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
