"""The plan in force: how promises survive what happens after they were made. Ours; not in a paper.

ElasticFlow's paper plans anew at every event, in order of deadline. For real curves that is a heuristic: it
may miss a deadline though some plan keeps it. But the plan made at the last event is such a plan, so it is
remembered. One invariant carries every promise:

    The plan in force, followed exactly, ends every promised job by its deadline,
    even if each of these jobs is stopped once, at any moment, for a pause that nobody planned.

What can happen to it, and why it survives:

- *Time passes, or a job ends.* What is left of the plan is a plan for the jobs that are left.
- *Reserved hours.* GPUs that services have later are not there in the plan, and neither are those that a
  service may want at any time (`Snapshot.ahead`). They can be used now, never counted on (`Moment.spend`).
- *A newcomer.* It is let in only with a plan that covers everybody, itself included. While an earlier promise
  that can still be kept has no place in the plan, every newcomer is refused.
- *Spare GPUs are given away.* They come from what nobody has reserved, and a job takes them only if its
  reservation, covered as before, ends sooner.
- *A stop nobody planned.* The placer may move a job to make room for another, and the moved job pays a pause.
  Its reservation is *covered*: it lasts until the job would have ended after one more pause, so the job still
  ends within it, and no other job has to wait. But now the cover is used up. The next event restores it in
  the first of these ways that works for everybody: plan anew; carry the plan on, and *stretch* reservations
  that have become too short towards their deadlines; or carry the plan on with a *delay*, which means that
  everybody keeps the present share for a pause and the rest of the plan comes later by that. A delay needs
  no free GPUs, only some time before each deadline, so it nearly always works.

Two kinds of job are *fragile*, because one stop would make them late: a job for which none of these ways
works, and a *bare* job, whose deadline is so close that not even the whole cluster could cover it. As long as
one of them runs, no job grows unless it is certain that no other job has to move for it; and if one must grow
all the same, other jobs than the fragile are moved for it where that is possible (`Decision.stay`).

A lost node or a wrong curve can break the invariant. Then as many promises are kept as can be found, and each
lost one is planned for the earliest end that costs no other promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.policies._reservations import (
    ROUNDING_S,
    BoolArray,
    Jobs,
    Plan,
    Steps,
    cut,
    earliest_end,
    ends_alone,
    ends_alone_over,
    level_of,
    nothing_reserved,
    reserve_in_order,
    roomy,
    take,
)
from swell.policies.base import Decision
from swell.policies.snapshot import Snapshot

# Whether buddy placement has free blocks for the jobs that grow, so that nobody has to move for them.


def fits_in_free_blocks(snapshot: Snapshot, shares: IntArray) -> bool:
    """Whether it is certain that jobs can have these shares without moving one that does not grow.

    A job that is to shrink counts as if it kept all it holds, because spare GPUs may let it do so. False
    where that cannot be told here: with several types of GPU, or with blocks of several nodes whose size is
    no power of two.
    """
    held, cluster = snapshot.gpus, snapshot.cluster
    if (shares <= held).all():
        return True
    if len({node.gpu_type for node in cluster.nodes}) > 1:
        return False
    free = cluster.in_service.copy()
    for gpus, stays in zip(snapshot.placements, shares <= held):
        if stays:
            free[list(gpus)] = False
    sizes = [node.gpus for node in cluster.nodes]
    width = _round_up(max(sizes))
    by_node = np.zeros((_round_up(len(sizes)), width), dtype=np.bool_)
    for node, (first, size) in enumerate(zip(cluster.first_gpu, sizes)):
        by_node[node, :size] = free[first : first + size]
    slots, block, wanted = by_node.ravel(), 1, shares[shares > held]
    while (wanted >= block).any():
        if block > width and set(sizes) != {width}:
            return False
        if (wanted[wanted >= block] // block).sum() > slots.sum():
            return False
        pairs = len(slots) // 2
        slots, block = slots[: 2 * pairs : 2] & slots[1 : 2 * pairs : 2], 2 * block
    return True


def _round_up(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


SLACK_S = 1e-3
"""Reservations end this long before the deadline, so that rounding never decides over a promise."""

LATE_WAKEUP_S = 0.01
"""A change of share may be carried out this much later than planned, even where changes cost nothing."""


@dataclass(frozen=True)
class Moment:
    snapshot: Snapshot
    jobs: Jobs
    alone_s: FloatArray
    """When each job would end alone on the cluster."""
    full_cover_s: FloatArray
    """How much cover each job shall have, if that is possible at all."""
    bare: BoolArray
    """Jobs that cannot be covered even alone on the cluster. Nothing is reserved to cover them."""
    fragile: BoolArray | None = None
    """Running jobs that one more stop would make late; None if there are none."""

    @classmethod
    def of(cls, snapshot: Snapshot, jobs: Jobs) -> Moment:
        """The jobs of a snapshot in the planner's terms, each to be covered if that is possible."""
        full_cover_s = np.maximum(jobs.cover_s, LATE_WAKEUP_S)
        if len(snapshot.ahead.times) == 1:
            alone_s = ends_alone(snapshot.now_s, jobs)
        else:
            uncovered = jobs._replace(cover_s=np.zeros(len(jobs.work)))
            alone_s = ends_alone_over(nothing_reserved(*snapshot.ahead, jobs), uncovered)
        bare = alone_s + full_cover_s > jobs.last_s
        jobs = jobs._replace(cover_s=np.where(bare, 0.0, full_cover_s))
        return cls(snapshot, jobs, alone_s, full_cover_s, bare)

    @cached_property
    def empty(self) -> Plan:
        return nothing_reserved(*self.snapshot.ahead, self.jobs)

    def spend(self, plan: Plan, give: Callable[[Jobs, Plan], tuple[Plan, IntArray]]) -> tuple[Plan, Decision]:
        """Give spare GPUs away; returns the plan to keep in force, and what everybody gets now.

        GPUs that a service does not want now are given away as well, but are in no plan that is kept, so the
        service may have them back at any moment. A promised job that keeps lent GPUs is never behind the
        plan without them. One that grows by lent GPUs pays a pause for that and another to give them back,
        so it may grow only if its reservation can last longer by both.
        """
        plan, gpus = give(self.jobs, plan)
        lent = self.snapshot.lent
        if lent <= 0:
            return plan, Decision(gpus, stay=self.fragile)
        times, free, longer_s, still_s = lengthen(self.jobs, plan, 2 * self.jobs.pause_s)
        plan = plan._replace(times=times, free=free)
        _, more = give(self.jobs._replace(still_s=still_s), plan._replace(free=free + lent))
        return plan._replace(end_s=longer_s), Decision(
            more, lent=np.maximum(more - gpus, 0), stay=self.fragile
        )

    def can_be_kept(self) -> IntArray:
        """The jobs with deadlines that could end in time alone on the cluster, earliest deadline first."""
        last_s = self.jobs.last_s
        alive = np.flatnonzero(np.isfinite(last_s) & (self.alone_s <= last_s))
        return alive[np.argsort(last_s[alive], kind="stable")]

    def calm(self, plan: Plan, order: IntArray) -> Moment:
        """The same moment, but no other job grows while a fragile job in `order` runs."""
        running = order[(self.jobs.held[order] > 0) & np.isfinite(plan.end_s[order])]
        fragile = running[~plan.covered[running] | self.bare[running]]
        if not len(fragile) or self.jobs.pause_s == 0:
            return self
        still_s = np.full(len(plan.end_s), plan.end_s[fragile].max())
        still_s[fragile] = self.snapshot.now_s
        one_by_one = np.isin(np.arange(len(still_s)), fragile)
        return replace(self, jobs=self.jobs._replace(still_s=still_s), fragile=one_by_one)

    def growing(self, plan: Plan) -> list[int]:
        """The jobs that grow at once by a plan, those with the most time before their deadlines first."""
        grows = np.flatnonzero(first_shares(plan) > self.snapshot.gpus)
        with np.errstate(invalid="ignore"):  # neither a deadline nor an end
            spare_s = np.nan_to_num(self.jobs.last_s[grows] - plan.end_s[grows])
        most_first: list[int] = grows[np.argsort(-spare_s, kind="stable")].tolist()
        return most_first

    def moves_nobody(self, plan: Plan) -> bool:
        """Whether buddy placement can certainly begin the plan without moving a job that does not grow."""
        return fits_in_free_blocks(self.snapshot, first_shares(plan))


