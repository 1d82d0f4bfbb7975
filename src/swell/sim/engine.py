"""The simulator: a virtual clock around the same policies and placers that decide on live clusters.

It is event-driven. A job's row in the table holds its state as of the job's last change and is brought up to
date only when the job changes again, so an event costs no more than the jobs it affects. The events are: a
job is submitted, a job's present segment (see `world`) ends, a node is lost or comes back, a policy's round
or wake-up is due. After all events of one moment the policy decides once, unless it decides in rounds.

The simulator is deterministic: the same jobs, profiles, cluster, policy and seed give the same result.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swell.board import Board, DecisionRhythm, Move, with_reasons
from swell.domain import (
    NO_RESERVATIONS,
    NO_TEAMS,
    OTHERS,
    Calendar,
    Cluster,
    EventKind,
    FloatArray,
    InputError,
    IntArray,
    JobSpec,
    Teams,
)
from swell.perf.curves import Curves
from swell.perf.profiles import ProfileSet
from swell.policies import Admission, Decision, JobTable, Policy, Snapshot, make_policy
from swell.policies.base import gives_promises
from swell.policies.by_team import ByTeam, by_team
from swell.policies.by_type import ByType, by_type
from swell.policies.by_user import NO_USER_LIMITS, ByUser, UserLimits, by_user
from swell.sim.beliefs import Beliefs
from swell.sim.capacity import Capacity, Cloud, DemandChange, EventSink, JobEvents, NodeFailure
from swell.sim.metrics import SimulationResult
from swell.sim.workload import Workload
from swell.sim.world import ConstantCost, ResizeCost, World

# How a live scheduler learns the speed of jobs that are new to it, in simulated time.
#
# On a live cluster a new job starts on one GPU. Once it has run for a little while, it may have twice the
# most GPUs it has run on (Pollux's exploration, section 4.1). A simulation that has all curves from the
# start would give it more at once; one that replays a live cluster must not.


@dataclass(slots=True)
class Exploration:
    """Bounds the GPUs of each job by the sizes it has run at so far."""

    learn_s: float
    """How long a job must run at one size before its speed there counts as known."""
    known: frozenset[str] = frozenset()
    """The ids of jobs whose speed is known from the start."""
    _most: dict[int, int] = field(default_factory=dict)
    _own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, learn_s: float, known: Iterable[str]) -> Exploration:
        """An exploration in which the jobs `known` have no bound."""
        return cls(learn_s, frozenset(known))

    def bound(self, table: JobTable, rows: IntArray, now_s: float) -> float:
        """Set the jobs' bounds as of now; returns when the next bound may rise."""
        next_s = np.inf
        for row in rows.tolist():
            if table.specs[row].job_id in self.known:
                continue
            own = self._own.setdefault(row, int(table.max_gpus[row]))
            gpus = int(table.gpus[row])
            if gpus > self._most.get(row, 0):
                seen_s = float(table.paused_until_s[row]) + self.learn_s
                if seen_s <= now_s:
                    self._most[row] = gpus
                else:
                    next_s = min(next_s, seen_s)
            least = int(table.min_gpus[row])
            table.max_gpus[row] = min(own, max(2 * self._most.get(row, 0), least, 1))
            table.known[row] = row in self._most
        return next_s


# When the present segments of the running jobs end.


class SegmentEnds:
    """A queue of the moments at which jobs' segments end.

    A job has at most one segment. The entry of a segment that was replaced or dropped stays in the heap until
    it comes to the front, and is passed over there: its stamp is not the job's any more.
    """

    def __init__(self, jobs: int) -> None:
        self._heap: list[tuple[float, int, int]] = []  # (ends at, row, stamp)
        self._stamp = [0] * jobs

    def set(self, row: int, at_s: float) -> None:
        """The job's segment ends at `at_s`, and not when it would have ended before."""
        self._stamp[row] += 1
        heapq.heappush(self._heap, (at_s, row, self._stamp[row]))

    def drop(self, row: int) -> None:
        """The job has no segment that ends."""
        self._stamp[row] += 1

    def next_s(self) -> float:
        """When the next segment ends; infinite if none does."""
        heap = self._heap
        while heap and self._stamp[heap[0][1]] != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(self, now_s: float) -> int | None:
        """Take out a segment that has ended by now; returns its job, or None if there is no such segment."""
        if self.next_s() > now_s:
            return None
        return heapq.heappop(self._heap)[1]

    def __bool__(self) -> bool:
        """Whether any segment may still end; one that was dropped counts until it is passed over."""
        return bool(self._heap)


