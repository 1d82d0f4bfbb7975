"""The active jobs on the board: which row of its table each job has, and what was entered there.

People and the book know a job by its id, the board and the policies by its row.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from swell.board import Board
from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.model import JobRecord, Phase
from swell.domain import Cluster, FloatArray, IntArray, JobSpec, Teams
from swell.policies import JobTable

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