def first_shares(plan: Plan) -> IntArray:
    """What each job has at the beginning of a plan."""
    has_steps = plan.last > plan.first
    shares = np.zeros(len(plan.first), dtype=np.int64)
    shares[has_steps] = plan.step_gpus[plan.first[has_steps]]
    return shares


@dataclass
class PlanInForce:
    """The plan made at the last event, and the numbers of the jobs it is for."""

    plan: Plan | None = None
    numbers: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def carried_on(self, now: Moment, order: IntArray) -> Plan | None:
        """What the plan in force has become by now, for the jobs in `order`; None if there is none."""
        if self.plan is None or not len(self.numbers):
            return None
        numbers = now.snapshot.numbers
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        where = np.where(self.numbers[at] == numbers, at, -1)
        best: Plan | None = None
        for delay_s in (0.0, max(now.jobs.pause_s, LATE_WAKEUP_S)):
            kept = carry_on(now.empty, now.jobs, self.plan, where, order, delay_s)
            kept = reserve_in_order(kept, now.jobs, order[np.isinf(kept.end_s[order])])
            kept = reserve_in_order(kept, now.jobs, order[~kept.covered[order]])
            if best is None or shortfall(kept, now.jobs, order) < shortfall(best, now.jobs, order):
                best = kept
            if shortfall(best, now.jobs, order) == (0, 0):
                break
        return best


