"""tide: swell's own policy. Promises are kept, and everybody ends sooner. Ours; not in a paper.

Six ideas, explained with figures in docs/how/tide.md:

- *Prices.* A unit of a job's work is worth more the more jobs wait behind it. heSRPT (Berg et al., 2020)
  gives the exact prices if all jobs speed up alike, and they depend on the *rank* of a job by remaining work
  alone. A GPU goes where price times gain in speed is largest. Lengths that nobody says are guessed from
  ended jobs (`_lengths`).
- *Promises* are ElasticFlow's reservations with the plan in force (`_plan_in_force`). Spare GPUs go by price,
  to jobs with and without deadlines alike; a promised job takes them only if its reservation ends sooner.
- *Models.* A job that has not run yet is taken to be as fast as the jobs of its model before it
  (`_seen_models`), so it starts on the share that suits it.
- *Weights.* A job of weight w counts as w jobs, in prices and when promises have to be broken.
- *Not known yet.* On a live cluster a new script's speed and length are unknown. Such a job is taken to have
  as much work left as it has had, so it starts at once, and its rank falls the longer it stays unknown.
- *Changes cost.* A share other than the present one counts less by the part of the time ahead that the change
  would stop the job for, so a job stays where it is unless a change pays.

Shares are those that pack on nodes, in aligned blocks, so no job runs slower than its curve says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies._lengths import Lengths
from swell.policies._plan_in_force import Moment, PlanInForce, keep_promises, plan_the_late
from swell.policies._reservations import BoolArray, Jobs, Plan, spend_spare
from swell.policies._seen_models import SeenModels
from swell.policies._speed_errors import SpeedErrors
from swell.policies._tide import (
    FIRST_GPUS,
    legal_sizes,
    lend,
    odd_shares,
    one_gpu_rates,
    prices,
    run_beside,
    share_out,
    values,
)
from swell.policies.base import Decision, Knowledge, PlacerName
from swell.policies.elasticflow import ElasticFlow
from swell.policies.snapshot import Snapshot

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
