"""The simulator: a virtual clock around the same policies and placers that decide on live clusters.

It is event-driven. A job's row in the table holds its state as of the job's last change and is brought up to
date only when the job changes again, so an event costs no more than the jobs it affects. The events are: a
job is submitted, a job's present segment (see `truth`) ends, a node is lost or comes back, a policy's round
or wake-up is due. After all events of one moment the policy decides once, unless it decides in rounds.

The simulator is deterministic: the same jobs, profiles, cluster, policy and seed give the same result.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from swell.board import Board, Move, Rhythm
from swell.domain import (
    NO_RESERVATIONS,
    NO_TEAMS,
    OTHERS,
    Calendar,
    Cluster,
    Event,
    EventKind,
    FloatArray,
    InputError,
    IntArray,
    JobSpec,
    Teams,
)
from swell.perf.profiles import ProfileSet
from swell.policies import Decision, Policy, Snapshot, make_policy
from swell.policies.base import gives_promises
from swell.policies.by_team import ByTeam, by_team
from swell.policies.by_type import ByType, by_type
from swell.policies.by_user import NO_USER_LIMITS, ByUser, UserLimits, by_user
from swell.sim.capacity import Capacity, DemandChange, EventSink, NodeFailure
from swell.sim.cloud import Cloud
from swell.sim.costs import ConstantCost, ResizeCost
from swell.sim.events import move_event, submitted_figures
from swell.sim.explore import Exploration
from swell.sim.metrics import Result
from swell.sim.world import World

ProgressSink = Callable[[float, int, int], None]
"""Called from time to time with the simulated seconds, the jobs that have ended, and all jobs."""

_PROGRESS_EVERY = 256
_IDLE_ROUNDS = 100
"""The run ends after this many decisions in a row with no job running and none to come: a policy that has not
started a waiting job by then never will."""


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
    calendar: Calendar = NO_RESERVATIONS,
    demand: Sequence[DemandChange] = (),
    explore: Exploration | None = None,
    planned_cost: ResizeCost | None = None,
    belief_error: float = 0.0,
    blind_to_types: bool = False,
    cloud: Cloud | None = None,
    throughput_only: bool = False,
    teams: Teams = NO_TEAMS,
    user_limits: UserLimits = NO_USER_LIMITS,
    on_event: EventSink | None = None,
    on_progress: ProgressSink | None = None,
) -> Result:
    """Run the jobs on the cluster under the policy, and report how each of them ended.

    Args:
        interval_s: length of the rounds; None for the policy's own rounds, or none if it has no rounds.
        belief: 'profiles' or 'fitted' to override what the policy is told of the jobs' speed.
        calendar: reservations that take GPUs away from training; `demand`: what the services among them want.
        explore: if given, jobs grow only as their speed becomes known, as on a live cluster.
        planned_cost: the cost of changes that policies plan with, if it is not the true cost.
        belief_error: the relative standard deviation of each job's believed speed from the true one, for
            policies that are told curves; 0.1 for beliefs that are wrong by 10%.
        blind_to_types: treat all GPUs as if they were of the most frequent type, as published policies do.
        cloud: if given, the nodes of the cluster are rented from it as its autoscaler decides.
        throughput_only: jobs that adapt their batch size choose the one with the most samples per second.
        teams: quotas that the jobs' teams have; without any, the team of a job means nothing.
        user_limits: what the jobs of one user may have at a time; jobs without a user count as one user's.
    """
    if not jobs:
        raise InputError(
            "nothing to simulate: the trace has no jobs; 'swell generate' writes one that has", field="trace"
        )
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    if hasattr(chosen, "seed") and seed:
        chosen.seed = seed
    if not blind_to_types:
        chosen = by_type(chosen, cluster)
    typed = isinstance(chosen, ByType)
    chosen, jobs = _shared(chosen, jobs, cluster, teams)
    if user_limits:
        chosen = by_user(chosen, user_limits)
    cost = ConstantCost(float(resize_cost)) if isinstance(resize_cost, int | float) else resize_cost
    ordered = sorted(jobs, key=lambda job: job.submit_s)

    def pause_of(row: int, before: int, after: int) -> float:
        return cost.seconds(world.state_bytes(row), before, after)

    board = Board(cluster if cloud is None else cloud.empty, chosen.placer, pause_of, ordered)

    def active() -> IntArray:
        return board.active

    world = World(
        ordered,
        profiles,
        cluster,
        chosen,
        belief,
        board.table,
        active,
        tells_types_apart=typed,
        throughput_only=throughput_only,
    )
    if belief_error:
        world.mistake(belief_error, seed)
    capacity_of = partial(Capacity, board, failures, calendar, demand, cloud)
    engine = _Engine(board, world, chosen, interval_s, cost, explore, capacity_of, on_event, on_progress)
    if planned_cost is not None:
        engine.plan_with(planned_cost)
    started = time.process_time()
    engine.run()
    result = engine.result()
    result.cpu_s = time.process_time() - started
    return result


def _shared(
    policy: Policy, jobs: Sequence[JobSpec], cluster: Cluster, teams: Teams
) -> tuple[Policy, Sequence[JobSpec]]:
    """The policy as it obeys teams and classes, and the jobs with teams that there are."""
    teams.check_fits(sum(node.gpus for node in cluster.nodes))
    if not teams:
        jobs = [replace(job, team=OTHERS) if job.team else job for job in jobs]
    names = [*teams.quotas, OTHERS]
    if unknown := next((job for job in jobs if job.team not in names), None):
        raise InputError(
            f"job '{unknown.job_id}': there is no team '{unknown.team}'; teams: {', '.join(teams.quotas)}",
            field="team",
        )
    if isinstance(policy, ByTeam):
        policy.set_teams(teams)
        return policy, jobs
    if not teams and len({job.priority for job in jobs}) == 1:
        return policy, jobs
    return by_team(policy, teams), jobs


class _Engine:
    """One run. The board keeps the books, the world knows the truth, the engine has the clock and events."""

    def __init__(
        self,
        board: Board,
        world: World,
        policy: Policy,
        interval_s: float | None,
        cost: ResizeCost,
        explore: Exploration | None,
        capacity_of: Callable[[Callable[[int], None], EventSink | None], Capacity],
        on_event: EventSink | None,
        on_progress: ProgressSink | None,
    ) -> None:
        self.board = board
        self.world = world
        self.table = board.table
        self.policy = policy
        self.rhythm = Rhythm(policy, policy.interval_s if interval_s is None else interval_s)
        self.explore = explore
        self.capacity = capacity_of(self._settle, on_event)
        self.cloud = self.capacity.cloud
        self.on_event = on_event
        self.on_progress = on_progress
        self.has_admission = gives_promises(policy)
        self.curves = world.promised_curves if self.has_admission else world.curves
        self.plan_with(cost)

        n = len(self.table)
        self.now_s = float(self.table.submit_s[0])
        self.next_job = 0
        self.ended = 0
        self.idle_rounds = 0
        self.busy_s = self.now_s
        """When a job last ran, or when jobs or changes of the cluster were last still to come."""
        self.segments: list[tuple[float, int, int]] = []  # (ends at, row, stamp)
        self.stamp = [0] * n

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
        self.stalled = False

    def plan_with(self, cost: ResizeCost) -> None:
        """Set the cost of a change that policies plan with, which includes waiting for the next round."""
        round_s, typical = self.rhythm.interval_s or 0.0, self.world.typical_state_bytes
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
            if self.capacity.apply(self.now_s, self._worth_nodes):
                self.rhythm.ask(self.now_s, urgent=True)
            if self.rhythm.due_s <= self.now_s:
                self._decide()
            turns += 1
            if self.on_progress is not None and turns % _PROGRESS_EVERY == 0:
                self.on_progress(self.now_s - self.started_at_s, self.ended, n)
        if self.on_progress is not None:
            self.on_progress(self.now_s - self.started_at_s, self.ended, n)

    def _next_event_s(self) -> float:
        at_s = self.rhythm.due_s
        if self.next_job < len(self.table):
            at_s = min(at_s, self.table.submit_s[self.next_job])
        while self.segments and self.stamp[self.segments[0][1]] != self.segments[0][2]:
            heapq.heappop(self.segments)
        if self.segments:
            at_s = min(at_s, self.segments[0][0])
        jobs_left = len(self.board.active) > 0 or self.next_job < len(self.table)
        at_s = min(at_s, self.capacity.next_s(self.now_s, jobs_left=jobs_left))
        return float(at_s)

    def _pass_time(self, at_s: float) -> None:
        dt = at_s - self.now_s
        self.active_integral += dt * len(self.board.active)
        self.capacity_gpu_s += dt * self.board.cluster.capacity
        self.now_s = at_s

    # -- events ------------------------------------------------------------------------------------------

    def _submissions(self) -> None:
        table = self.table
        while self.next_job < len(table) and table.submit_s[self.next_job] <= self.now_s:
            row = self.next_job
            self.next_job += 1
            spec = table.specs[row]
            self.board.activate(row)
            self._jobs_changed()
            self.active_integral_at_submit[row] = self.active_integral
            self._emit(EventKind.SUBMITTED, row, **submitted_figures(spec))
            if self.has_admission:
                snapshot, index = self._snapshot(promising=True), len(self.board.active) - 1
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
            self.rhythm.ask(self.now_s)

    def _segment_ends(self) -> None:
        while self.segments and self.segments[0][0] <= self.now_s:
            _, row, stamp = heapq.heappop(self.segments)
            if self.stamp[row] != stamp:
                continue
            self._settle(row)
            if self.world.segment_over(row):
                self._finish(row)
            else:
                self._tell_progress(row)
                self._start_segment(row)

    # -- decisions ---------------------------------------------------------------------------------------

    def _snapshot(self, *, promising: bool = False) -> Snapshot:
        """The active jobs; if `promising`, with all nodes in service that may be rented."""
        costs = (self.resize_cost_s, self.start_cost_s)
        snapshot = self.board.snapshot(self.now_s, self.curves, *costs)
        if promising and self.cloud is not None:
            costs = (costs[0], costs[1] + self.cloud.provider.offer.start_s)
            return Snapshot(
                self.now_s,
                self.cloud.within_budget,
                self.table,
                snapshot.rows,
                self.curves,
                *costs,
                snapshot.numbers,
            )
        return snapshot

    def _worth_nodes(self) -> Snapshot:
        """The jobs that the autoscaler looks at: those that may run."""
        snapshot = self._snapshot(promising=True)
        return self.policy.shown(snapshot).part if isinstance(self.policy, ByUser) else snapshot

    def _decide(self) -> None:
        self.rhythm.due_s = math.inf
        if not len(self.board.active):
            return
        if self.world.learns:
            self._replan_batches()
        self._explore()
        snapshot = self._snapshot()
        started = time.perf_counter()
        if self.cloud is not None and not snapshot.capacity:
            decision = Decision(np.zeros(len(snapshot), dtype=np.int64))
        else:
            decision = self.policy.allocate(snapshot)
        self.decision_s.append(time.perf_counter() - started)
        self._follow_all(self.board.carry_out(snapshot, decision))
        known_s = self._explore()
        self.rhythm.decided(self.now_s, self.policy.next_wakeup_s(snapshot, decision))
        self.rhythm.due_s = min(self.rhythm.due_s, known_s)
        if self.segments or self.next_job < len(self.table) or self.capacity.pending:
            self.idle_rounds, self.busy_s = 0, self.now_s
        elif not self.capacity.worth_waiting(self.now_s - self.busy_s):
            self.idle_rounds += 1
        if self.idle_rounds >= _IDLE_ROUNDS:
            self.rhythm.due_s = math.inf
            self.capacity.stop()

    def _explore(self) -> float:
        """Bound each job's GPUs by what is known of its speed; returns when the next bound may rise."""
        if self.explore is None:
            return math.inf
        return self.explore.bound(self.table, self.board.active, self.now_s)

    def _replan_batches(self) -> None:
        """Let each job's agent that has learnt something since it chose its batch size choose again."""
        for row in self.board.active.tolist():
            if self.table.gpus[row] and self.world.wants_new_plan(row):
                self._settle(row)
                self._start_segment(row, new_plan=True)

    def _follow_all(self, moves: Sequence[Move]) -> None:
        """Let jobs go on at the placements that the board gave them, and their neighbours beside them."""
        shared = self.world.shared
        changed = [] if shared is None else shared.place((move.row, move.after) for move in moves)
        for move in moves:
            self._follow(move)
        if changed:
            moved = {move.row for move in moves}
            self._retime(row for row in changed if row not in moved)

    def _retime(self, rows: Iterable[int]) -> None:
        """Let jobs go on with another speed, because their neighbours on a GPU have changed."""
        for row in rows:
            if self.table.gpus[row]:
                self._settle(row)
                self._start_segment(row)

    def _follow(self, move: Move) -> None:
        """Let a job go on at the placement that the board gave it."""
        row = move.row
        self._ran(row, move.ran_s)
        self.stamp[row] += 1
        if move.before:
            self._tell_progress(row)
        if move.after:
            self._start_segment(row, new_plan=True)
        if self.on_event is not None:
            job_id = self.table.specs[row].job_id
            self.on_event(move_event(self.now_s, job_id, move, self.board.cluster))

    # -- jobs --------------------------------------------------------------------------------------------

    def _settle(self, row: int) -> None:
        """Bring a job's row up to now."""
        self._ran(row, self.table.settle(row, self.now_s))

    def _ran(self, row: int, ran_s: float) -> None:
        if ran_s > 0:
            self.world.advance(row, ran_s)

    def _start_segment(self, row: int, new_plan: bool = False) -> None:
        speed, togo = self.world.start_segment(row, self.board.cluster, new_plan)
        self.stamp[row] += 1
        if speed > 0:
            begins_s = max(self.now_s, float(self.table.paused_until_s[row]))
            # A job that is timed anew at the end of its segment may be a rounding error beyond it.
            heapq.heappush(self.segments, (begins_s + max(togo, 0.0) / speed, row, self.stamp[row]))

    def _finish(self, row: int) -> None:
        table = self.table
        self.finish_s[row] = self.now_s
        table.left[row] = 0.0
        self.stamp[row] += 1
        self._leave(row)
        if self.on_event is not None:
            deadline_s = table.deadline_s[row]
            met = None if math.isinf(deadline_s) else bool(self.now_s <= deadline_s)
            self._emit(EventKind.FINISHED, row, jct_s=self.now_s - table.submit_s[row], met=met)
        self.rhythm.ask(self.now_s)

    def _leave(self, row: int) -> None:
        """Take a job that has ended or was refused off the board."""
        self.board.deactivate(row)
        self._jobs_changed()
        self.ended += 1
        if self.world.shared is not None:
            self._retime(self.world.shared.place([(row, ())]))
        lived_s = self.now_s - self.table.submit_s[row]
        if lived_s > 0:
            self.mean_active[row] = (self.active_integral - self.active_integral_at_submit[row]) / lived_s

    def _jobs_changed(self) -> None:
        """A job came or went, so another number of nodes may be worth having."""
        if self.cloud is not None:
            self.cloud.look_s = self.now_s

    def _tell_progress(self, row: int) -> None:
        """How far a job is goes into the log when it is resized and at the end of each of its epochs."""
        if self.on_event is not None:
            done, of, batch_size = self.world.progress(row)
            workers = int(self.table.gpus[row])
            self._emit(EventKind.PROGRESS, row, done=done, of=of, workers=workers, batch_size=batch_size)

    def _emit(self, kind: EventKind, row: int, **data: Any) -> None:
        if self.on_event is not None:
            values = {k: (float(v) if isinstance(v, np.floating) else v) for k, v in data.items()}
            self.on_event(Event(self.now_s, kind, job_id=self.table.specs[row].job_id, data=values))

    def result(self) -> Result:
        """The result of the run."""
        table = self.table
        return Result(
            policy=self.policy.name,
            cluster=str(self.board.cluster),
            belief=self.world.belief_shown,
            job_ids=[spec.job_id for spec in table.specs],
            submit_s=table.submit_s,
            deadline_s=table.deadline_s,
            weight=table.weight,
            finish_s=self.finish_s,
            promised_s=self.promised_s,
            rejected=self.rejected,
            rho=self.world.fairness(self.finish_s - table.submit_s, self.mean_active),
            job_resizes=table.resizes,
            gpu_seconds=float(table.attained_gpu_s.sum()),
            capacity_gpu_seconds=self.capacity_gpu_s,
            cost=None if self.cloud is None else self.cloud.cost(self.now_s),
            node_hours=None if self.cloud is None else self.cloud.provider.node_hours(self.now_s),
            decision_s=self.decision_s,
            stalled=self.stalled,
        )