@compiled
def lengthen(jobs: Jobs, plan: Plan, by_s: float) -> tuple[FloatArray, IntArray, FloatArray, FloatArray]:
    """Let reservations last longer by so much where that is free and in time.

    Returns the times and what is free, the ends, and until when each job must not grow: for ever if it is
    promised and its reservation could not be made to last longer.
    """
    room, size = 2 * len(plan.first), len(plan.times)
    times, free = roomy(plan.times, room), roomy(plan.free, room)
    ends, still_s = plan.end_s.copy(), jobs.still_s.copy()
    for i in range(len(ends)):
        if jobs.last_s[i] == np.inf or ends[i] == np.inf:
            continue
        if ends[i] + by_s <= jobs.last_s[i] and plan.covered[i]:
            size = cut(times, free, size, ends[i])
            share = plan.step_gpus[plan.last[i] - 1 : plan.last[i]]
            more = Steps(plan.end_s[i : i + 1], share, ends[i] + by_s)
            if _is_free(times, free, size, more):
                size = take(times, free, size, more, 1)
                ends[i] = more.end_s
                continue
        still_s[i] = np.inf
    return times[:size], free[:size], ends, still_s


@compiled
def shortfall(plan: Plan, jobs: Jobs, order: IntArray) -> tuple[float, float]:
    """The weight of the jobs in `order` without a place in the plan, and of those without a covered one."""
    unplaced, uncovered = 0.0, 0.0
    for i in order:
        if plan.end_s[i] == np.inf:
            unplaced += jobs.weight[i]
        if not plan.covered[i]:
            uncovered += jobs.weight[i]
    return unplaced, uncovered


