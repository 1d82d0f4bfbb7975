"""The dynamic programme of OASiS: it finds the schedule of one job with the largest utility minus cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled


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
