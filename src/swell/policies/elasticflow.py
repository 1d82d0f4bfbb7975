"""ElasticFlow (ASPLOS'23): a deadline is guaranteed on admission, or the job is refused at once.

Every event plans anew. Jobs with deadlines reserve their *minimum satisfactory share* in order of deadline
(section 4.1, `reserve_in_order`); a newcomer comes in iff everybody's reservation still holds with its own;
GPUs that are free now go where a larger share costs the least extra GPU-time (section 4.2, `spend_spare`).
Best-effort jobs live on those.

Where we differ from the paper:
- Plans are exact step functions of time rather than slots, and include what a resize costs.
- Planning in order of deadline may fail though a plan exists, and pauses happen that nobody planned. What
  keeps promises all the same is in `_plan_in_force`.
- A newcomer that cannot come in by its deadline's rank may still come in behind everybody else.
- A job whose promise was lost (with a node, say) goes before the best effort and stands in nobody's way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np

from swell.domain import IntArray
from swell.policies._plan_in_force import (
    SLACK_S,
    Moment,
    PlanInForce,
    earliest_promise,
    keep_promises,
    let_in,
    plan_anew,
    plan_the_late,
    shortfall,
)
from swell.policies._reservations import Jobs, Plan, next_step_s, shares_by_level, spend_spare
from swell.policies.base import ADMITTED, Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot


@dataclass(kw_only=True)
class ElasticFlow(Policy):
    """Guarantee deadlines first, then spend spare GPUs where they cost the least extra GPU-time."""

    name: ClassVar[str] = "elasticflow"
    paper: ClassVar[str] = "ElasticFlow, ASPLOS'23"
    goal: ClassVar[str] = "guaranteed deadlines: admit what can be met, refuse the rest at once"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "buddy"
    changes_with_time: ClassVar[bool] = False
    serves: ClassVar[str] = "promised jobs first, then those that need the least GPU-time"

    overhead_s: float = -1.0
    """Planned cost of a resize; negative for what the cluster says it costs."""
    margin: float = 1.0
    """The stop that nobody planned (a migration) which a promise must survive, in resize costs."""
    rounds: int = 8
    """How often to plan again, with the unsatisfied in front, before giving up."""

    _in_force: PlanInForce = field(default_factory=PlanInForce, init=False, repr=False)

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit a deadline job iff it and all those promised before can be satisfied."""
        deadline_s = float(snapshot.deadline_s[index])
        if math.isinf(deadline_s):
            return ADMITTED
        now = self._moment(snapshot, newcomer=index)
        plan, comes_in = let_in(now, self._in_force, index, self.rounds)
        if not comes_in:
            return self._refuse(now, index, plan)
        return Admission(True, finish_s=deadline_s, plan=plan)

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """The plan that was found for the newcomer is in force from now on."""
        if admission.plan is not None:
            self._in_force = PlanInForce(cast(Plan, admission.plan), snapshot.numbers)

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Everybody's minimum satisfactory share of this moment, then the spare GPUs."""
        now = self._moment(snapshot)
        plan, calm = keep_promises(now, self._in_force, now.can_be_kept(), self.rounds)
        plan = plan_the_late(calm, plan, self.rounds)
        plan, decision = calm.spend(plan, spend_spare)
        self._in_force = PlanInForce(plan, snapshot.numbers)
        return decision

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Promised jobs that no plan that is found here ends in time."""
        now = self._moment(snapshot)
        plan, _ = keep_promises(now, self._in_force, now.can_be_kept(), self.rounds)
        return np.flatnonzero(np.isfinite(snapshot.deadline_s) & np.isinf(plan.end_s))

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next planned change of a share that is not simply a job's end."""
        plan = self._in_force.plan
        if plan is None:
            return math.inf
        return float(next_step_s(plan, np.isfinite(snapshot.deadline_s)))

    def weight_lost(self, snapshot: Snapshot) -> float:
        """The weight of the jobs whose deadlines no plan was found for, if all are planned anew."""
        now = self._moment(snapshot)
        order = now.can_be_kept()
        hopeless = np.isfinite(snapshot.deadline_s)
        hopeless[order] = False
        unplaced, _ = shortfall(plan_anew(now, order, self.rounds), now.jobs, order)
        return float(snapshot.weight[hopeless].sum()) + unplaced

    def _moment(self, snapshot: Snapshot, newcomer: int | None = None) -> Moment:
        """The snapshot in the planner's terms."""
        pause_s = snapshot.resize_cost_s if self.overhead_s < 0 else self.overhead_s
        curves = snapshot.curves
        most = min(snapshot.widest, curves.max_gpus)
        bounds = np.minimum(snapshot.table.max_gpus[snapshot.rows], most)
        rates, gpus = shares_by_level(curves.rates, snapshot.curve, snapshot.min_gpus, bounds, most)
        last_s = snapshot.deadline_s - SLACK_S
        if newcomer is not None:
            last_s[newcomer] -= SLACK_S  # what comes in must not hang on rounding later
        jobs = Jobs(
            work=snapshot.remaining,
            last_s=last_s,
            weight=snapshot.weight,
            held=snapshot.gpus,
            lag_s=np.maximum(snapshot.table.paused_until_s[snapshot.rows] - snapshot.now_s, 0.0),
            start_s=np.full(len(snapshot), max(snapshot.start_cost_s, pause_s)),
            rates=rates,
            gpus=gpus,
            cover_s=np.full(len(snapshot), self.margin * pause_s),
            still_s=np.full(len(snapshot), snapshot.now_s),
            pause_s=float(pause_s),
        )
        return Moment.of(snapshot, jobs)

    def _refuse(self, now: Moment, index: int, others: Plan) -> Admission:
        """Why the newcomer cannot come in, and by which deadline it could."""
        order = now.can_be_kept()
        unplaced = int(np.isinf(others.end_s[order[order != index]]).sum())
        snapshot, last_s = now.snapshot, float(now.jobs.last_s[index])
        if math.isinf(now.alone_s[index]):
            return Admission(False, reason=f"it cannot run on any share of {snapshot.widest} GPUs")
        if unplaced:
            return Admission(False, reason=f"promises to other jobs ({unplaced}) are in danger")
        if now.alone_s[index] > last_s:
            beside = " beside what is reserved" if len(snapshot.ahead.times) > 1 or snapshot.lent else ""
            reason = (
                f"even alone on the cluster{beside} it needs {now.alone_s[index] - snapshot.now_s:.0f} s, "
                f"and its deadline is in {snapshot.deadline_s[index] - snapshot.now_s:.0f} s"
            )
        else:
            promised = int(np.isfinite(others.end_s).sum())
            reason = f"promises to other jobs ({promised}) leave too few GPUs until its deadline"
        earliest_s = earliest_promise(now.calm(others, order[order != index]), others, index, self.rounds)
        return Admission(False, earliest_deadline_s=earliest_s + 3 * SLACK_S, reason=reason)
