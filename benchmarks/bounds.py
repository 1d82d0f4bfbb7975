"""What no scheduler can beat, for the comparisons of `benchmarks.tide` and `benchmarks.tournament`.

Lower bound on the average JCT, the largest of three:

- *alone*: every job has the whole cluster to itself from its submission on;
- *pooled*: the cluster is one machine that does every job's work at the job's best efficiency, split among
  jobs at will, and serves the job with the least left first (SRPT, which is optimal on one machine);
- *both*: on that machine a job's work is done, on average, at some moment M; no job can do its work faster
  than alone, so it ends half of its time alone after M or later. The sum of all M is least if the machine
  always serves the job with the least work in all (preemptive, Goemans 1997). So the sum of M and half of
  the times alone is a bound as well, and often the largest.

Upper bound on deadlines met: a linear program over time. Job j, or a fraction of it, must be given in its
window the least GPU-seconds with which it can end in time (tight windows need larger, less efficient shares),
never more GPUs at once than it can use; what jobs are given at any moment must fit on the cluster.

Every scheduler pays at least one start of a job, `start_s`. Failures and wrong beliefs are left out of the
bounds: they only make things worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from swell.domain import Cluster, FloatArray, JobSpec, packed_shape
from swell.perf.efficiency import gain
from swell.perf.goodput import candidates
from swell.perf.profiles import Profile, ProfileSet

WIDEST = 512
"""The simulator gives no job more GPUs than this, so the bounds need not either."""
MOST_SLOTS = 120
"""Time is cut at submissions and deadlines, and coarser if there are more; then the bound is only looser."""


@dataclass(frozen=True)
class Need:
    """What a job needs at least."""

    submit_s: float
    deadline_s: float
    alone_s: float
    """Seconds on the share on which it is fastest."""
    gpu_s: float
    """GPU-seconds on the share on which it is most efficient."""
    rates: FloatArray | None
    """Work per second by GPUs; None for a job that adapts its batch."""
    work: float


def needs(
    jobs: Sequence[JobSpec], profiles: ProfileSet, cluster: Cluster, *, adaptive: bool = False
) -> list[Need]:
    """What each job needs; with `adaptive`, if it always chose the best batch for the moment."""
    kind = max(cluster.gpu_types, key=lambda k: sum(n.gpus for n in cluster.nodes if n.gpu_type == k))
    per_node = max(node.gpus for node in cluster.nodes)
    found, width = [], min(cluster.capacity, WIDEST)
    known: dict[tuple[str, int, int], tuple[FloatArray, float, float]] = {}
    for job in jobs:
        profile = profiles.get(job.model)
        deadline_s = math.inf if job.deadline_s is None else job.deadline_s
        if adaptive:
            alone_s, gpu_s = _best_course(profile, cluster.capacity, per_node, profile.resolve(kind))
            found.append(Need(job.submit_s, deadline_s, alone_s, gpu_s, None, 0.0))
            continue
        most = min(width, job.max_gpus or width, profile.max_gpus or width)
        key = (job.model, job.batch_size, most)
        if key not in known:
            rates = profile.curve(job.batch_size, width, per_node, profile.resolve(kind))[: most + 1]
            per_gpu = rates[1:] / np.arange(1, len(rates))
            known[key] = rates, float(rates.max()), float(per_gpu.max())
        rates, fastest, thriftiest = known[key]
        work = profile.iterations(job.batch_size, -1) if job.work is None else job.work
        found.append(Need(job.submit_s, deadline_s, work / fastest, work / thriftiest, rates, work))
    return found


@lru_cache
def _best_course(profile: Profile, capacity: int, per_node: int, kind: str) -> tuple[float, float]:
    """Least seconds, and least GPU-seconds, through all epochs, with the best legal batch in each."""
    epochs, limits = profile.epochs, profile.limits
    assert epochs is not None
    progress = np.diff(epochs.progress, prepend=0.0)
    best = np.zeros((capacity + 1, len(progress)))
    plans = candidates(limits, capacity, profile.pinned_batch)
    stats: dict[int, list[tuple[float, float]]] = {}
    for gpus in range(1, capacity + 1):
        for p in range(plans.first[gpus], plans.first[gpus + 1]):
            local, accumulation = int(plans.local_batch[p]), int(plans.accumulation[p])
            step_s, sync_s = profile.step_time(packed_shape(gpus, per_node), local, kind)
            batch = gpus * local * (accumulation + 1)
            if batch not in stats:
                stats[batch] = [profile.grad_stats(batch, e) for e in range(len(progress))]
            sqr, var = np.array(stats[batch]).T
            speed = gain(sqr, var, batch / limits.init_batch) / (step_s + accumulation * (step_s - sync_s))
            best[gpus] = np.maximum(best[gpus], speed)
    per_gpu = best[1:] / np.arange(1, capacity + 1)[:, None]
    return float((progress / best.max(axis=0)).sum()), float((progress / per_gpu.max(axis=0)).sum())


def least_jct_s(needed: Sequence[Need], capacity: int, start_s: float = 0.0) -> dict[str, float]:
    """Lower bounds on the average JCT by name; 'bound' is the largest of them."""
    submit_s = np.array([need.submit_s for need in needed])
    alone_s = np.array([need.alone_s for need in needed])
    pooled_s = np.array([need.gpu_s for need in needed]) / capacity
    ends_s, _ = _one_machine(submit_s, pooled_s, by_total=False)
    _, middles_s = _one_machine(submit_s, pooled_s, by_total=True)
    found = {
        "alone": start_s + float(alone_s.mean()),
        "pooled": start_s + float((ends_s - submit_s).mean()),
        "both": start_s + float((middles_s + alone_s / 2 - submit_s).mean()),
    }
    return found | {"bound": max(found.values())}


def _one_machine(
    submit_s: FloatArray, work_s: FloatArray, *, by_total: bool
) -> tuple[FloatArray, FloatArray]:
    """When each job ends on one machine, and the mean moment of its work.

    The job with the least work goes first, in all (`by_total`) or still left; newcomers may interrupt.
    """
    order = np.argsort(submit_s, kind="stable").tolist()
    submitted_s, work = submit_s.tolist(), work_s.tolist()
    left_s, ends_s, moments = list(work), [0.0] * len(work), [0.0] * len(work)
    heap: list[tuple[float, int]] = []
    now_s, coming = 0.0, 0
    while coming < len(order) or heap:
        if not heap:
            now_s = max(now_s, submitted_s[order[coming]])
        while coming < len(order) and submitted_s[order[coming]] <= now_s:
            i = order[coming]
            heappush(heap, (work[i], i))
            coming += 1
        _, i = heappop(heap)
        next_s = submitted_s[order[coming]] if coming < len(order) else math.inf
        # Served and left are counted apart from the clock: little work may be less than the clock can show.
        ends = now_s + left_s[i] <= next_s
        served_s = left_s[i] if ends else next_s - now_s
        moments[i] += served_s * (now_s + served_s / 2)
        left_s[i] -= served_s
        now_s = now_s + served_s if ends else next_s
        if left_s[i] <= 1e-9 * work[i]:
            ends_s[i] = now_s
        else:
            heappush(heap, (work[i] if by_total else left_s[i], i))
    return np.array(ends_s), np.array(moments) / work_s


def least_gpu_s(need: Need, window_s: float) -> float:
    """The least GPU-seconds with which a job ends within so many seconds; infinite if it cannot."""
    assert need.rates is not None
    if window_s <= 0 or need.work / need.rates.max() > window_s * (1 + 1e-9):
        return math.inf
    rate = need.work / window_s
    hull = [(0.0, 0.0)]  # the lower convex hull of (rate, GPUs): time may be split between shares
    for gpus in range(1, len(need.rates)):
        point = (float(need.rates[gpus]), float(gpus))
        if point[0] <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    xs, ys = zip(*hull)
    return float(np.interp(rate, xs, ys)) * window_s


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def most_deadlines(needed: Sequence[Need], capacity: int, start_s: float = 0.0) -> float:
    """An upper bound on the part of the deadlines that any scheduler can meet."""
    hurried = [need for need in needed if math.isfinite(need.deadline_s)]
    if not hurried:
        return math.nan
    costs = [least_gpu_s(need, need.deadline_s - need.submit_s - start_s) for need in hurried]
    able = [(need, cost) for need, cost in zip(hurried, costs, strict=True) if math.isfinite(cost)]
    if not able:
        return 0.0
    edges = np.unique([t for need, _ in able for t in (need.submit_s, need.deadline_s)])
    if len(edges) > MOST_SLOTS:
        edges = np.unique(np.quantile(edges, np.linspace(0, 1, MOST_SLOTS)))
    n, slots = len(able), len(edges) - 1
    rows, columns, values, bounds, kinds = [], [], [], [], n
    limit = [float(capacity * (edges[t + 1] - edges[t])) for t in range(slots)]
    # Constraints: 0 to slots - 1 are the cluster's room in each slot; then one per job (it gets enough).
    for j, (need, cost) in enumerate(able):
        assert need.rates is not None
        widest = int(np.argmax(need.rates))
        rows.append(slots + j), columns.append(j), values.append(cost)
        for t in range(slots):
            inside_s = min(edges[t + 1], need.deadline_s) - max(edges[t], need.submit_s)
            if inside_s <= 0:
                continue
            rows += [t, slots + j]
            columns += [kinds, kinds]
            values += [1.0, -1.0]
            bounds.append((0.0, widest * inside_s))
            kinds += 1
    scale = float(np.mean(limit))
    matrix = coo_array((np.array(values) / scale, (rows, columns)), shape=(slots + n, kinds)).tocsr()
    right = np.concatenate([np.array(limit), np.zeros(n)]) / scale
    goal = np.concatenate([-np.ones(n), np.zeros(kinds - n)])
    solved = linprog(goal, A_ub=matrix, b_ub=right, bounds=[(0.0, 1.0)] * n + bounds, method="highs")
    if solved.status != 0:
        return n / len(hurried)
    return math.floor(-solved.fun + 1e-6) / len(hurried)