def plan_anew(now: Moment, order: IntArray, rounds: int) -> Plan:
    """Reserve in this order; while some get no covered place, try again with those in front."""
    best = plan = reserve_in_order(now.empty, now.jobs, order)
    least = shortfall(best, now.jobs, order)
    for _ in range(rounds):
        if not any(least):
            break
        behind = ~plan.covered[order]
        order = np.concatenate([order[behind], order[~behind]])
        plan = reserve_in_order(now.empty, now.jobs, order)
        if shortfall(plan, now.jobs, order) < least:
            best, least = plan, shortfall(plan, now.jobs, order)
    return best


def keep_promises(now: Moment, in_force: PlanInForce, order: IntArray, rounds: int) -> tuple[Plan, Moment]:
    """A plan for the jobs in `order`, and the moment with the calm that the fragile among them need."""
    plan = _anew_or_kept(now, in_force, order, rounds)
    calm = now.calm(plan, order)
    if calm is now or now.moves_nobody(plan):
        return plan, calm

    def trouble(choice: Plan) -> tuple[float, bool, float]:
        unplaced, uncovered = shortfall(choice, now.jobs, order)
        return unplaced, not now.moves_nobody(choice), uncovered

    # A newcomer may have been let in to start beside the fragile: that plan is the one in force.
    choices = [plan, _anew_or_kept(calm, in_force, order, rounds), in_force.carried_on(now, order)]
    best = min((choice for choice in choices if choice is not None), key=trouble)
    wait = np.zeros(len(plan.end_s), dtype=np.bool_)
    for i in now.growing(best) if trouble(best)[1] else ():  # those that can wait the longest, one by one
        wait[i] = True
        still_s = np.where(wait, calm.jobs.still_s, now.jobs.still_s)
        patient = replace(now, jobs=now.jobs._replace(still_s=still_s))
        best = min(best, _anew_or_kept(patient, in_force, order, rounds), key=trouble)
        if not trouble(best)[1]:
            break
    return best, calm


def _anew_or_kept(now: Moment, in_force: PlanInForce, order: IntArray, rounds: int) -> Plan:
    """A plan made anew, or the one in force carried on if that keeps more promises."""
    anew = plan_anew(now, order, rounds)
    short = shortfall(anew, now.jobs, order)
    if not any(short):
        return anew
    kept = in_force.carried_on(now, order)
    return anew if kept is None or short <= shortfall(kept, now.jobs, order) else kept


def let_in(now: Moment, in_force: PlanInForce, index: int, rounds: int) -> tuple[Plan, bool]:
    """A plan with a covered place for the newcomer at `index` that breaks no promise, and True.

    If there is none: the plan of the others, and False. The newcomer comes in by the rank of its deadline or,
    if that fails, behind everybody else. While fragile jobs run, nobody may have to move for it at once.
    """
    order = now.can_be_kept()
    others = order[order != index]
    if index in order:
        plan = plan_anew(now, order, rounds)
        fits = shortfall(plan, now.jobs, order) == (0, 0)
        if fits and (now.calm(plan, order) is now or now.moves_nobody(plan)):
            return plan, True
    base, calm = keep_promises(now, in_force, others, rounds)
    if index not in order or shortfall(base, now.jobs, others)[0]:
        return base, False
    to_cover = order[base.covered[order] | (order == index)]
    for by_rank, moment in ((True, calm), (False, now), (False, calm)):
        if by_rank:
            plan = plan_anew(moment, order, rounds)
        else:
            plan = reserve_in_order(base, moment.jobs, np.array([index]))
        in_time = np.isfinite(plan.end_s[order]).all() and plan.covered[to_cover].all()
        if in_time and (calm is now or now.moves_nobody(plan)):
            return plan, True
    return base, False


