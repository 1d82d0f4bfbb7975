"""Turns records and knowledge into moves, with the policies, the placers and the board of the simulator.

The scheduler enters what is believed of each job into the board's table, lets the policy decide, and returns
the board's moves. It starts nothing itself. Questions (`admission`) are asked on a copy of the table, so that
a quote changes nothing.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from swell.board import Board, DecisionRhythm, Move, with_reasons
from swell.control.book import Book
from swell.control.errors import StoreUnavailable
from swell.control.knowledge import Knowledge
from swell.control.limits import NO_LIMITS, OwnerLimits, left_by
from swell.control.model import JobRecord, Phase
from swell.control.renting import Renting
from swell.control.roster import (
    DECIDE,
    JobRows,
    Question,
    Roster,
    believed_curves,
    costs_s,
    enter_beliefs,
    enter_bounds,
    gpu_type_of,
    promised_deadline_s,
    slots_for,
)
from swell.domain import NO_TEAMS, Calendar, Cluster, InputError, Reservation, Teams, entitled
from swell.perf.curves import beside_neighbours
from swell.perf.sharing import promised_part
from swell.placement import FREE
from swell.policies import DEFAULT, Admission, Decision, Snapshot, is_ours, make_policy
from swell.policies.base import gives_promises
from swell.policies.by_team import ByTeam, TeamUse, by_team
from swell.policies.by_type import ByType, by_type
from swell.policies.by_user import NOTHING, ByUser, Use, by_user, within

# Profiling runs: a job with a deadline whose speed is unknown is measured before its deadline is decided.
#
# As in CoDDL (AFS, NSDI'21) a run over-allocates and then shrinks: it begins on all free slots and halves
# them, with a few steps at each size, so that the job's curve is known cheaply. There is one run at a time,
# because after it the next job of the same kind may need none. Jobs with a guaranteed finish give up no
# slots for it.


SIZE_LIMIT_S = 30.0
"""Longest that a run stays at one size, once the job trains, without steady steps."""
START_LIMIT_S = 120.0
"""Longest that a job may take to get slots and train its first step; then its deadline is refused. Where
nodes are rented, the time that they take to start comes on top."""


@dataclass(slots=True)
class ProfilingRun:
    replica: int
    """Workers of a replica: sizes are multiples of it."""
    least: int
    most: int | None
    asked_s: float
    since_s: float
    """When the job began to train at the present size."""
    sizes: list[int] | None = None
    """Sizes still to be measured, the present one first; None while the run waits for slots."""
    gpu_type: str = ""
    """The GPU type that the job is measured on; empty while the run waits for slots."""

    @property
    def size(self) -> int:
        """Slots that the job should have now; 0 while the run waits."""
        return self.sizes[0] if self.sizes else 0

    def next_size(self, now_s: float) -> bool:
        """Go on to the next size, since the present one has been measured; False if it was the last."""
        self.sizes, self.since_s = (self.sizes or [])[1:], now_s
        return bool(self.sizes)


class Profiling:
    """The profiling runs that are under way or wait for slots, oldest first."""

    def __init__(self) -> None:
        self.runs: dict[str, ProfilingRun] = {}
        self.start_limit_s = START_LIMIT_S

    def ask(self, record: JobRecord, now_s: float) -> None:
        """Have a job profiled as soon as there are slots for it."""
        request = record.request
        bounds = (request.workers_per_replica, request.min_workers, record.max_workers)
        self.runs[record.job_id] = ProfilingRun(*bounds, now_s, now_s)

    def bound(self, job_id: str, most: int) -> None:
        """Measure the job, if it has a run, with no more than `most` workers: it cannot use more."""
        run = self.runs.get(job_id)
        if run is not None:
            run.least, run.most = min(run.least, most), min(run.most or most, most)
            run.sizes = run.sizes and ([size for size in run.sizes if size <= most] or [most])

    def drop(self, job_id: str) -> None:
        """End the job's profiling run, if it has one."""
        self.runs.pop(job_id, None)

    def begin(
        self,
        records: Mapping[str, JobRecord],
        board: Board,
        now_s: float,
        quota: Callable[[str], int] = lambda _: sys.maxsize,
    ) -> None:
        """Begin the run that waits longest: on all free slots, else on slots of jobs without a guarantee.

        All these slots are of one GPU type, the one with the most free slots that has enough of them.
        `quota`: the most slots that a job's owner may use for a run; one without enough waits.
        """
        if not self.runs or any(run.sizes is not None for run in self.runs.values()):
            return
        allowed = ((job_id, run, quota(job_id)) for job_id, run in self.runs.items())
        job_id, run, most = next((one for one in allowed if one[2] >= one[1].least), ("", None, 0))
        if run is None:
            return
        others = (r for r in records.values() if r.promise.guaranteed_s is None and r.job_id != job_id)
        room = _room(board, [slot for other in others for slot in other.wanted])
        enough = [(free, kind) for kind, (free, yielding) in room.items() if free + yielding >= run.least]
        if not enough:
            return
        free, run.gpu_type = max(enough, key=lambda one: one[0])
        first = max(free, run.least)
        first = min(first, run.most or first, most)
        replicas = max(first // run.replica, 1)
        halvings = [run.replica << i for i in range(replicas.bit_length() - 1, -1, -1)]
        run.sizes = [size for size in halvings if size >= run.least] or [run.least]
        run.since_s = now_s

    def advance(self, book: Book, now_s: float) -> tuple[list[str], bool]:
        """Take the runs further; returns the jobs whose run is over, and whether any run changed its size."""
        over: list[str] = []
        changed = False
        for job_id, run in list(self.runs.items()):
            record = book.records[job_id]
            if record.phase not in (Phase.QUEUED, Phase.RUNNING):
                continue
            if run.sizes is None and book.known[job_id].source == "none":
                book.recall(job_id)  # another job of its kind may have been measured meanwhile
            knowledge = book.known[job_id]
            if knowledge.timings.seen:
                if run.size not in knowledge.timings.steady_with and now_s - run.since_s < SIZE_LIMIT_S:
                    continue
                done = not run.next_size(now_s)
            else:
                run.since_s = now_s
                done = knowledge.known or now_s - run.asked_s > self.start_limit_s
            changed = True
            if done:
                self.drop(job_id)
                over.append(job_id)
        return over, changed

    def begun(self, jobs: Container[str]) -> list[tuple[str, ProfilingRun]]:
        """Those of these jobs whose run has begun, with the run."""
        return [(job_id, run) for job_id, run in self.runs.items() if run.size and job_id in jobs]

    def shares(self, board: Board, rows: Mapping[str, int]) -> dict[int, int]:
        """The slots that each run should have, by the row of its job, as far as its GPU type has enough."""
        shares: dict[int, int] = {}
        nodes = list(zip(board.cluster.nodes, board.cluster.node_gpus.tolist()))
        for job_id, run in self.begun(rows):
            of_type = sum(gpus for node, gpus in nodes if node.gpu_type == run.gpu_type)
            free, row = of_type - sum(shares.values()), rows[job_id]
            shares[row] = min(run.size, free) if free >= board.table.min_gpus[row] else 0
        return shares

    def slots_by_team(self, records: Mapping[str, JobRecord], teams: Teams) -> dict[str, int]:
        taken: dict[str, int] = {}
        for job_id, run in self.begun(records):
            team = teams.of(records[job_id].owner)
            taken[team] = taken.get(team, 0) + run.size
        return taken

    def use_by_user(self, records: Mapping[str, JobRecord], shown: Container[str]) -> dict[str, Use]:
        """By user: what runs of other jobs than those `shown` use."""
        used: dict[str, Use] = {}
        for job_id, run in self.begun(records):
            if job_id not in shown:
                owner = records[job_id].owner
                before = used.get(owner, NOTHING)
                used[owner] = Use(before.jobs + 1, before.slots + run.size)
        return used

    def reserved(self, board: Board, rows: Mapping[str, int]) -> list[int]:
        """Slots that runs hold or are about to get; the policy must not give them to other jobs."""
        taken: list[int] = []
        cluster, occupancy = board.cluster, board.placer.occupancy
        owner, free, node_of = occupancy.owner, occupancy.free, cluster.node_of_gpu
        for job_id, run in self.begun(rows):
            held = board.table.placement[rows[job_id]][: run.size]
            taken += held
            missing = run.size - len(held)
            if missing:  # from the free ones first, on the emptiest nodes
                mine = set(taken)
                usable = [
                    int(g)
                    for g in np.flatnonzero(cluster.in_service)
                    if g not in mine and cluster.nodes[node_of[g]].gpu_type == run.gpu_type
                ]
                usable.sort(key=lambda g: (owner[g] != FREE, -int(free[node_of[g]]), g))
                taken += usable[:missing]
        return taken


def _room(board: Board, yielding: Sequence[int]) -> dict[str, tuple[int, int]]:
    """By GPU type: how many slots are free, and how many of those `yielding` are of that type."""
    cluster, free = board.cluster, board.placer.occupancy.free
    yields = Counter(cluster.nodes[int(cluster.node_of_gpu[slot])].gpu_type for slot in yielding)
    return {
        kind: (
            sum(int(free[i]) for i, node in enumerate(cluster.nodes) if node.gpu_type == kind),
            yields[kind],
        )
        for kind in cluster.gpu_types
    }


P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

MOST_REASON = 500
"""Longest reason why a policy was replaced, in characters."""


def _answered_by_default(
    method: Callable[Concatenate[Scheduler, P], T],
) -> Callable[Concatenate[Scheduler, P], T]:
    """Ask again after the default policy has replaced one of another package, which failed."""

    @wraps(method)
    def ask(self: Scheduler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except StoreUnavailable:
            raise
        except Exception as error:
            self.replace_failed(error)
            return method(self, *args, **kwargs)

    return ask


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy's answer to a job, with what the policy was asked; `accepted` needs both."""

    snapshot: Snapshot
    index: int
    admission: Admission
    policy: ByUser
    """The policy that answered."""


class Scheduler:
    """Decides which job gets which slots."""

    def __init__(
        self,
        book: Book,
        policy: str,
        cluster: Cluster,
        interval_s: float | None = None,
        limits: OwnerLimits = NO_LIMITS,
    ) -> None:
        """`interval_s` is the length of rounds, in place of the policy's own."""
        self.book = book
        self.limits = limits
        self.over_limit: dict[str, str] = {}
        """By job: the limit of its owner that kept it from running in the last decision."""
        self.renting: Renting | None = None
        """The rented nodes, if nodes are rented."""
        self.failed_policy: dict[str, str] | None = None
        """The policy of another package that failed and was replaced: its text, the new one's, and why."""
        self.policy_text: str
        self.policy: ByTeam
        """The policy as it obeys teams. It is asked through `limited`."""
        self.limited: ByUser
        """The same policy within the limits of each user."""
        self.rhythm: DecisionRhythm
        self._interval_s = interval_s
        self._begin_with(policy, cluster, NO_TEAMS)
        self.roster = Roster(book, cluster, self.policy.placer)
        self.board = self.roster.board
        self.profiling = Profiling()

    @property
    def cluster(self) -> Cluster:
        """The cluster that the policy decides on: drained nodes are not up, reserved slots are held."""
        return self.board.cluster

    @property
    def teams(self) -> Teams:
        """The teams that share the cluster."""
        return self.policy.teams

    def set_teams(self, teams: Teams, now_s: float) -> None:
        self.policy.set_teams(teams)
        self.rhythm.ask(now_s, urgent=True)

    def uses(self) -> dict[str, TeamUse]:
        """What each team may count on of the present slots, and what its jobs have."""
        own = entitled(self.teams.quotas, self.cluster.capacity)
        used = dict.fromkeys(own, 0)
        for record in self.book.records.values():
            used[self.teams.of(record.owner)] += len(record.wanted)
        return {name: TeamUse(own[name], used[name]) for name in own}

    @property
    def most_slots(self) -> int:
        """The slots of the whole cluster, lost nodes and nodes that may be rented included."""
        if self.renting is not None:
            return self.promised.capacity
        return sum(node.gpus for node in self.cluster.nodes)

    @property
    def promised(self) -> Cluster:
        """The cluster that promises count on: with all nodes that may be rented."""
        return self.cluster if self.renting is None else self.renting.promised(self.cluster)

    @property
    def tells_types_apart(self) -> bool:
        """Whether the policy places whole jobs on one GPU type."""
        return isinstance(self.policy.policy, ByType)

    @property
    def gives_promises(self) -> bool:
        """Whether the policy decides which jobs are admitted."""
        return gives_promises(self.policy)

    def set_policy(self, text: str, now_s: float) -> None:
        """Switch to another policy; jobs keep their slots until that policy decides otherwise."""
        self.failed_policy = None
        self._begin_with(text, self.cluster, self.teams)
        self.board.set_placer(self.policy.placer)
        self.rhythm.ask(now_s)

    def replace_failed(self, error: Exception) -> None:
        """Have the default policy decide from now on, because one of another package failed.

        Raises `error` if the policy comes with swell.
        """
        failed = self.policy_text
        if is_ours(failed):
            raise error
        log.error("policy '%s' failed and is replaced by '%s'", failed, DEFAULT, exc_info=error)
        self.set_policy(DEFAULT, 0.0)  # it decides at the next turn
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        self.failed_policy = {"policy": failed, "by": DEFAULT, "reason": reason[:MOST_REASON]}

    def _begin_with(self, text: str, cluster: Cluster, teams: Teams) -> None:
        """Ask this policy from now on, within these teams and the limits of users."""
        self.policy = by_team(by_type(make_policy(text), cluster), teams)
        self.policy_text = text
        self.limited = by_user(self.policy, self.limits.of_policy)
        own_s = self.policy.interval_s
        self.rhythm = DecisionRhythm(self.policy, own_s if self._interval_s is None else self._interval_s)

    def set_cluster(self, cluster: Cluster, now_s: float, reason: str = "") -> None:
        """Use this cluster from now on; `reason` says why jobs lose slots, if they do."""
        self.board.set_cluster(cluster, now_s, reason)
        if len(cluster.gpu_types) > 1 and not self.tells_types_apart:  # the first node of another type
            self._begin_with(self.policy_text, cluster, self.teams)
        self.rhythm.ask(now_s, urgent=True)

    def reserve(self, calendar: Calendar, now_s: float) -> None:
        """Give reservations the slots that they want now."""
        if self.board.reserve(calendar, now_s):
            self.rhythm.ask(now_s, urgent=True)

    def add(self, record: JobRecord, now_s: float) -> bool:
        """Add an active job; False if the slots it had are gone or belong to another job."""
        kept = self.roster.add(record, self.teams)
        self.rhythm.ask(now_s)
        return kept

    def remove(self, job_id: str, now_s: float) -> None:
        """Remove a job that is no longer active."""
        self.profiling.drop(job_id)
        if self.roster.remove(job_id):
            self.rhythm.ask(now_s)

    def check_fits(self, min_workers: int) -> None:
        """Refuse a job that needs more workers than the cluster has slots, or than one user may have."""
        total, limit = self.most_slots, self.limits.slots
        most, which = total, "the slots of this cluster"
        if limit is not None and limit < total:
            most, which = limit, "the slots that one user may have"
        if min_workers > most:
            raise InputError(
                f"min_workers must be at most {most}, {which}, got {min_workers}", field="min_workers"
            )

    # -- questions ---------------------------------------------------------------------------------------

    @_answered_by_default
    def admission(self, record: JobRecord, knowledge: Knowledge, now_s: float) -> Asked:
        """The policy's answer to this job, new or active already, with its deadline. Changes nothing."""
        # The policy must see the deadline to decide on it, as if it had been promised already.
        deadlines_s = {record.job_id: record.request.deadline_s}
        question = Question(cautious=True, rentable=True, deadlines_s=deadlines_s)
        listed, index = self.roster.listed_with(record, knowledge, self.teams, without=self.profiling.runs)
        snapshot = self._snapshot(listed, question, now_s)
        return Asked(snapshot, index, self.limited.admit(snapshot, index), self.limited)

    def accepted(self, asked: Asked) -> None:
        """Tell the policy that the job it answered was taken in, unless another one decides by now."""
        if asked.policy is not self.limited:
            return
        try:
            self.limited.accepted(asked.snapshot, asked.index, asked.admission)
        except Exception as error:
            self.replace_failed(error)

    @_answered_by_default
    def endangered(self, calendar: Calendar, now_s: float, teams: Teams | None = None) -> list[str]:
        """Jobs whose promised finish could not be kept beside this calendar, with these teams (None: with
        the present ones). Changes nothing."""
        listed = self.roster.listed(without=self.profiling.runs)
        if not any(promised_deadline_s(record) is not None for record, _ in listed.jobs):
            return []
        snapshot = self._snapshot(listed.apart(), Question(cautious=True, calendar=calendar), now_s)
        policy = self.limited
        if teams is not None:
            policy = replace(policy, policy=self.policy.asked_with(teams))
            snapshot.team = [teams.of(record.owner) for record, _ in listed.jobs]
        return [listed.jobs[i][0].job_id for i in policy.endangered(snapshot).tolist()]

    def endangered_without(self, nodes: Collection[str], now_s: float) -> list[str]:
        """Jobs whose promised finish could be kept now, but not without these nodes. Changes nothing."""
        calendar = self.board.calendar
        away = calendar.having(Reservation(name="slow-nodes", nodes=tuple(sorted(nodes))))
        before = self.endangered(calendar, now_s)
        return sorted(set(self.endangered(away, now_s)) - set(before))

    @_answered_by_default
    def promising(self, now_s: float) -> Snapshot:
        """The jobs that may run, those that are profiled included, on all nodes that may be rented.

        Changes nothing.
        """
        snapshot = self._snapshot(self.roster.listed().apart(), Question(rentable=True), now_s)
        return self.limited.shown(snapshot).part

    # -- decisions ---------------------------------------------------------------------------------------

    @_answered_by_default
    def decide(self, now_s: float) -> list[tuple[str, Move]]:
        """Let the policy decide; returns the moves of all jobs whose slots change."""
        board, table = self.board, self.board.table
        self.profiling.begin(self.book.records, board, now_s, self._profiling_limit)
        listed = self.roster.listed(without=self.profiling.runs)
        snapshot = self._snapshot(listed, DECIDE, now_s)
        self.over_limit = {}
        self.rhythm.due_s = math.inf
        decision = Decision(np.zeros(len(snapshot), dtype=np.int64))
        if len(snapshot) and (snapshot.capacity or self.renting is None):
            decision = self._decision(snapshot, listed.jobs)
        moves = board.carry_out(snapshot, decision, self.profiling.shares(board, self.roster.rows))
        # Which part of a job's measured speed the policy counts on when it decides.
        counted_on = promised_part(self.cluster.per_gpu) if self.gives_promises else 1.0
        shown = set(listed.rows.tolist())
        for move in moves:
            if move.row in shown:
                curves = snapshot.curves.on(gpu_type_of(self.cluster, move.after))
                rate = curves.rates[table.curve[move.row], len(move.after)]
                table.rate[move.row] = rate / counted_on
        if len(snapshot):
            self.rhythm.decided(now_s, self._next_wakeup_s(snapshot, decision))
        return [(table.specs[move.row].job_id, move) for move in with_reasons(moves)]

    def _next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        try:
            return self.limited.next_wakeup_s(snapshot, decision)
        except Exception as error:  # the decision is carried out by now
            self.replace_failed(error)
            return snapshot.now_s

    def _decision(self, snapshot: Snapshot, jobs: Sequence[tuple[JobRecord, Knowledge]]) -> Decision:
        """The policy's decision, within what each job can use; also notes which limits keep jobs waiting."""
        decision = self.limited.allocate(snapshot)
        if any(record.most_workers is not None for record, _ in jobs):
            widest = self.cluster.capacity
            decision = within(decision, np.array([r.most_workers or widest for r, _ in jobs]))
        why_not = self.limited.why_not
        self.over_limit = {
            record.job_id: why_not[number]
            for number, (record, _) in zip(snapshot.numbers.tolist(), jobs)
            if number in why_not
        }
        return decision

    def _profiling_limit(self, job_id: str) -> int:
        """The most slots that a job may be profiled on: what promised jobs leave of the limits of its owner
        and of the quota of its owner's team."""
        owner = self.book.records[job_id].owner
        sure = [r for r in self.book.records.values() if r.wanted and r.promise.guaranteed_s is not None]
        slots = left_by([r for r in sure if r.owner == owner], self.limits, self.cluster.capacity)
        if not self.teams:
            return slots
        team = self.teams.of(owner)
        used = sum(len(r.wanted) for r in sure if self.teams.of(r.owner) == team)
        return min(slots, max(self.uses()[team].own - used, 0))

    def _snapshot(self, listed: JobRows, question: Question, now_s: float) -> Snapshot:
        """Enter what is known of jobs into their table, and make the snapshot that the policy sees."""
        jobs, records, each_type = listed.jobs, self.book.records, self.tells_types_apart
        profiled = self.profiling.reserved(self.board, self.roster.rows)
        self.policy.taken = self.profiling.slots_by_team(records, self.teams)
        self.limited.used = self.profiling.use_by_user(records, {record.job_id for record, _ in jobs})
        if each_type:  # after a restart the policy does not know what it promised
            self.policy.keep_promises(self.roster.promised_types())
        present = self.promised if question.rentable else self.cluster
        slots = slots_for(question, self.board, present, profiled, jobs, now_s)
        cluster = slots.cluster
        held = [listed.table.placement[row] for row in listed.rows.tolist()]
        curves = believed_curves(
            jobs, held, cluster, slots.widest, each_type=each_type, cautious=question.cautious
        )
        enter_beliefs(listed, self.teams, cluster.gpu_types if each_type else ())
        enter_bounds(listed, slots.widest, question.deadlines_s)
        self.roster.enter_progress(listed, curves.rates, now_s)
        if question.cautious or self.gives_promises:
            # Where slots share a GPU, a policy that gives promises counts on neighbours that fill it: if it
            # planned with more when it decides, it would find too late that a promised job needs more slots.
            curves = beside_neighbours(curves, cluster)
        node_start_s = self.renting.start_s if question.rentable and self.renting is not None else 0.0
        costs = costs_s(jobs, self.rhythm.interval_s or 0.0, node_start_s)
        return Snapshot(now_s, cluster, listed.table, listed.rows, curves, *costs, ahead=slots.ahead)