# What a run adds up for its result.


class Tally:
    """How each job of a run has ended, and integrals over the time of the run."""

    def __init__(self, submit_s: FloatArray) -> None:
        jobs = len(submit_s)
        self._submit_s = submit_s
        self.finish_s: FloatArray = np.full(jobs, np.nan)
        self.promised_s: FloatArray = np.full(jobs, np.nan)
        self.rejected: IntArray = np.zeros(jobs, dtype=np.int64)
        self.ended = 0
        """How many jobs have finished or were refused."""
        self.mean_active: FloatArray = np.full(jobs, np.nan)
        """How many jobs were active on average while each job was, for finish-time fairness."""
        self._active_s = 0.0
        """Integral over time of the number of active jobs."""
        self._active_s_at_submit: FloatArray = np.zeros(jobs)
        self.capacity_gpu_s = 0.0
        """GPU-seconds in service."""

    def passed(self, seconds: float, active: int, capacity: int) -> None:
        """Time has passed, with these numbers of active jobs and GPUs in service."""
        self._active_s += seconds * active
        self.capacity_gpu_s += seconds * capacity

    def came(self, row: int) -> None:
        """A job was submitted."""
        self._active_s_at_submit[row] = self._active_s

    def left(self, row: int, now_s: float) -> None:
        """A job has finished or was refused."""
        self.ended += 1
        lived_s = now_s - self._submit_s[row]
        if lived_s > 0:
            self.mean_active[row] = (self._active_s - self._active_s_at_submit[row]) / lived_s


# The jobs that run, in virtual time.
#
# A job's row in the table holds its state as of the job's last change and is brought up to date only when the
# job changes again (`settle`), so an event costs no more than the jobs it affects.


