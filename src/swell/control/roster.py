"""The active jobs on the board: which row of its table each job has, and what was entered there.

People and the book know a job by its id, the board and the policies by its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from swell.board import Board
from swell.control.book import Book
from swell.control.knowledge import Knowledge, Speed
from swell.control.model import JobRecord, Phase
from swell.domain import Calendar, Cluster, FloatArray, IntArray, JobSpec, Placement, SlotsAhead, Teams
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves, in_steps
from swell.policies import JobTable

# GPU types on the live platform: which type a job is on, and its believed curves on each type.


def gpu_type_of(cluster: Cluster, placement: Placement) -> str:
    """The GPU type that most of these slots have; empty for no slots."""
    if not placement:
        return ""
    if len(cluster.gpu_types) == 1:
        return cluster.gpu_types[0]
    node_of, nodes = cluster.node_of_gpu, cluster.nodes
    return Counter(nodes[int(node_of[slot])].gpu_type for slot in placement).most_common(1)[0][0]


def main_type(cluster: Cluster) -> str:
    """The GPU type with the most slots."""
    slots: dict[str, int] = {}
    for node in cluster.nodes:
        slots[node.gpu_type] = slots.get(node.gpu_type, 0) + node.gpus
    return max(slots, key=lambda kind: slots[kind])


def widest_nodes(cluster: Cluster) -> dict[str, int]:
    """For each GPU type the slots of its largest node."""
    widest: dict[str, int] = {}
    for node in cluster.nodes:
        widest[node.gpu_type] = max(widest.get(node.gpu_type, 1), node.gpus)
    return widest


def believed_curves(
    jobs: Sequence[tuple[JobRecord, Knowledge]],
    held: Sequence[Placement],
    cluster: Cluster,
    widest: int,
    *,
    each_type: bool,
    cautious: bool = False,
) -> Curves:
    """A curve for each job on the type that it is on, and with `each_type` on every type.

    A waiting job counts as on the main type. `held`: the slots that each job has; `widest`: the most slots
    that a curve has to answer for. `cautious`: as promises count.
    """
    first, width = main_type(cluster), widest_nodes(cluster)
    if not each_type:
        width = dict.fromkeys(width, cluster.gpus_per_node)
    kinds = cluster.gpu_types if each_type else ()
    rates = np.zeros((max(len(jobs), 1), widest + 1))

    def curve(speed: Speed, kind: str) -> FloatArray:
        found = speed.curve_on(kind, widest, width[kind], cautious=cautious)
        return found if cautious or kind != (speed.gpu_type or kind) else speed.trials.hopeful(found)

    by_type: dict[str, FloatArray] = {kind: np.zeros(rates.shape) for kind in kinds}
    for i, (record, knowledge) in enumerate(jobs):
        replica, speed = record.request.workers_per_replica, knowledge.speed
        for kind, own in by_type.items():
            own[i] = in_steps(curve(speed, kind), replica)
        on = gpu_type_of(cluster, held[i]) or first
        if each_type:
            rates[i] = by_type[on][i]
        else:
            rates[i] = in_steps(curve(speed, on), replica)
    return Curves(rates, {kind: Curves(own) for kind, own in by_type.items()})


def believed_on(speed: Speed, kinds: Sequence[str]) -> Mapping[str, JobBelief]:
    """The belief about a job on each of these types, as far as there is one."""
    found = {kind: speed.on(kind) for kind in kinds}
    return {kind: belief for kind, belief in found.items() if belief is not None}


_DECIDED = (Phase.QUEUED, Phase.RUNNING)
"""Phases in which the policy decides on a job."""


@dataclass(frozen=True, slots=True)
class JobRows:
    """Jobs with what is known of them and their rows in a table, oldest first."""

    table: JobTable
    rows: IntArray
    jobs: list[tuple[JobRecord, Knowledge]]

    def apart(self) -> JobRows:
        """The same jobs in a table of their own, for a question that must change nothing."""
        return JobRows(self.table.copy(self.rows), np.arange(len(self.jobs)), self.jobs)


class Roster:
    """The board, and the rows of the jobs on it."""

    def __init__(self, book: Book, cluster: Cluster, placer: str) -> None:
        self.book = book
        self.board = Board(cluster, placer, self._pause_s)
        self.rows: dict[str, int] = {}
        """The board's row of each active job."""
        self._entered: dict[str, tuple[float, float | None]] = {}
        """By job: the progress and length that were last entered into the board's table."""

    def add(self, record: JobRecord, teams: Teams) -> bool:
        """Add an active job; False if the slots it had are gone or belong to another job."""
        row = self.rows[record.job_id] = self.board.add(spec_of(record, self.board.cluster, teams))
        started_s = record.started_s or record.submitted_s
        return not record.wanted or self.board.adopt(row, record.wanted, started_s)

    def remove(self, job_id: str) -> bool:
        """Remove a job that is no longer active; False if it was not there."""
        self._entered.pop(job_id, None)
        row = self.rows.pop(job_id, None)
        if row is not None:
            self.board.remove(row)
        return row is not None

    def trains_from(self, job_id: str, moment_s: float, now_s: float) -> None:
        """Note the moment at which the job trains (again) after its last start or resize."""
        row = self.rows[job_id]
        self.board.table.settle(row, now_s)
        self.board.table.paused_until_s[row] = moment_s

    def released(self, job_id: str, now_s: float) -> None:
        """Note that the job has given all its slots back without a decision."""
        self.board.release(self.rows[job_id], now_s)

    def listed(self, *, without: Container[str] = (), asked: str | None = None) -> JobRows:
        """The jobs that the policy decides on: all but paused ones and those in `without`.

        The job `asked` is listed in any case.
        """
        rows, jobs = [], []
        for row in self.board.active.tolist():
            job_id = self.board.table.specs[row].job_id
            record = self.book.records[job_id]
            if job_id == asked or (record.phase in _DECIDED and job_id not in without):
                rows.append(row)
                jobs.append((record, self.book.known[job_id]))
        return JobRows(self.board.table, np.array(rows, dtype=np.int64), jobs)

    def listed_with(
        self, record: JobRecord, knowledge: Knowledge, teams: Teams, *, without: Container[str]
    ) -> tuple[JobRows, int]:
        """The jobs that the policy decides on and this one, new or active already, in a table of their own.

        Also returns where this job is among them.
        """
        listed = self.listed(without=without, asked=record.job_id).apart()
        table, jobs = listed.table, listed.jobs
        if record.job_id in self.rows:
            index = [r.job_id for r, _ in jobs].index(record.job_id)
            jobs[index] = (record, knowledge)
        else:
            index = len(jobs)
            jobs.append((record, knowledge))
            table.grow([spec_of(record, self.board.cluster, teams)])
            table.number[index] = self.board.next_number
        return JobRows(table, np.arange(len(jobs)), jobs), index

    def promised_types(self) -> dict[int, str]:
        """By number of a job: the GPU type that its finish was promised on."""
        number, records = self.board.table.number, self.book.records
        promised = (
            (row, records[job_id].promise.gpu_type) for job_id, row in self.rows.items() if job_id in records
        )
        return {int(number[row]): kind for row, kind in promised if kind is not None}

    def enter_progress(self, listed: JobRows, rates: FloatArray, now_s: float) -> None:
        """Enter the progress that jobs reported since the last time; between reports it is extrapolated."""
        table, rows = listed.table, listed.rows
        live = table is self.board.table
        held = np.minimum(table.gpus[rows], rates.shape[1] - 1)
        speed = np.where(held > 0, rates[np.arange(len(rows)), held], 0.0) if len(rows) else np.empty(0)
        for i in np.flatnonzero(speed != table.rate[rows]).tolist():
            table.settle(int(rows[i]), now_s)
            table.rate[rows[i]] = speed[i]
        for i, (record, knowledge) in enumerate(listed.jobs):
            reported = (record.done, knowledge.length.of)
            if self._entered.get(record.job_id) != reported:
                table.settle(int(rows[i]), now_s)
                table.left[rows[i]] = knowledge.length.left(record.done)
                if live:
                    self._entered[record.job_id] = reported

    def _pause_s(self, row: int, before: int, after: int) -> float:
        """Seconds without training that a change of slots is believed to cost."""
        knowledge = self.book.known[self.board.table.specs[row].job_id]
        return knowledge.pause_s if before else knowledge.startup_s


