"""The simulator: a virtual clock around the very policies and placers that decide on live clusters.

It is event-driven. A job's numbers are kept as of its last change and are brought up to date only when it
changes again, so an event costs what it touches. The events are: a job is submitted, a job's present segment
(see `truth`) ends, a node is lost or comes back, a policy's round or wake-up is due. After all events of one
moment the policy is asked once, unless it decides in rounds.

Deterministic: the same jobs, profiles, cluster, policy and seed give the same result.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swell.domain import Cluster, Event, EventKind, FloatArray, InputError, JobSpec, Placement
from swell.perf.profiles import ProfileSet
from swell.placement import Placer, make_placer
from swell.policies import Decision, JobTable, Policy, Snapshot, make_policy
from swell.sim.costs import ConstantCost, ResizeCost
from swell.sim.explore import Exploration
from swell.sim.metrics import Result
from swell.sim.world import World

EventSink = Callable[[Event], None]
ProgressSink = Callable[[float, int, int], None]
"""Called now and then with simulated seconds, jobs ended, jobs in all."""

_PROGRESS_EVERY = 256
_LEAST_WAIT_S = 1e-3
"""A policy is not woken again in the same moment, whatever it asks: rounding may make it ask for that."""
_IDLE_ROUNDS = 100
"""A policy that lets this many rounds pass while no job runs and none is to come will never start one."""


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node that is lost at a moment, and comes back after `repair_s` (never, if infinite)."""

    node: int
    at_s: float
    repair_s: float = math.inf


def simulate(
    jobs: Sequence[JobSpec],
    profiles: ProfileSet,
    cluster: Cluster,
    policy: str | Policy,
    *,
    interval_s: float | None = None,
    resize_cost: ResizeCost | float = 0.0,
    seed: int = 0,
    belief: str | None = None,
    failures: Sequence[NodeFailure] = (),
    explore: Exploration | None = None,
    planned_cost: ResizeCost | None = None,
    on_event: EventSink | None = None,
    on_progress: ProgressSink | None = None,
) -> Result:
    """Run the jobs on the cluster under the policy and report what became of them.

    Args:
        interval_s: length of the rounds; None for the policy's own, or at once if it has none.
        belief: 'profiles' or 'fitted' to override what the policy is told of the jobs' speed.
        explore: have jobs grow only as they become known, as on a live cluster.
        planned_cost: what policies are told that changes cost, if not the truth.
    """
    if not jobs:
        raise InputError("nothing to simulate: the trace has no jobs", field="trace")
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    if hasattr(chosen, "seed") and seed:
        chosen.seed = seed
    cost = ConstantCost(float(resize_cost)) if isinstance(resize_cost, int | float) else resize_cost
    ordered = sorted(jobs, key=lambda job: job.submit_s)
    world = World(ordered, profiles, cluster, chosen, belief)
    engine = _Engine(world, chosen, cluster, interval_s, cost, failures, explore, on_event, on_progress)
    if planned_cost is not None:
        engine.plan_with(planned_cost)
    started = time.process_time()
    engine.run()
    result = engine.result()
    result.cpu_s = time.process_time() - started
    return result