def plan_the_late(now: Moment, plan: Plan, rounds: int) -> Plan:
    """Plan promises that cannot be kept any more for the earliest end that costs no other promise.

    The heaviest first, and among equals the one with the earliest deadline.
    """
    jobs = now.jobs
    late = np.flatnonzero(np.isfinite(jobs.last_s) & np.isinf(plan.end_s))
    for i in late[np.lexsort((jobs.last_s[late], -jobs.weight[late]))].tolist():
        end_s = earliest_promise(now, plan, i, rounds) + SLACK_S
        if math.isinf(end_s):
            continue
        jobs.last_s[i] = end_s
        kept = np.isfinite(plan.end_s)
        kept[i] = True
        order = np.argsort(jobs.last_s, kind="stable")
        order = order[kept[order]]
        anew = reserve_in_order(now.empty, jobs, order)
        behind = reserve_in_order(plan, jobs, np.array([i]))
        plan = anew if shortfall(anew, jobs, order) <= shortfall(behind, jobs, order) else behind
    return plan


def earliest_promise(now: Moment, plan: Plan, i: int, rounds: int) -> float:
    """About the earliest end that job i could be promised: behind all in the plan, or by rank if sooner."""
    cover_s, last_s = now.jobs.cover_s.copy(), now.jobs.last_s.copy()
    cover_s[i] = now.full_cover_s[i]  # with a later deadline it can have that
    jobs = now.jobs._replace(cover_s=cover_s, last_s=last_s)
    end_s = earliest_end(plan, jobs, i)
    promised = np.isfinite(plan.end_s)
    promised[i] = True
    too_early_s = max(float(last_s[i]), now.snapshot.now_s)
    for _ in range(rounds):
        last_s[i] = between_s = (too_early_s + end_s) / 2
        order = np.argsort(last_s, kind="stable")
        order = order[promised[order]]
        anew = reserve_in_order(now.empty, jobs, order)
        if shortfall(anew, jobs, order) == (0, 0):
            end_s = between_s
        else:
            too_early_s = between_s
    return end_s


@compiled
def _follow(steps: Steps, jobs: Jobs, i: int, cover_s: float) -> tuple[float, float, int]:
    """When job i ends if it follows these steps and stays on the last; its GPU-seconds; its highest level.

    The end is later by the work that the job would do on the highest of these shares in `cover_s`.
    """
    rates, gpus = jobs.rates[i], jobs.gpus[i]
    top = 0
    for share in steps.gpus:
        at = level_of(share)
        if at >= len(gpus) or gpus[at] != share:
            return np.inf, 0.0, 0  # its curve or the cluster changed: no legal share any more
        top = max(top, at)
    left, share, lag = jobs.work[i] + cover_s * rates[top], jobs.held[i], jobs.lag_s[i]
    spent = 0.0
    for s in range(len(steps.start_s)):
        start = steps.start_s[s]
        span = (steps.start_s[s + 1] if s + 1 < len(steps.start_s) else np.inf) - start
        if steps.gpus[s] != share:
            if start < jobs.still_s[i] and steps.gpus[s] > jobs.held[i]:
                return np.inf, 0.0, 0
            if steps.gpus[s] > 0:
                lag = max(lag, jobs.pause_s if share > 0 else jobs.start_s[i])
            share = steps.gpus[s]
        if share > 0:
            rate, run = rates[level_of(share)], span - lag
            if run > 0.0 and rate * run >= left:
                end = start + lag + left / rate
                return end, spent + share * (end - start), top
            spent += share * span
            left -= rate * max(run, 0.0)
        lag = max(lag - span, 0.0)
    return np.inf, spent, top


@compiled
def _is_free(times: FloatArray, free: IntArray, size: int, steps: Steps) -> bool:
    """Whether the steps, which begin on breakpoints, fit into what is free."""
    for b in range(size):
        for s in range(len(steps.start_s)):
            stop = steps.start_s[s + 1] if s + 1 < len(steps.start_s) else steps.end_s
            if steps.start_s[s] <= times[b] < stop and free[b] < steps.gpus[s]:
                return False
    return True