def spec_of(record: JobRecord, cluster: Cluster, teams: Teams) -> JobSpec:
    """The job as it is entered into a table."""
    request, size = record.request, record.request.workers_per_replica
    whole = max(sum(node.gpus for node in cluster.nodes), 1)
    return JobSpec(
        job_id=record.job_id,
        submit_s=record.submitted_s,
        model=record.job_id,
        batch_size=1,
        gpus=min(request.workers, whole - whole % size or size),
        deadline_s=promised_deadline_s(record),
        min_gpus=request.min_workers,
        max_gpus=record.max_workers,
        gpus_per_replica=request.workers_per_replica,
        weight=request.weight,
        user=record.owner,
        team=teams.of(record.owner),
        priority=request.priority,
    )


def promised_deadline_s(record: JobRecord) -> float | None:
    """The deadline that the policy must keep; None if none was promised."""
    deadline_s = record.request.deadline_s
    promised = record.promise.admitted and not record.promise.pending
    if deadline_s is None or deadline_s <= record.submitted_s or not promised:
        return None
    return deadline_s


# What a policy is asked, and the parts of the snapshot that it sees: slots, columns of the table, costs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a policy is asked, as far as the snapshot depends on it."""

    cautious: bool = False
    """Whether only speeds count that a promise may be made with (`Speed.curve_on`)."""
    rentable: bool = False
    """Whether all nodes that may be rented count, with the time that they take to start."""
    calendar: Calendar | None = None
    """Reservations in place of the present ones, to ask what would be; None for the present ones."""
    deadlines_s: Mapping[str, float | None] = field(default_factory=dict)
    """By job: a deadline that counts as if it had been promised already."""


