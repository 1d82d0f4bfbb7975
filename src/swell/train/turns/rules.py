"""The jobs on one GPU: whether they train side by side or in turns, and whose turn it is.

Pure functions on a table that the jobs keep together. Side by side, a driver that switches between jobs may
cost them more than it saves. So whenever the jobs on a GPU change they try both: first turns, which shows how
fast each is alone, then side by side. They stay side by side only if together they are faster than in turns
and nobody is slower than turns would make it (`swell.perf.sharing`, which the simulator uses as well).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swell.perf.sharing import parts_in_turns, side_by_side

SLICE_S = 0.25
"""How long a turn takes for each worker that the job has on the GPU, or one step if that is longer."""
REVIEW_S = 600.0
"""How long a verdict holds while the jobs stay the same."""
TRIAL_S = 20.0
"""The longest that each half of a trial takes; who has shown nothing by then is not counted."""
ASKS_S = 1.0
"""Who waits for a turn asks again within this time, or is passed over."""
FORGETS = 0.8
"""A speed alone that is lower than the one before counts only so far: something else may have held it up."""
MOST_JOBS, MOST_PID, MOST_WORKERS = 256, 1 << 22, 64


@dataclass(slots=True)
class Neighbour:
    """A job on the GPU, as its leader describes it."""

    seen_s: float = 0.0
    step_s: float = 0.0
    alone: float = 0.0
    """Samples per second while no other job computed; 0 if not known."""
    beside: float = 0.0
    """Samples per second beside the others, in the latest trial; 0 if not known."""
    had_s: float = 0.0
    """When its last turn ended."""
    asks_s: float = 0.0
    """When it last asked for a turn in vain; 0 if it does not wait for one."""
    workers: int = 1
    """How many of its workers are on the GPU."""

    @classmethod
    def from_json(cls, job: Mapping[str, object]) -> Neighbour:
        """A job as the table in a file describes it: ValueError for nonsense."""
        return cls(
            seen_s=_number(job["seen_s"]),
            step_s=_number(job["step_s"]),
            alone=_number(job["alone"]),
            beside=_number(job["beside"]),
            had_s=_number(job["had_s"]),
            asks_s=_number(job["asks_s"]),
            workers=_workers(job["workers"]),
        )

    def active(self, now_s: float) -> bool:
        """Whether it trains at the moment: a job may also evaluate, or wait for its data."""
        return now_s - self.seen_s < 2.0 + 3.0 * self.step_s


@dataclass(slots=True)
class Table:
    """What the jobs on a GPU know of each other."""

    jobs: dict[int, Neighbour] = field(default_factory=dict)
    """By process id of each job's leader."""
    in_turns: bool = False
    trial: bool = False
    """Whether this is being tried; else it is the verdict of the last trial."""
    since_s: float = 0.0
    worth: float = 0.0
    """What the speeds side by side added up to in the last trial; 0 if there was none."""
    holder: int = 0
    """Whose turn it is; 0 for nobody's."""
    until_s: float = 0.0
    """When others may take the turn of a holder that has not come back."""

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object, now_s: float) -> Table:
        """The table in a file that any job on the GPU may have spoilt: ValueError for nonsense."""
        if not isinstance(content, Mapping) or not isinstance(jobs := content.get("jobs"), Mapping):
            raise ValueError("not a table")
        if len(jobs) > MOST_JOBS:
            raise ValueError(f"{len(jobs)} jobs")
        read = {int(pid): Neighbour.from_json(job) for pid, job in jobs.items()}
        if not all(0 < pid <= MOST_PID for pid in read):
            raise ValueError("a process id that cannot be")
        since_s, until_s = _number(content.get("since_s")), _number(content.get("until_s"))
        holder = int(_number(content.get("holder")))
        # A table of the future is one from before this machine was started anew.
        if max([since_s, *(job.seen_s for job in read.values())]) > now_s + 1.0:
            raise ValueError("times that are still to come")
        in_turns, trial = content.get("in_turns") is True, content.get("trial") is True
        return cls(read, in_turns, trial, since_s, _number(content.get("worth")), holder, until_s)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number that can be here")
    return float(value)