class _Engine:
    """One run. State of jobs lives in the world's table; here are the clock, the agenda and the books."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        cluster: Cluster,
        interval_s: float | None,
        cost: ResizeCost,
        failures: Sequence[NodeFailure],
        explore: Exploration | None,
        on_event: EventSink | None,
        on_progress: ProgressSink | None,
    ) -> None:
        self.world = world
        self.table: JobTable = world.table
        self.policy = policy
        self.cluster = cluster
        self.placer: Placer = make_placer(policy.placer, cluster)
        self.interval_s = policy.interval_s if interval_s is None else interval_s
        self.cost = cost
        self.explore = explore
        self.on_event = on_event
        self.on_progress = on_progress
        self.has_admission = type(policy).admit is not Policy.admit
        self.plan_with(cost)

        n = len(self.table)
        self.now_s = float(self.table.submit_s[0])
        self.active = np.empty(n, dtype=np.int64)
        self.active_count = 0
        self.next_job = 0
        self.ended = 0
        self.decide_at_s = math.inf
        self.idle_rounds = 0
        self.segments: list[tuple[float, int, int]] = []  # (ends at, row, stamp)
        self.stamp = [0] * n
        self.failures = sorted(
            [(f.at_s, False, f.node) for f in failures]
            + [(f.at_s + f.repair_s, True, f.node) for f in failures if math.isfinite(f.repair_s)]
        )

        self.finish_s: FloatArray = np.full(n, np.nan)
        self.promised_s: FloatArray = np.full(n, np.nan)
        self.rejected = np.zeros(n, dtype=np.int64)
        self.decision_s: list[float] = []
        self.started_at_s = self.now_s
        self.active_integral = 0.0
        """Integral over time of the number of active jobs, for finish-time fairness."""
        self.active_integral_at_submit = np.zeros(n)
        self.mean_active = np.full(n, np.nan)
        self.capacity_gpu_s = 0.0
        self.gpu_s = 0.0
        self.stalled = False

    def plan_with(self, cost: ResizeCost) -> None:
        """Say what policies shall reckon a change to cost; it also waits for the next round."""
        round_s, typical = self.interval_s or 0.0, self.world.typical_state_bytes
        self.resize_cost_s = cost.seconds(typical, 1, 2) + round_s
        self.start_cost_s = cost.seconds(typical, 0, 1) + round_s

    # -- the clock ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events in order of time until every job has ended or none can go on."""
        n = len(self.table)
        turns = 0
        while self.ended < n:
            at_s = self._next_event_s()
            if at_s == math.inf:
                self.stalled = True
                break
            self._pass_time(at_s)
            self._submissions()
            self._segment_ends()
            self._node_changes()
            if self.decide_at_s <= self.now_s:
                self._decide()
            turns += 1
            if self.on_progress is not None and turns % _PROGRESS_EVERY == 0:
                self.on_progress(self.now_s - self.started_at_s, self.ended, n)
        if self.on_progress is not None:
            self.on_progress(self.now_s - self.started_at_s, self.ended, n)

    def _next_event_s(self) -> float:
        at_s = self.decide_at_s
        if self.next_job < len(self.table):
            at_s = min(at_s, self.table.submit_s[self.next_job])
        while self.segments and self.stamp[self.segments[0][1]] != self.segments[0][2]:
            heapq.heappop(self.segments)
        if self.segments:
            at_s = min(at_s, self.segments[0][0])
        if self.failures and (self.active_count or self.next_job < len(self.table)):
            at_s = min(at_s, self.failures[0][0])
        return float(at_s)

    def _pass_time(self, at_s: float) -> None:
        dt = at_s - self.now_s
        self.active_integral += dt * self.active_count
        self.capacity_gpu_s += dt * self.cluster.capacity
        self.now_s = at_s

    def _ask(self) -> None:
        """Something happened: let the policy decide, now or at the next round."""
        if self.interval_s:
            at_s = math.ceil(self.now_s / self.interval_s - 1e-9) * self.interval_s
        else:
            at_s = self.now_s
        self.decide_at_s = min(self.decide_at_s, at_s)

    # -- events ------------------------------------------------------------------------------------------

    def _submissions(self) -> None:
        table = self.table
        while self.next_job < len(table) and table.submit_s[self.next_job] <= self.now_s:
            row = self.next_job
            self.next_job += 1
            spec = table.specs[row]
            self.active[self.active_count] = row
            self.active_count += 1
            self.active_integral_at_submit[row] = self.active_integral
            self._emit(
                EventKind.SUBMITTED,
                row,
                model=spec.model,
                batch_size=spec.batch_size,
                gpus=spec.gpus,
                work=spec.work,
                deadline_s=spec.deadline_s,
            )
            if self.has_admission:
                snapshot, index = self._snapshot(), self.active_count - 1
                answer = self.policy.admit(snapshot, index)
                if not answer.admitted:
                    self.rejected[row] = 1
                    self._leave(row)
                    self._emit(
                        EventKind.REJECTED,
                        row,
                        reason=answer.reason,
                        earliest_deadline_s=answer.earliest_deadline_s,
                    )
                    continue
                self.policy.accepted(snapshot, index, answer)
                if answer.finish_s is not None:
                    self.promised_s[row] = answer.finish_s
                self._emit(EventKind.ADMITTED, row, finish_s=answer.finish_s)
            else:
                self._emit(EventKind.ADMITTED, row)
            self._ask()

    def _segment_ends(self) -> None:
        while self.segments and self.segments[0][0] <= self.now_s:
            _, row, stamp = heapq.heappop(self.segments)
            if self.stamp[row] != stamp:
                continue
            self._settle(row)
            if self.world.segment_over(row):
                self._finish(row)
            else:
                self._start_segment(row)

    def _node_changes(self) -> None:
        while self.failures and self.failures[0][0] <= self.now_s:
            _, up, index = self.failures.pop(0)
            node = self.cluster.nodes[index]
            if node.up == up:
                continue
            self.cluster = self.cluster.with_node(index, up=up)
            kind = EventKind.NODE_JOINED if up else EventKind.NODE_LOST
            if self.on_event is not None:
                self.on_event(Event(self.now_s, kind, node=node.name, data={"gpus": node.gpus}))
            hurt = self.placer.set_cluster(self.cluster, keep_survivors=True)
            for row, survivors in hurt.items():
                self.world.node_counts_differ(row, None)
                self._move(row, survivors, reason=f"node {node.name} was lost")
            self.decide_at_s = self.now_s  # a loss is not kept waiting for the next round

    # -- decisions ---------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self.now_s,
            self.cluster,
            self.table,
            self.active[: self.active_count].copy(),
            self.world.curves,
            self.resize_cost_s,
            self.start_cost_s,
        )

    def _decide(self) -> None:
        self.decide_at_s = math.inf
        if not self.active_count:
            return
        if self.world.learns:
            self._replan_batches()
        self._explore()
        snapshot = self._snapshot()
        started = time.perf_counter()
        decision = self.policy.allocate(snapshot)
        self.decision_s.append(time.perf_counter() - started)
        self._carry_out(snapshot, decision)
        known_s = self._explore()
        wake_s = self.policy.next_wakeup_s(snapshot, decision)
        if self.interval_s:
            if self.policy.changes_with_time:
                wake_s = self.now_s + self.interval_s
            elif wake_s < math.inf:
                wake_s = max(math.ceil(wake_s / self.interval_s - 1e-9), 1) * self.interval_s
                wake_s = max(wake_s, self.now_s + self.interval_s)
        wake_s = max(wake_s, self.now_s + _LEAST_WAIT_S)
        alive = self.segments or self.next_job < len(self.table) or self.failures
        self.idle_rounds = 0 if alive else self.idle_rounds + 1
        self.decide_at_s = min(wake_s, known_s) if self.idle_rounds < _IDLE_ROUNDS else math.inf

    def _explore(self) -> float:
        """Bound the jobs by what is known of them; returns when the next bound may rise."""
        if self.explore is None:
            return math.inf
        return self.explore.bound(self.table, self.active[: self.active_count], self.now_s)

    def _replan_batches(self) -> None:
        """Agents that learnt something since they chose their batch size choose again."""
        for row in self.active[: self.active_count]:
            if self.table.gpus[row] and self.world.wants_new_plan(int(row)):
                self._settle(int(row))
                self._start_segment(int(row), new_plan=True)

    def _carry_out(self, snapshot: Snapshot, decision: Decision) -> None:
        rows, wanted = snapshot.rows, decision.gpus
        if decision.per_node is not None:
            changes = {
                int(rows[i]): decision.per_node[i]
                for i in range(len(rows))
                if self.world.node_counts_differ(int(rows[i]), decision.per_node[i])
            }
            moved = self.placer.place_per_node(changes) if changes else {}
        else:
            changed = np.flatnonzero(wanted != snapshot.gpus)
            if not len(changed):
                return
            if decision.order is not None:
                rank = np.empty(len(rows), dtype=np.int64)
                rank[decision.order] = np.arange(len(rows))
                changed = changed[np.argsort(rank[changed], kind="stable")]
            moved = self.placer.place({int(rows[i]): int(wanted[i]) for i in changed})
        for row, placement in moved.items():
            self._move(row, placement)

    def _move(self, row: int, placement: Placement, reason: str | None = None) -> None:
        """Put a job on other GPUs, or take all of them away."""
        table, before = self.table, self.table.placement[row]
        if placement == before:
            return
        self._settle(row)
        why = {} if reason is None else {"reason": reason}
        table.placement[row] = placement
        table.gpus[row] = len(placement)
        if not placement:
            table.rate[row] = 0.0
            self.stamp[row] += 1
            self._emit(EventKind.PREEMPTED, row, before=before, **why)
            return
        pause_s = self.cost.seconds(self.world.state_bytes(row), len(before), len(placement))
        # A resize during start-up does not cut it short.
        table.paused_until_s[row] = max(float(table.paused_until_s[row]), self.now_s + pause_s)
        if math.isinf(table.first_start_s[row]):
            table.first_start_s[row] = self.now_s
        else:
            table.resizes[row] += 1
        if not before:
            table.last_start_s[row] = self.now_s
        self._start_segment(row, new_plan=True)
        if self.on_event is not None:
            if before:
                self._emit(EventKind.RESIZED, row, gpus=placement, before=before, pause_s=pause_s, **why)
            else:
                self._emit(EventKind.ALLOCATED, row, gpus=placement, pause_s=pause_s)

    # -- jobs --------------------------------------------------------------------------------------------

    def _settle(self, row: int) -> None:
        """Bring a job's numbers up to now."""
        table, now_s = self.table, self.now_s
        gpus = int(table.gpus[row])
        since_s = float(table.since_s[row])
        if gpus and now_s > since_s:
            held_s = now_s - since_s
            ran_s = now_s - max(since_s, float(table.paused_until_s[row]))
            if ran_s > 0:
                table.left[row] = max(table.left[row] - table.rate[row] * ran_s, 0.0)
                self.world.advance(row, ran_s)
            table.attained_gpu_s[row] += gpus * held_s
            table.run_s[row] += held_s
            self.gpu_s += gpus * held_s
        table.since_s[row] = now_s

    def _start_segment(self, row: int, new_plan: bool = False) -> None:
        speed, togo = self.world.start_segment(row, self.cluster, new_plan)
        self.stamp[row] += 1
        if speed > 0:
            begins_s = max(self.now_s, float(self.table.paused_until_s[row]))
            heapq.heappush(self.segments, (begins_s + togo / speed, row, self.stamp[row]))

    def _finish(self, row: int) -> None:
        table = self.table
        self.finish_s[row] = self.now_s
        table.left[row] = 0.0
        table.gpus[row] = 0
        table.rate[row] = 0.0
        table.placement[row] = ()
        self.stamp[row] += 1
        self.placer.place({row: 0})
        self.world.node_counts_differ(row, None)
        self._leave(row)
        if self.on_event is not None:
            deadline_s = table.deadline_s[row]
            met = None if math.isinf(deadline_s) else bool(self.now_s <= deadline_s)
            self._emit(EventKind.FINISHED, row, jct_s=self.now_s - table.submit_s[row], met=met)
        self._ask()

    def _leave(self, row: int) -> None:
        """The job is active no more."""
        active = self.active[: self.active_count]
        index = int(np.searchsorted(active, row))
        self.active[index : self.active_count - 1] = active[index + 1 :].copy()
        self.active_count -= 1
        self.ended += 1
        lived_s = self.now_s - self.table.submit_s[row]
        if lived_s > 0:
            self.mean_active[row] = (self.active_integral - self.active_integral_at_submit[row]) / lived_s

    def _emit(self, kind: EventKind, row: int, **data: Any) -> None:
        if self.on_event is not None:
            values = {k: (float(v) if isinstance(v, np.floating) else v) for k, v in data.items()}
            self.on_event(Event(self.now_s, kind, job_id=self.table.specs[row].job_id, data=values))

    def result(self) -> Result:
        """The books of the run."""
        table = self.table
        return Result(
            policy=self.policy.name,
            cluster=str(self.cluster),
            belief=self.world.belief_shown,
            job_ids=[spec.job_id for spec in table.specs],
            submit_s=table.submit_s,
            deadline_s=table.deadline_s,
            finish_s=self.finish_s,
            promised_s=self.promised_s,
            rejected=self.rejected,
            rho=self.world.fairness(self.finish_s - table.submit_s, self.mean_active),
            job_resizes=table.resizes,
            gpu_seconds=self.gpu_s,
            capacity_gpu_seconds=self.capacity_gpu_s,
            decision_s=self.decision_s,
            stalled=self.stalled,
        )
