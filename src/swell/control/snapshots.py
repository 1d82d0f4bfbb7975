"""What a policy is asked, and the parts of the snapshot that it sees: slots, columns of the table, costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from swell.board import Board
from swell.control.knowledge import Knowledge
from swell.control.model import JobRecord
from swell.control.roster import JobRows, promised_deadline_s
from swell.control.typed import believed_on
from swell.domain import Ahead, Calendar, Cluster, Teams


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
    ahead: Ahead | None
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