class RunningJobs:
    """Lets jobs make progress where the board has placed them, one segment after the other."""

    def __init__(self, board: Board, world: World, events: JobEvents) -> None:
        self._board, self._table = board, board.table
        self._world = world
        self._events = events
        self.ends = SegmentEnds(len(board.table))

    def settle(self, row: int, now_s: float) -> None:
        """Bring a job's row up to now."""
        self._ran(row, self._table.settle(row, now_s))

    def _ran(self, row: int, ran_s: float) -> None:
        if ran_s > 0:
            self._world.advance(row, ran_s)

    def _start_segment(self, row: int, now_s: float, new_plan: bool = False) -> None:
        speed, togo = self._world.start_segment(row, self._board.cluster, new_plan)
        if speed > 0:
            begins_s = max(now_s, float(self._table.paused_until_s[row]))
            # A job that is timed anew at the end of its segment may be a rounding error beyond it.
            self.ends.set(row, begins_s + max(togo, 0.0) / speed)
        else:
            self.ends.drop(row)

    def finished(self, now_s: float) -> Iterator[int]:
        """Start the next segments of the jobs whose segment has ended; yields the jobs that have finished."""
        while (row := self.ends.take(now_s)) is not None:
            self.settle(row, now_s)
            if self._world.segment_over(row):
                yield row
            else:
                self._record_progress(row, now_s)
                self._start_segment(row, now_s)

    def follow(self, moves: Sequence[Move], now_s: float) -> None:
        """Let jobs go on at the placements that the board gave them, and their neighbours beside them."""
        shared = self._world.shared
        changed = [] if shared is None else shared.place((move.row, move.after) for move in moves)
        for move in with_reasons(moves) if self._events.wanted else moves:
            self._follow(move, now_s)
        if changed:
            moved = {move.row for move in moves}
            self._retime((row for row in changed if row not in moved), now_s)

    def _follow(self, move: Move, now_s: float) -> None:
        row = move.row
        self._ran(row, move.ran_s)
        if move.before:
            self._record_progress(row, now_s)
        if move.after:
            self._start_segment(row, now_s, new_plan=True)
        else:
            self.ends.drop(row)
        self._events.moved(now_s, move, self._board.cluster)

    def leave(self, row: int, now_s: float) -> None:
        """A job that the board has taken off has ended, or was refused: its neighbours go on without it."""
        self.ends.drop(row)
        if self._world.shared is not None:
            self._retime(self._world.shared.place([(row, ())]), now_s)

    def _retime(self, rows: Iterable[int], now_s: float) -> None:
        """Let jobs go on with another speed, because their neighbours on a GPU have changed."""
        for row in rows:
            if self._table.gpus[row]:
                self.settle(row, now_s)
                self._start_segment(row, now_s)

    def replan_batches(self, now_s: float) -> None:
        """Let each job's agent that has learnt something since it chose its batch size choose again."""
        if not self._world.agents_plan:
            return
        for row in self._board.active.tolist():
            if self._table.gpus[row] and self._world.wants_new_plan(row):
                self.settle(row, now_s)
                self._start_segment(row, now_s, new_plan=True)

    def _record_progress(self, row: int, now_s: float) -> None:
        """How far a job is goes into the log when it is resized and at the end of each of its epochs."""
        if self._events.wanted:
            done, of, batch_size = self._world.progress(row)
            figures = {"done": done, "of": of, "workers": int(self._table.gpus[row])}
            self._events.write(now_s, EventKind.PROGRESS, row, **figures, batch_size=batch_size)


# Runs a simulated policy on the active jobs, and measures how long it takes to decide.


class SimulatedScheduler:
    """The policy of a run, and what it is shown."""

    def __init__(
        self,
        policy: Policy,
        board: Board,
        beliefs: Beliefs,
        costs_s: tuple[float, float],
        cloud: Cloud | None,
    ) -> None:
        """`costs_s`: of a resize and of a start, as the policy plans with them."""
        self.policy = policy
        self.admits = gives_promises(policy)
        """Whether the policy decides which jobs are admitted."""
        self.decision_s: list[float] = []
        """How long each decision took, in real time."""
        self._board, self._costs_s, self._cloud = board, costs_s, cloud
        self._curves: Callable[[], Curves] = beliefs.promised_curves if self.admits else beliefs.curves

    def _snapshot(self, now_s: float) -> Snapshot:
        """The active jobs."""
        return self._board.snapshot(now_s, self._curves, *self._costs_s)

    def _promising(self, now_s: float) -> Snapshot:
        """The active jobs, with all nodes in service that may be rented."""
        snapshot, cloud = self._snapshot(now_s), self._cloud
        if cloud is None:
            return snapshot
        resize_s, start_s = self._costs_s
        costs_s = (resize_s, start_s + cloud.provider.offer.start_s)
        table, rows, numbers = self._board.table, snapshot.rows, snapshot.numbers
        return Snapshot(now_s, cloud.within_budget, table, rows, self._curves, *costs_s, numbers)

    def worth_nodes(self, now_s: float) -> Snapshot:
        """The jobs that the autoscaler looks at: those that may run."""
        snapshot = self._promising(now_s)
        return self.policy.shown(snapshot).part if isinstance(self.policy, ByUser) else snapshot

    def admit(self, now_s: float) -> Admission:
        """Ask whether the youngest job may come in, and by when it will be done."""
        snapshot, index = self._promising(now_s), len(self._board.active) - 1
        answer = self.policy.admit(snapshot, index)
        if answer.admitted:
            self.policy.accepted(snapshot, index, answer)
        return answer

    def decide(self, now_s: float) -> tuple[Snapshot, Decision]:
        """Ask how many GPUs each job has from now on; returns what the policy was shown, and its decision."""
        snapshot = self._snapshot(now_s)
        started = time.perf_counter()
        if self._cloud is not None and not snapshot.capacity:
            decision = Decision(np.zeros(len(snapshot), dtype=np.int64))
        else:
            decision = self.policy.allocate(snapshot)
        self.decision_s.append(time.perf_counter() - started)
        return snapshot, decision