@compiled
def _rest(
    old: Plan, o: int, now_s: float, delay_s: float, held: int, out_s: FloatArray, out_gpus: IntArray
) -> int:
    """Write what is left of the steps of job o in an old plan, and return how many steps that are.

    The job keeps the `held` GPUs for `delay_s`, and later steps come later by that.
    """
    count = 0
    for s in range(old.first[o], old.last[o]):
        if s + 1 < old.last[o] and old.step_s[s + 1] <= now_s:
            continue  # over
        if count == 0 and delay_s > 0.0 and old.step_gpus[s] != held:
            out_s[0], out_gpus[0] = now_s, held
            count = 1
        out_s[count] = max(old.step_s[s], now_s) + delay_s if count > 0 else now_s
        out_gpus[count] = old.step_gpus[s]
        count += 1
    return count


@compiled
def carry_on(empty: Plan, jobs: Jobs, old: Plan, where: IntArray, order: IntArray, delay_s: float) -> Plan:
    """What is left of an earlier plan for the jobs in `order`; `where[i]` is job i's place there, or -1.

    A job that was stopped stays on its last share for longer, until it is covered again or at least done, if
    its deadline and the other reservations allow. If not, it has no place in the plan that comes out. With
    `delay_s` everybody keeps the present share for that time, and the rest of the plan comes later by that.
    """
    room = len(old.step_s) + 3 * len(order)
    now_s = empty.times[0]
    times, free, size = roomy(empty.times, room), roomy(empty.free, room), len(empty.times)
    step_s, step_gpus, used = np.empty(room), np.empty(room, np.int64), 0
    first, last = empty.first.copy(), empty.last.copy()
    ends, gpu_s, level = empty.end_s.copy(), empty.gpu_s.copy(), empty.level.copy()
    covered = empty.covered.copy()
    for i in order:
        o = where[i]
        if o < 0 or old.end_s[o] == np.inf:
            continue
        begin = used
        used += _rest(old, o, now_s, delay_s, jobs.held[i], step_s[used:], step_gpus[used:])
        end_s = max(old.end_s[o], now_s) + delay_s
        enough_s = _follow(Steps(step_s[begin:used], step_gpus[begin:used], end_s), jobs, i, jobs.cover_s[i])[
            0
        ]
        if enough_s < end_s - ROUNDING_S:
            end_s = enough_s
        while used - 1 > begin and step_s[used - 1] >= end_s:
            used -= 1
        steps = Steps(step_s[begin:used], step_gpus[begin:used], end_s)
        for start in steps.start_s:
            size = cut(times, free, size, start)
        if _follow(steps, jobs, i, 0.0)[0] <= jobs.last_s[i] and _is_free(times, free, size, steps):
            size = take(times, free, size, steps, 1)
            first[i], last[i], ends[i] = begin, used, steps.end_s
    # All reservations stand as they were. Those that have become too short are stretched, if that is free.
    for i in order:
        if ends[i] == np.inf:
            continue
        steps = Steps(step_s[first[i] : last[i]], step_gpus[first[i] : last[i]], ends[i])
        ends[i] = np.inf
        for cover_s in (jobs.cover_s[i], 0.0):
            end, spent, top = _follow(steps, jobs, i, cover_s)
            if end > jobs.last_s[i]:
                continue
            if end > steps.end_s + ROUNDING_S:
                more = Steps(np.array([steps.end_s]), steps.gpus[-1:], end)
                if not _is_free(times, free, size, more):
                    continue
                size = take(times, free, size, more, 1)
            else:
                end = steps.end_s
            ends[i], gpu_s[i], level[i], covered[i] = end, spent, top, cover_s == jobs.cover_s[i]
            break
        if ends[i] == np.inf:
            size = take(times, free, size, steps, -1)
            first[i], last[i] = 0, 0
    return Plan(
        times[:size], free[:size], step_s[:used], step_gpus[:used], first, last, ends, gpu_s, level, covered
    )