def _workers(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        raise ValueError(f"{value!r} is not a number of workers that can be here")
    return value


def enter(table: Table, pid: int, lives: Callable[[int], bool], now_s: float, workers: int = 1) -> Neighbour:
    """Note that a job trains on the GPU, and which others still do; a change begins a trial."""
    gone = [other for other in table.jobs if other != pid and not lives(other)]
    for other in gone:
        del table.jobs[other]
    before = table.jobs.get(pid)
    workers = min(workers, MOST_WORKERS)
    came = before is None or before.workers != workers
    if before is not None and came:
        before.alone = 0.0  # measured with another number of workers
    me = table.jobs.setdefault(pid, Neighbour())
    me.seen_s, me.workers = now_s, workers
    if table.holder in gone:
        table.holder = 0
    if gone or came:
        _begin_trial(table, now_s, forget=False)
    elif now_s - table.since_s > REVIEW_S and len(table.jobs) > 1 and not table.trial:
        _begin_trial(table, now_s, forget=True)
    return me


def leave(table: Table, pid: int, now_s: float) -> None:
    """Note that a job trains no longer on the GPU."""
    if table.jobs.pop(pid, None) is not None:
        if table.holder == pid:
            table.holder = 0
        _begin_trial(table, now_s, forget=False)


def _begin_trial(table: Table, now_s: float, *, forget: bool) -> None:
    """Try both ways. Only jobs whose speed alone is not known need turns for it; `forget` what is old."""
    for job in table.jobs.values():
        job.beside = 0.0
        job.alone = 0.0 if forget else job.alone
    several = len(table.jobs) > 1
    table.trial, table.since_s, table.worth = several, now_s, 0.0
    table.in_turns = several and not all(job.alone for job in table.jobs.values())


def measured(table: Table, pid: int, rate: float) -> None:
    """Note a job's speed, measured as the table says that the jobs train now."""
    job = table.jobs[pid]
    if table.in_turns or len(table.jobs) == 1:
        job.alone = max(rate, FORGETS * job.alone)
    else:
        job.beside = rate


def judge(table: Table, now_s: float) -> None:
    """Go on with the trial, if there is one; it ends with a verdict."""
    if not table.trial:
        return
    late = now_s - table.since_s > TRIAL_S
    active = [job for job in table.jobs.values() if job.active(now_s)]
    if table.in_turns:
        if late or all(job.alone for job in active):
            table.in_turns, table.since_s, table.holder = False, now_s, 0
        return
    if not late and not all(job.beside for job in active):
        return
    shown = [job for job in active if job.alone and job.beside]
    relative = [job.beside / job.alone for job in shown]
    table.worth = sum(relative)
    table.in_turns = not side_by_side(relative, parts_in_turns([job.workers for job in shown]))
    table.trial, table.since_s = False, now_s


def may_go(table: Table, pid: int, now_s: float) -> bool:
    """Whether it is this job's turn; if it is free, the job that had its last one longest ago takes it."""
    me = table.jobs[pid]
    if not table.in_turns or table.holder == pid:
        me.asks_s = 0.0
        return True
    me.asks_s = now_s
    if table.holder and now_s < table.until_s:
        return False
    asking = [other for other, job in table.jobs.items() if now_s - job.asks_s < ASKS_S]
    if min(asking, key=lambda other: (table.jobs[other].had_s, other)) != pid:
        return False
    me.asks_s = 0.0
    _hold(table, pid, now_s)
    return True


def end_turn(table: Table, pid: int, now_s: float) -> bool:
    """Give the turn to whoever asks for it; False if nobody does, so that it goes on."""
    if table.holder != pid:
        return True
    others = [job for other, job in table.jobs.items() if other != pid]
    if not any(now_s - job.asks_s < ASKS_S for job in others):
        _hold(table, pid, now_s)
        return False
    table.holder, table.jobs[pid].had_s = 0, now_s
    return True


def _hold(table: Table, pid: int, now_s: float) -> None:
    me = table.jobs[pid]
    table.holder, table.until_s = pid, now_s + SLICE_S * me.workers + 1.0 + 3.0 * me.step_s