# One simulation: the clock, and what happens at each moment.


ProgressSink = Callable[[float, int, int], None]
"""Called from time to time with the simulated seconds, the jobs that have ended, and all jobs."""

_PROGRESS_EVERY = 256
_IDLE_ROUNDS = 100
"""The run ends after this many decisions in a row with no job running and none to come: a policy that has not
started a waiting job by then never will."""


class Simulation:
    """Lets jobs come, run and go until all have ended."""

    def __init__(
        self,
        board: Board,
        running: RunningJobs,
        scheduler: SimulatedScheduler,
        rhythm: DecisionRhythm,
        capacity: Capacity,
        events: JobEvents,
        explore: Exploration | None,
        on_progress: ProgressSink | None,
    ) -> None:
        self.board, self._table = board, board.table
        self._running = running
        self.scheduler, self._rhythm = scheduler, rhythm
        self.capacity = capacity
        self._events = events
        self._explore = explore
        self._on_progress = on_progress
        self.tally = Tally(board.table.submit_s)
        self.now_s = float(board.table.submit_s[0])
        self._began_s = self.now_s
        self._next_job = 0
        self._idle_rounds = 0
        self._busy_s = self.now_s
        """When a job last ran, or when jobs or changes of the cluster were last still to come."""

    def run(self) -> None:
        """Handle events in order of time until every job has ended or none can go on."""
        tally, turns = self.tally, 0
        while tally.ended < len(self._table):
            at_s = self._next_event_s()
            if at_s == math.inf:
                break
            tally.passed(at_s - self.now_s, len(self.board.active), self.board.cluster.capacity)
            self.now_s = at_s
            self._submissions()
            for row in self._running.finished(at_s):
                self._finish(row)
            if self.capacity.apply(at_s, self.scheduler.worth_nodes):
                self._rhythm.ask(at_s, urgent=True)
            if self._rhythm.due_s <= at_s:
                self._decide()
            turns += 1
            if turns % _PROGRESS_EVERY == 0:
                self._record_progress()
        self._record_progress()

    def _next_event_s(self) -> float:
        at_s = min(self._rhythm.due_s, self._running.ends.next_s())
        jobs_to_come = self._next_job < len(self._table)
        if jobs_to_come:
            at_s = min(at_s, self._table.submit_s[self._next_job])
        jobs_left = jobs_to_come or len(self.board.active) > 0
        return float(min(at_s, self.capacity.next_s(self.now_s, jobs_left=jobs_left)))

    def _record_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.now_s - self._began_s, self.tally.ended, len(self._table))

    # -- jobs that come and go ---------------------------------------------------------------------------

    def _submissions(self) -> None:
        table = self._table
        while self._next_job < len(table) and table.submit_s[self._next_job] <= self.now_s:
            row = self._next_job
            self._next_job += 1
            self.board.activate(row)
            self.capacity.jobs_changed(self.now_s)
            self.tally.came(row)
            self._events.submitted(self.now_s, row)
            if self._admitted(row):
                self._rhythm.ask(self.now_s)

    def _admitted(self, row: int) -> bool:
        """Whether the policy lets a job in that was just submitted; one that it refuses is gone."""
        if not self.scheduler.admits:
            self._events.write(self.now_s, EventKind.ADMITTED, row)
            return True
        answer = self.scheduler.admit(self.now_s)
        if answer.admitted:
            if answer.finish_s is not None:
                self.tally.promised_s[row] = answer.finish_s
            self._events.write(self.now_s, EventKind.ADMITTED, row, finish_s=answer.finish_s)
        else:
            self.tally.rejected[row] = 1
            self._leave(row)
            why = {"reason": answer.reason, "earliest_deadline_s": answer.earliest_deadline_s}
            self._events.write(self.now_s, EventKind.REJECTED, row, **why)
        return answer.admitted

    def _finish(self, row: int) -> None:
        table = self._table
        self.tally.finish_s[row] = self.now_s
        table.left[row] = 0.0
        self._leave(row)
        if self._events.wanted:
            deadline_s = table.deadline_s[row]
            met = None if math.isinf(deadline_s) else bool(self.now_s <= deadline_s)
            jct_s = self.now_s - table.submit_s[row]
            self._events.write(self.now_s, EventKind.FINISHED, row, jct_s=jct_s, met=met)
        self._rhythm.ask(self.now_s)

    def _leave(self, row: int) -> None:
        """Take a job that has ended or was refused off the board."""
        self.board.deactivate(row)
        self.capacity.jobs_changed(self.now_s)
        self._running.leave(row, self.now_s)
        self.tally.left(row, self.now_s)

    # -- decisions ---------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Let the policy decide, and follow it."""
        now_s, rhythm = self.now_s, self._rhythm
        rhythm.due_s = math.inf
        if not len(self.board.active):
            return
        self._running.replan_batches(now_s)
        self._bound()
        snapshot, decision = self.scheduler.decide(now_s)
        self._running.follow(self.board.carry_out(snapshot, decision), now_s)
        known_s = self._bound()
        rhythm.decided(now_s, self.scheduler.policy.next_wakeup_s(snapshot, decision))
        rhythm.due_s = min(rhythm.due_s, known_s)
        if self._in_vain():
            rhythm.due_s = math.inf
            self.capacity.stop()

    def _bound(self) -> float:
        """Bound each job's GPUs by what is known of its speed; returns when the next bound may rise."""
        if self._explore is None:
            return math.inf
        return self._explore.bound(self._table, self.board.active, self.now_s)

    def _in_vain(self) -> bool:
        """Whether the jobs that wait will never start, after another decision."""
        if self._running.ends or self._next_job < len(self._table) or self.capacity.pending:
            self._idle_rounds, self._busy_s = 0, self.now_s
        elif not self.capacity.worth_waiting(self.now_s - self._busy_s):
            self._idle_rounds += 1
        return self._idle_rounds >= _IDLE_ROUNDS


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
) -> SimulationResult:
    """Run the jobs on the cluster under the policy, and report how each of them ended.

    Args:
        interval_s: length of the rounds; None for the policy's own rounds, or none if it has no rounds.
        belief: 'profiles' or 'fitted', to override which speeds of the jobs the policy sees.
        calendar: reservations that take GPUs away from training; `demand`: what the services among them want.
        explore: if given, jobs grow only as their speed becomes known, as on a live cluster.
        planned_cost: the cost of changes that policies plan with, if it is not the true cost.
        belief_error: the relative standard deviation of each job's believed speed from the true one, for
            policies that see curves; 0.1 for beliefs that are wrong by 10%.
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
    if belief not in (None, "profiles", "fitted"):
        raise InputError(f"belief must be 'profiles' or 'fitted', got '{belief}'", field="belief")
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    if hasattr(chosen, "seed") and seed:
        chosen.seed = seed
    chosen = chosen if blind_to_types else by_type(chosen, cluster)
    types = cluster.gpu_types if isinstance(chosen, ByType) and not blind_to_types else ()
    jobs = sorted(_with_teams(jobs, teams, cluster), key=lambda job: job.submit_s)
    chosen = _obeying(chosen, teams, user_limits, jobs)
    cost = ConstantCost(float(resize_cost)) if isinstance(resize_cost, int | float) else resize_cost

    def pause_of(row: int, before: int, after: int) -> float:
        return cost.seconds(world.state_bytes(row), before, after, world.startup_s(row))

    board = Board(cluster if cloud is None else cloud.empty, chosen.placer, pause_of, jobs)
    workload = Workload.of(jobs, profiles, cluster, types)
    beliefs = Beliefs(workload, cluster, board)
    knows, adaptive = belief or chosen.knows, chosen.adaptive_batch
    if knows == "fitted":
        beliefs.learn(adaptive=adaptive, throughput_only=throughput_only)
    world = World(workload, cluster, board.table, beliefs.by_type, adaptive=adaptive)
    if belief_error:
        beliefs.mistake(belief_error, seed)
    rhythm = DecisionRhythm(chosen, chosen.interval_s if interval_s is None else interval_s)
    planned = cost if planned_cost is None else planned_cost
    costs_s = _planned_costs_s(planned, world.typical_state_bytes, rhythm.interval_s or 0.0)
    scheduler = SimulatedScheduler(chosen, board, beliefs, costs_s, cloud)
    events = JobEvents(jobs, on_event)
    running = RunningJobs(board, world, events)
    capacity = Capacity(board, failures, calendar, demand, cloud, running.settle, on_event)
    simulation = Simulation(board, running, scheduler, rhythm, capacity, events, explore, on_progress)
    started = time.process_time()
    simulation.run()
    shown = "fitted" if beliefs.learned else "none" if knows == "nothing" else "oracle"
    result = _result(simulation, world, shown)
    result.cpu_s = time.process_time() - started
    return result


def _with_teams(jobs: Sequence[JobSpec], teams: Teams, cluster: Cluster) -> Sequence[JobSpec]:
    """The jobs with teams that there are; without teams, no job is of one."""
    teams.check_fits(sum(node.gpus for node in cluster.nodes))
    if not teams:
        return [replace(job, team=OTHERS) if job.team else job for job in jobs]
    names = [*teams.quotas, OTHERS]
    if unknown := next((job for job in jobs if job.team not in names), None):
        raise InputError(
            f"job '{unknown.job_id}': there is no team '{unknown.team}'; teams: {', '.join(teams.quotas)}",
            field="team",
        )
    return jobs


def _obeying(policy: Policy, teams: Teams, limits: UserLimits, jobs: Sequence[JobSpec]) -> Policy:
    """The policy as it obeys teams, classes of priority and limits of users, where there are any."""
    if isinstance(policy, ByTeam):
        policy.set_teams(teams)
    elif teams or len({job.priority for job in jobs}) > 1:
        policy = by_team(policy, teams)
    return by_user(policy, limits) if limits else policy


def _planned_costs_s(cost: ResizeCost, state_bytes: float, round_s: float) -> tuple[float, float]:
    """Times for a resize and a start that policies plan with; they include waiting for the next round."""
    return cost.seconds(state_bytes, 1, 2) + round_s, cost.seconds(state_bytes, 0, 1) + round_s


def _result(done: Simulation, world: World, belief: str) -> SimulationResult:
    table, tally, cloud = done.board.table, done.tally, done.capacity.cloud
    return SimulationResult(
        policy=done.scheduler.policy.name,
        cluster=str(done.board.cluster),
        belief=belief,
        job_ids=[spec.job_id for spec in table.specs],
        submit_s=table.submit_s,
        deadline_s=table.deadline_s,
        weight=table.weight,
        finish_s=tally.finish_s,
        promised_s=tally.promised_s,
        rejected=tally.rejected,
        rho=world.fairness(tally.finish_s - table.submit_s, tally.mean_active),
        job_resizes=table.resizes - table.returns,
        gpu_seconds=float(table.attained_gpu_s.sum()),
        capacity_gpu_seconds=tally.capacity_gpu_s,
        cost=None if cloud is None else cloud.cost(done.now_s),
        node_hours=None if cloud is None else cloud.provider.node_hours(done.now_s),
        decision_s=done.scheduler.decision_s,
        stalled=tally.ended < len(table),
    )
