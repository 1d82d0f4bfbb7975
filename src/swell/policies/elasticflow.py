"""ElasticFlow (ASPLOS'23): a deadline is guaranteed on admission, or the job is refused at once.

Every event plans anew. Jobs with deadlines reserve their *minimum satisfactory share* in order of deadline
(section 4.1); a newcomer comes in iff everybody's reservation still holds with its own; GPUs that are free
now go where a larger share costs the least extra GPU-time (section 4.2). Best-effort jobs live on those.

Where we differ from the paper:
- Plans are exact step functions of time rather than slots, and include what a resize costs.
- Progressive filling by deadline is a heuristic for real curves: it may fail though a plan exists. The plan
  in force is one, so it is remembered, and carried on where planning anew would break a promise. And a
  newcomer that cannot come in by its deadline's rank may still come in behind everybody else.
- A job whose promise was lost (with a node, say) goes before the best effort and stands in nobody's way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from swell.domain import IntArray
from swell.perf.curves import powers_of_two
from swell.policies._reservations import (
    Jobs,
    Plan,
    carry_over,
    earliest_end,
    next_step_s,
    nothing_reserved,
    reserve_in_order,
    spend_spare,
)
from swell.policies.base import ADMITTED, Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

SLACK_S = 1e-3
"""Reservations end this long before the deadline, so that rounding never decides over a promise."""


@dataclass(kw_only=True)
class ElasticFlow(Policy):
    """Guarantee deadlines first, then spend spare GPUs where they cost the least extra GPU-time."""

    name: ClassVar[str] = "elasticflow"
    paper: ClassVar[str] = "ElasticFlow, ASPLOS'23"
    goal: ClassVar[str] = "guaranteed deadlines: admit what can be met, refuse the rest at once"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = False

    overhead_s: float = -1.0
    """Planned cost of a resize; negative for what the cluster says it costs."""
    margin: float = 1.0
    """Unplanned pauses (migrations) to keep in reserve before each deadline, in resize costs."""
    rounds: int = 8
    """How often to plan again, with the unsatisfied in front, before giving up."""

    _plan: Plan | None = field(default=None, init=False, repr=False)
    _rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64), init=False, repr=False)
    """The table's rows of the jobs in the plan."""

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit a deadline job iff it and all those promised before can be satisfied."""
        deadline_s = float(snapshot.deadline_s[index])
        if math.isinf(deadline_s):
            return ADMITTED
        jobs, pause_s = self._jobs(snapshot)
        jobs.last_s[index] -= SLACK_S  # what comes in must not hang on rounding later
        order = _by_deadline(jobs, snapshot.now_s)
        plan, missed = self._search(snapshot, jobs, order, pause_s)
        if missed or index not in order:
            base = self._promises(snapshot, jobs, order[order != index], pause_s)
            squeezed = self._squeeze_in(snapshot, index, jobs, order, base, pause_s)
            if squeezed is None:
                return self._refuse(snapshot, index, jobs, base, pause_s)
            plan = squeezed
        self._plan, self._rows = plan, snapshot.rows
        return Admission(True, finish_s=deadline_s)

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Everybody's minimum satisfactory share of this moment, then the spare GPUs."""
        jobs, pause_s = self._jobs(snapshot)
        plan = self._promises(snapshot, jobs, _by_deadline(jobs, snapshot.now_s), pause_s)
        plan = self._least_late(snapshot, jobs, plan, pause_s)
        plan, gpus = spend_spare(jobs, plan, pause_s)
        self._plan, self._rows = plan, snapshot.rows
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next planned change of a share that is not simply a job's end."""
        plan = self._plan
        if plan is None:
            return math.inf
        return float(next_step_s(plan, np.isfinite(snapshot.deadline_s)))

    def _jobs(self, snapshot: Snapshot) -> tuple[Jobs, float]:
        """The snapshot in the planner's terms, and what a resize costs."""
        pause_s = snapshot.resize_cost_s if self.overhead_s < 0 else self.overhead_s
        counts = powers_of_two(min(snapshot.capacity, snapshot.curves.max_gpus))
        rates = np.zeros((len(snapshot), len(counts) + 1))
        legal = (counts >= snapshot.min_gpus[:, None]) & (counts <= snapshot.max_gpus[:, None])
        rates[:, 1:] = np.where(legal, snapshot.curves.rates[snapshot.curve[:, None], counts], 0.0)
        best = np.maximum.accumulate(rates, axis=1)
        better = np.zeros(rates.shape, dtype=bool)
        better[:, 1:] = best[:, 1:] > best[:, :-1]
        gpus = np.maximum.accumulate(np.where(better, np.append(0, counts), 0), axis=1)
        last_s = snapshot.deadline_s - SLACK_S
        return Jobs(
            work=snapshot.remaining,
            due_s=last_s - self.margin * pause_s - SLACK_S,
            last_s=last_s,
            held=snapshot.gpus,
            lag_s=np.maximum(snapshot.table.paused_until_s[snapshot.rows] - snapshot.now_s, 0.0),
            start_s=np.full(len(snapshot), max(snapshot.start_cost_s, pause_s)),
            rates=best,
            gpus=gpus,
        ), pause_s

    def _search(self, snapshot: Snapshot, jobs: Jobs, order: IntArray, pause_s: float) -> tuple[Plan, int]:
        """Reserve in this order; while that leaves some unsatisfied, try again with those in front."""
        empty = nothing_reserved(snapshot.now_s, snapshot.capacity, len(snapshot))
        best, fewest = reserve_in_order(empty, jobs, order, pause_s)
        plan = best
        for _ in range(self.rounds if fewest else 0):
            unsatisfied = np.isinf(plan.end_s[order])
            order = np.concatenate([order[unsatisfied], order[~unsatisfied]])
            plan, missed = reserve_in_order(empty, jobs, order, pause_s)
            if missed < fewest:
                best, fewest = plan, missed
            if not missed:
                break
        return best, fewest

    def _promises(self, snapshot: Snapshot, jobs: Jobs, order: IntArray, pause_s: float) -> Plan:
        """Reservations of the jobs in `order`: planned anew, or as before if that keeps more promises."""
        plan, missed = self._search(snapshot, jobs, order, pause_s)
        if missed and self._plan is not None:
            at = np.searchsorted(self._rows, snapshot.rows)
            at[at == len(self._rows)] = 0
            where = np.where(self._rows[at] == snapshot.rows, at, -1)
            kept = carry_over(snapshot.now_s, snapshot.capacity, jobs, self._plan, where, order, pause_s)
            kept, lost = reserve_in_order(kept, jobs, order[np.isinf(kept.end_s[order])], pause_s)
            if lost < missed:
                return kept
        return plan

    def _least_late(self, snapshot: Snapshot, jobs: Jobs, plan: Plan, pause_s: float) -> Plan:
        """Plan promises that cannot be kept any more for the earliest end that costs no other promise.

        It takes something nobody planned for to get here: a lost node, a migration, a curve that was wrong.
        """
        late = np.flatnonzero(np.isfinite(jobs.last_s) & np.isinf(plan.end_s))
        empty = nothing_reserved(snapshot.now_s, snapshot.capacity, len(snapshot))
        for i in late[np.argsort(jobs.last_s[late], kind="stable")].tolist():
            end_s = self._earliest_last_s(i, jobs, plan, empty, pause_s) + SLACK_S
            if math.isinf(end_s):
                continue
            jobs.due_s[i] = jobs.last_s[i] = end_s
            kept = np.isfinite(plan.end_s)
            kept[i] = True
            order = np.argsort(jobs.last_s, kind="stable")
            anew, missed = reserve_in_order(empty, jobs, order[kept[order]], pause_s)
            plan = reserve_in_order(plan, jobs, np.array([i]), pause_s)[0] if missed else anew
        return plan

    def _squeeze_in(
        self, snapshot: Snapshot, index: int, jobs: Jobs, order: IntArray, base: Plan, pause_s: float
    ) -> Plan | None:
        """A plan with the newcomer that keeps all that `base` keeps, or None."""
        if index not in order:
            return None
        kept = order[np.isfinite(base.end_s[order]) | (order == index)]
        if len(kept) < len(order):  # some are lost with or without it
            plan, missed = self._search(snapshot, jobs, kept, pause_s)
            if not missed:
                return plan
        plan, missed = reserve_in_order(base, jobs, np.array([index]), pause_s)
        return None if missed else plan

    def _refuse(self, snapshot: Snapshot, index: int, jobs: Jobs, base: Plan, pause_s: float) -> Admission:
        empty = nothing_reserved(snapshot.now_s, snapshot.capacity, len(snapshot))
        alone_s = earliest_end(empty, jobs, index, pause_s)
        if math.isinf(alone_s):
            return Admission(False, reason=f"it cannot run on any share of {snapshot.capacity} GPUs")
        if alone_s > jobs.last_s[index]:
            reason = (
                f"even alone on the cluster it needs {alone_s - snapshot.now_s:.0f} s, "
                f"and its deadline is in {snapshot.deadline_s[index] - snapshot.now_s:.0f} s"
            )
        else:
            promised = int(np.isfinite(base.end_s).sum())
            reason = f"promises to other jobs ({promised}) leave too few GPUs until its deadline"
        last_s = self._earliest_last_s(index, jobs, base, empty, pause_s)
        return Admission(False, earliest_deadline_s=last_s + 3 * SLACK_S, reason=reason)

    def _earliest_last_s(self, index: int, jobs: Jobs, base: Plan, empty: Plan, pause_s: float) -> float:
        """About the earliest end it could be promised: behind everybody, or by rank if that is sooner."""
        end_s = earliest_end(base, jobs, index, pause_s)
        promised = np.isfinite(base.end_s)
        promised[index] = True
        too_early_s = max(float(jobs.last_s[index]), float(empty.times[0]))
        for _ in range(self.rounds):
            between_s = (too_early_s + end_s) / 2
            jobs.last_s[index] = jobs.due_s[index] = between_s
            order = np.argsort(jobs.last_s, kind="stable")
            _, missed = reserve_in_order(empty, jobs, order[promised[order]], pause_s)
            if missed:
                too_early_s = between_s
            else:
                end_s = between_s
        return end_s


def _by_deadline(jobs: Jobs, now_s: float) -> IntArray:
    """The jobs with deadlines that are not lost anyway, earliest first."""
    promised = np.flatnonzero(np.isfinite(jobs.last_s))
    reachable = jobs.rates[promised, -1] * (jobs.last_s[promised] - now_s)
    alive = promised[(jobs.work[promised] <= reachable) & (reachable > 0)]
    return alive[np.argsort(jobs.last_s[alive], kind="stable")]
