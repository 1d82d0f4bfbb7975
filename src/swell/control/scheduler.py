"""Turns records and knowledge into moves, with the policies, the placers and the board of the simulator.

The scheduler enters what is believed of each job into the board's table, lets the policy decide, and returns
the board's moves. It starts nothing itself. Questions (`admission`) are asked on a copy of the table, so that
a quote changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swell.board import Board, Move, Rhythm
from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.limits import NO_LIMITS, Limits, left_by, used_by
from swell.control.model import JobRecord, Phase
from swell.control.profiling import Profiling
from swell.control.renting import Renting
from swell.control.typed import believed_curves, believed_on, gpu_type_of
from swell.domain import (
    Calendar,
    Cluster,
    FloatArray,
    InputError,
    IntArray,
    JobSpec,
    Reservation,
    Teams,
    entitled,
)
from swell.perf.curves import beside_neighbours
from swell.perf.sharing import promised_part
from swell.policies import Admission, Decision, JobTable, Policy, Snapshot, make_policy
from swell.policies.base import gives_promises
from swell.policies.by_team import ByTeam, TeamUse, by_team
from swell.policies.by_type import ByType, by_type
from swell.policies.by_user import ByUser, Use, by_user, within

_DECIDED = (Phase.QUEUED, Phase.RUNNING)
"""Phases in which the policy decides on a job."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy's answer to a job, with what the policy was asked; `accepted` needs both."""

    snapshot: Snapshot
    index: int
    admission: Admission