DECIDE = Question()
"""How many slots each job is to have now."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that a policy may count on."""

    cluster: Cluster
    """Those that can be given to jobs now."""
    ahead: SlotsAhead | None
    """How many there are over time; None if always those of `cluster`."""
    widest: int
    """The most slots that there are at any time: as far as curves have to answer."""


def slots_for(
    question: Question,
    board: Board,
    present: Cluster,
    profiled: Collection[int],
    jobs: Sequence[tuple[JobRecord, Knowledge]],
    now_s: float,
) -> Slots:
    """The slots that count for a question.

    `present`: the cluster beside the present reservations, with all nodes that may be rented if these count;
    `profiled`: slots of profiling runs, which do not count.
    """
    calendar = board.calendar if question.calendar is None else question.calendar
    cluster = present
    if calendar != board.calendar:
        held = board.held_by(board.base, calendar.at(now_s))
        cluster = board.base.without(frozenset[int]().union(*held.values()))
    cluster, ahead = cluster.without(profiled), None
    widest = max(cluster.capacity, present.capacity if question.rentable else 0, 1)
    if calendar:
        until_s = max((record.request.deadline_s or 0.0 for record, _ in jobs), default=0.0)
        ahead = calendar.ahead(board.base.without(profiled), now_s, until_s)
        widest = max(widest, int(ahead.gpus.max()))
    return Slots(cluster, ahead, widest)


def enter_beliefs(listed: JobRows, teams: Teams, gpu_types: Sequence[str]) -> None:
    """Enter what is believed of the speed of jobs, on each of these GPU types too, and the teams of jobs."""
    table = listed.table
    for row, (record, knowledge) in zip(listed.rows.tolist(), listed.jobs, strict=True):
        table.belief[row] = knowledge.speed.belief
        table.team[row] = teams.of(record.owner)
        if gpu_types:
            table.belief_by_type[row] = believed_on(knowledge.speed, gpu_types)
    # Column by column, here and below: there may be thousands of jobs, and people wait for the answer.
    table.curve[listed.rows] = np.arange(len(listed.rows))
    table.known[listed.rows] = [knowledge.known for _, knowledge in listed.jobs]


def enter_bounds(listed: JobRows, widest: int, deadlines_s: Mapping[str, float | None]) -> None:
    """Enter within how many workers, at most `widest`, and by when jobs are to be planned.

    `deadlines_s`: by job, deadlines that count as promised.
    """
    table, rows, jobs = listed.table, listed.rows, listed.jobs
    last_s = [deadlines_s.get(r.job_id) or promised_deadline_s(r) or np.inf for r, _ in jobs]
    # A job's last step must be done a little before the deadline, because processes take time to end.
    table.deadline_s[rows] = np.array(last_s) - [knowledge.closing_s for _, knowledge in jobs]
    least = [record.request.min_workers for record, _ in jobs]
    bounds = [min(record.max_workers or widest, widest) for record, _ in jobs]
    for i, (record, _) in enumerate(jobs):
        if record.most_workers is not None:  # it may ask for more, and would wait for ever
            table.requested[rows[i]] = max(min(table.specs[rows[i]].gpus, bounds[i]), least[i])
    table.min_gpus[rows] = least
    table.max_gpus[rows] = [
        max(knowledge.speed.most_workers(bound), low)
        for (_, knowledge), bound, low in zip(jobs, bounds, least, strict=True)
    ]


def costs_s(
    jobs: Sequence[tuple[JobRecord, Knowledge]], round_s: float, node_start_s: float
) -> tuple[float, float]:
    """What a resize and a start cost a job: the most that either takes, and waiting for a round.

    `node_start_s`: what a node that has to be rented takes to start.
    """
    pause_s = max((knowledge.pause_s for _, knowledge in jobs), default=0.0)
    start_s = max((knowledge.startup_s for _, knowledge in jobs), default=0.0)
    return pause_s + round_s, start_s + node_start_s + round_s