class Scheduler:
    """Decides which job gets which slots."""

    def __init__(
        self,
        book: Book,
        policy: str,
        cluster: Cluster,
        interval_s: float | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """`interval_s` is the length of rounds, in place of the policy's own."""
        self.book = book
        self.limits = limits
        self.over_limit: dict[str, str] = {}
        """By job: the limit of its owner that kept it from running in the last decision."""
        self.renting: Renting | None = None
        """The rented nodes, if nodes are rented."""
        self.policy_text = policy
        self.policy: ByTeam = by_team(by_type(make_policy(policy), cluster))
        """The policy as it obeys teams. It is asked through `limited`."""
        self.limited: ByUser = by_user(self.policy, limits.of_policy)
        """The same policy within the limits of each user."""
        self.board = Board(cluster, self.policy.placer, self._pause_s)
        self.profiling = Profiling()
        self.rows: dict[str, int] = {}
        """The board's row of each active job."""
        self._interval_s = interval_s
        self.rhythm = self._rhythm()
        self._entered: dict[str, tuple[float, float | None]] = {}
        """By job: the progress and length that were last entered into the board's table."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the policy decides on: drained nodes are not up, reserved slots are held."""
        return self.board.cluster

    @property
    def teams(self) -> Teams:
        """The teams that share the cluster."""
        return self.policy.teams

    def set_teams(self, teams: Teams, now_s: float) -> None:
        """Have these teams from now on."""
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

    def set_policy(self, text: str, now_s: float) -> None:
        """Switch to another policy; jobs keep their slots until that policy decides otherwise."""
        self.policy_text = text
        self._begin_with(by_type(make_policy(text), self.cluster))
        self.board.set_placer(self.policy.placer)
        self.rhythm.ask(now_s)

    def set_cluster(self, cluster: Cluster, now_s: float, reason: str = "") -> None:
        """Use this cluster from now on; `reason` says why jobs lose slots, if they do."""
        self.board.set_cluster(cluster, now_s, reason)
        if len(cluster.gpu_types) > 1 and not self.tells_types_apart:  # the first node of another type
            self._begin_with(by_type(make_policy(self.policy_text), cluster))
        self.rhythm.ask(now_s, urgent=True)

    def reserve(self, calendar: Calendar, now_s: float) -> None:
        """Give reservations the slots that they want now."""
        if self.board.reserve(calendar, now_s):
            self.rhythm.ask(now_s, urgent=True)

    def add(self, record: JobRecord, now_s: float) -> bool:
        """Add an active job; False if the slots it had are gone or belong to another job."""
        row = self.rows[record.job_id] = self.board.add(self._spec(record))
        self.rhythm.ask(now_s)
        started_s = record.started_s or record.submitted_s
        return not record.wanted or self.board.adopt(row, record.wanted, started_s)

    def remove(self, job_id: str, now_s: float) -> None:
        """Remove a job that is no longer active."""
        self.profiling.drop(job_id)
        self._entered.pop(job_id, None)
        if job_id in self.rows:
            self.board.remove(self.rows.pop(job_id))
            self.rhythm.ask(now_s)

    def trains_from(self, job_id: str, moment_s: float, now_s: float) -> None:
        """Note the moment at which the job trains (again) after its last start or resize."""
        row = self.rows[job_id]
        self.board.table.settle(row, now_s)
        self.board.table.paused_until_s[row] = moment_s

    def released(self, job_id: str, now_s: float) -> None:
        """Note that the job has given all its slots back without a decision."""
        self.board.release(self.rows[job_id], now_s)

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

    @property
    def gives_promises(self) -> bool:
        """Whether the policy decides which jobs are admitted."""
        return gives_promises(self.policy)

    def admission(self, record: JobRecord, knowledge: Knowledge, now_s: float) -> Asked:
        """The policy's answer to this job, new or active already, with its deadline. Changes nothing."""
        rows, jobs = self._decided(asked=record.job_id)
        table = self.board.table.copy(rows)
        if record.job_id in self.rows:
            index = [r.job_id for r, _ in jobs].index(record.job_id)
            jobs[index] = (record, knowledge)
        else:
            index = len(jobs)
            jobs.append((record, knowledge))
            table.grow([self._spec(record)])
            table.number[index] = self.board.next_number
        # The policy must see the deadline to decide on it, as if it had been promised already.
        deadline_s = {record.job_id: record.request.deadline_s}
        own = np.arange(len(jobs))
        snapshot = self._believe(table, own, jobs, now_s, cautious=True, deadlines=deadline_s, promising=True)
        return Asked(snapshot, index, self.limited.admit(snapshot, index))

    def accepted(self, asked: Asked) -> None:
        """Tell the policy that the job it answered was taken in."""
        self.limited.accepted(asked.snapshot, asked.index, asked.admission)

    def endangered(self, calendar: Calendar, now_s: float, teams: Teams | None = None) -> list[str]:
        """Jobs whose promised finish could not be kept beside this calendar, with these teams (None: with
        the present ones). Changes nothing."""
        rows, jobs = self._decided()
        if not any(_promised(record) is not None for record, _ in jobs):
            return []
        own, table = np.arange(len(jobs)), self.board.table.copy(rows)
        snapshot = self._believe(table, own, jobs, now_s, cautious=True, calendar=calendar)
        policy = self.limited
        if teams is not None:
            policy = replace(policy, policy=self.policy.asked_with(teams))
            snapshot.team = [teams.of(record.owner) for record, _ in jobs]
        return [jobs[i][0].job_id for i in policy.endangered(snapshot).tolist()]

    def endangered_without(self, nodes: Collection[str], now_s: float) -> list[str]:
        """Jobs whose promised finish could be kept now, but not without these nodes. Changes nothing."""
        calendar = self.board.calendar
        away = calendar.having(Reservation(name="slow-nodes", nodes=tuple(sorted(nodes))))
        before = self.endangered(calendar, now_s)
        return sorted(set(self.endangered(away, now_s)) - set(before))

    def promising(self, now_s: float) -> Snapshot:
        """The jobs that may run, those that are profiled included, on all nodes that may be rented.

        Changes nothing.
        """
        rows, jobs = self._decided(profiled=True)
        own, table = np.arange(len(jobs)), self.board.table.copy(rows)
        return self.limited.shown(self._believe(table, own, jobs, now_s, promising=True)).part

    # -- decisions ---------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[tuple[str, Move]]:
        """Let the policy decide; returns the moves of all jobs whose slots change."""
        board, table = self.board, self.board.table
        self.profiling.begin(self.book.records, board, now_s, self._profiling_limit)
        rows, jobs = self._decided()
        snapshot = self._believe(table, rows, jobs, now_s)
        self.over_limit = {}
        self.rhythm.due_s = math.inf
        decision = Decision(np.zeros(len(snapshot), dtype=np.int64))
        if len(snapshot) and (snapshot.capacity or self.renting is None):
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
        moves = board.carry_out(snapshot, decision, self._profiled())
        shown = set(rows.tolist())
        for move in moves:
            if move.row in shown:
                curves = snapshot.curves.on(gpu_type_of(self.cluster, move.after))
                rate = curves.rates[table.curve[move.row], len(move.after)]
                table.rate[move.row] = rate / self._part_counted_on
        if len(snapshot):
            self.rhythm.decided(now_s, self.limited.next_wakeup_s(snapshot, decision))
        return [(table.specs[move.row].job_id, move) for move in moves]

    def _profiled(self) -> dict[int, int]:
        """The slots of each profiling run, by row, as far as there are enough."""
        shares: dict[int, int] = {}
        for row, size in self.profiling.shares(self.rows).items():
            job_id = self.board.table.specs[row].job_id
            free = self.profiling.capacity(self.cluster, job_id) - sum(shares.values())
            shares[row] = min(size, free) if free >= self.board.table.min_gpus[row] else 0
        return shares

    def _decided(
        self, asked: str | None = None, *, profiled: bool = False
    ) -> tuple[IntArray, list[tuple[JobRecord, Knowledge]]]:
        """Rows and jobs that the policy decides on, oldest first: all but paused and profiled jobs.

        The job `asked` is included in any case, and profiled jobs are if `profiled`.
        """
        rows, jobs = [], []
        for row in self.board.active.tolist():
            job_id = self.board.table.specs[row].job_id
            record = self.book.records[job_id]
            decided = record.phase in _DECIDED and (profiled or job_id not in self.profiling.runs)
            if job_id == asked or decided:
                rows.append(row)
                jobs.append((record, self.book.known[job_id]))
        return np.array(rows, dtype=np.int64), jobs

    def _profiled_by_user(self, jobs: Sequence[tuple[JobRecord, Knowledge]]) -> dict[str, Use]:
        """By user: what profiling runs of other jobs than these use."""
        shown, records = {record.job_id for record, _ in jobs}, self.book.records
        return used_by(
            (records[job_id].owner, run.size)
            for job_id, run in self.profiling.runs.items()
            if run.size and job_id in records and job_id not in shown
        )

    def _profiled_by_team(self) -> dict[str, int]:
        """By team: the slots of its profiling runs."""
        taken: dict[str, int] = {}
        for job_id, run in self.profiling.runs.items():
            if run.size and job_id in self.rows and job_id in self.book.records:
                team = self.teams.of(self.book.records[job_id].owner)
                taken[team] = taken.get(team, 0) + run.size
        return taken

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

    def _believe(
        self,
        table: JobTable,
        rows: IntArray,
        jobs: Sequence[tuple[JobRecord, Knowledge]],
        now_s: float,
        *,
        cautious: bool = False,
        deadlines: dict[str, float | None] | None = None,
        calendar: Calendar | None = None,
        promising: bool = False,
    ) -> Snapshot:
        """Enter what is known of these jobs into a table, and make the snapshot that the policy sees.

        A policy that gives promises counts on neighbours that fill the GPU, where slots share one: if it
        planned with more when it decides, it would find too late that a promised job needs more slots.
        `calendar`: reservations in place of the present ones, to ask what would be. `promising`: count all
        nodes that may be rented, and the time that they take to start.
        """
        profiled = self.profiling.reserved(self.board, self.rows)
        self.policy.taken = self._profiled_by_team()
        self.limited.used = self._profiled_by_user(jobs)
        cluster = self.promised if promising else self.cluster
        if calendar is not None and calendar != self.board.calendar:
            cluster = self._beside(calendar, now_s)
        cluster, calendar = cluster.without(profiled), self.board.calendar if calendar is None else calendar
        ahead = None
        if calendar:
            until_s = max((record.request.deadline_s or 0.0 for record, _ in jobs), default=0.0)
            ahead = calendar.ahead(self.board.base.without(profiled), now_s, until_s)
        widest = max(cluster.capacity, 1 if ahead is None else int(ahead.gpus.max()), 1)
        if promising:
            widest = max(widest, self.promised.capacity)
        each_type = self.tells_types_apart
        held = [table.placement[row] for row in rows.tolist()]
        curves = believed_curves(jobs, held, cluster, widest, each_type=each_type, cautious=cautious)
        for row, (record, knowledge) in zip(rows.tolist(), jobs, strict=True):
            table.belief[row] = knowledge.speed.belief
            table.team[row] = self.teams.of(record.owner)
            if each_type:
                table.belief_by_type[row] = believed_on(knowledge.speed, cluster.gpu_types)
        self._keep_promised_types()
        # Column by column: there may be thousands of jobs, and people wait for the answer.
        table.curve[rows] = np.arange(len(rows))
        asked = deadlines or {}
        last_s = [asked.get(r.job_id) or _promised(r) or np.inf for r, _ in jobs]
        # A job's last step must be done a little before the deadline, because processes take time to end.
        table.deadline_s[rows] = np.array(last_s) - [knowledge.closing_s for _, knowledge in jobs]
        least = [record.request.min_workers for record, _ in jobs]
        bounds = [min(record.max_workers or widest, widest) for record, _ in jobs]
        for i, (record, _) in enumerate(jobs):
            if record.most_workers is not None:  # it may ask for more, and would wait for ever
                table.requested[rows[i]] = max(min(table.specs[rows[i]].gpus, bounds[i]), least[i])
        table.min_gpus[rows] = least
        table.known[rows] = [knowledge.known for _, knowledge in jobs]
        table.max_gpus[rows] = [
            max(knowledge.speed.most_workers(bound), low)
            for (_, knowledge), bound, low in zip(jobs, bounds, least, strict=True)
        ]
        self._enter_progress(table, rows, jobs, curves.rates, now_s)
        if cautious or self.gives_promises:
            curves = beside_neighbours(curves, cluster)
        pause_s = max((knowledge.pause_s for _, knowledge in jobs), default=0.0)
        start_s = max((knowledge.startup_s for _, knowledge in jobs), default=0.0)
        if promising and self.renting is not None:
            start_s += self.renting.start_s
        round_s = self.rhythm.interval_s or 0.0
        costs = (pause_s + round_s, start_s + round_s)
        return Snapshot(now_s, cluster, table, rows, curves, *costs, ahead=ahead)

    @property
    def _part_counted_on(self) -> float:
        """Which part of a job's measured speed the policy counts on when it decides."""
        return promised_part(self.cluster.per_gpu) if self.gives_promises else 1.0

    def _keep_promised_types(self) -> None:
        """Tell the policy on which GPU type jobs were promised a finish; after a restart it does not know."""
        if self.tells_types_apart:
            number, records = self.board.table.number, self.book.records
            promised = (
                (row, records[job_id].promise.gpu_type)
                for job_id, row in self.rows.items()
                if job_id in records
            )
            self.policy.keep_promises({int(number[row]): kind for row, kind in promised if kind is not None})

    def _beside(self, calendar: Calendar, now_s: float) -> Cluster:
        """What reservations of this calendar would leave now."""
        held = self.board.held_by(self.board.base, calendar.at(now_s))
        return self.board.base.without(frozenset[int]().union(*held.values()))

    def _enter_progress(
        self,
        table: JobTable,
        rows: IntArray,
        jobs: Sequence[tuple[JobRecord, Knowledge]],
        rates: FloatArray,
        now_s: float,
    ) -> None:
        """Enter the progress that jobs reported since the last time; between reports it is extrapolated."""
        live = table is self.board.table
        held = np.minimum(table.gpus[rows], rates.shape[1] - 1)
        speed = np.where(held > 0, rates[np.arange(len(rows)), held], 0.0) if len(rows) else np.empty(0)
        for i in np.flatnonzero(speed != table.rate[rows]).tolist():
            table.settle(int(rows[i]), now_s)
            table.rate[rows[i]] = speed[i]
        for i, (record, knowledge) in enumerate(jobs):
            reported = (record.done, knowledge.length.of)
            if self._entered.get(record.job_id) != reported:
                table.settle(int(rows[i]), now_s)
                table.left[rows[i]] = knowledge.length.left(record.done)
                if live:
                    self._entered[record.job_id] = reported

    # -- what the board and the table need ---------------------------------------------------------------

    def _begin_with(self, policy: Policy) -> None:
        """Ask this policy from now on, within the present teams and limits."""
        self.policy = by_team(policy, self.teams)
        self.limited = by_user(self.policy, self.limits.of_policy)
        self.rhythm = self._rhythm()

    def _rhythm(self) -> Rhythm:
        own_s = self.policy.interval_s
        return Rhythm(self.policy, own_s if self._interval_s is None else self._interval_s)

    def _pause_s(self, row: int, before: int, after: int) -> float:
        """Seconds without training that a change of slots is believed to cost."""
        knowledge = self.book.known[self.board.table.specs[row].job_id]
        return knowledge.pause_s if before else knowledge.startup_s

    def _spec(self, record: JobRecord) -> JobSpec:
        request, size = record.request, record.request.workers_per_replica
        whole = max(sum(node.gpus for node in self.cluster.nodes), 1)
        return JobSpec(
            job_id=record.job_id,
            submit_s=record.submitted_s,
            model=record.job_id,
            batch_size=1,
            gpus=min(request.workers, whole - whole % size or size),
            deadline_s=_promised(record),
            min_gpus=request.min_workers,
            max_gpus=record.max_workers,
            gpus_per_replica=request.workers_per_replica,
            weight=request.weight,
            user=record.owner,
            team=self.teams.of(record.owner),
            priority=request.priority,
        )


def _promised(record: JobRecord) -> float | None:
    """The deadline that the policy must keep; None if none was promised."""
    deadline_s = record.request.deadline_s
    promised = record.promise.admitted and not record.promise.pending
    if deadline_s is None or deadline_s <= record.submitted_s or not promised:
        return None
    return deadline_s
