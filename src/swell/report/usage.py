"""Who used what: GPU time by user, team, model or job, read from an event log.

Every GPU-second that a job held is counted once, as one of

- *paused*: a start or a resize during which the job did not train,
- *lost*: a job that failed, or steps that were repeated because a death took them,
- *useful*: all the rest.

Beside these stand what was *lent* (held beyond the quota of the job's team) and what was *waited* (a job had
been submitted, was not over, and held nothing).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from swell.domain import Event, EventKind, FloatArray
from swell.report.lanes import CHANGES, Lane, Lanes, lanes

By = Literal["user", "team", "model", "job"]
NOBODY = "(none)"


@dataclass(slots=True)
class Usage:
    """One row: what one user, team, model or job used. Times in GPU-seconds; `waited_s` in seconds."""

    of: str
    jobs: int = 0
    held_s: float = 0.0
    useful_s: float = 0.0
    paused_s: float = 0.0
    lost_s: float = 0.0
    lent_s: float = 0.0
    waited_s: float = 0.0

    def add(self, other: Usage) -> None:
        """Add another row's figures to this one."""
        for one in fields(self)[1:]:
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def to_json(self) -> dict[str, Any]:
        """Plain values, in hours."""
        hours = {
            one.name.removesuffix("_s") + ("_hours" if one.name == "waited_s" else "_gpu_hours"): round(
                getattr(self, one.name) / 3600, 6
            )
            for one in fields(self)[2:]
        }
        return {"of": self.of, "jobs": self.jobs} | hours


@dataclass(slots=True)
class _Facts:
    """Facts from a job's events that its lane does not have."""

    names: dict[str, str]
    """By what the job may be counted: 'user', 'team', 'model', 'job'."""
    pauses: list[tuple[float, float]]
    """Moments of starts and resizes, and how long the job stood still."""
    done: list[tuple[float, float]]
    """Moments of progress reports, and how far the job was."""


def usage(
    events: Iterable[Event],
    by: By,
    *,
    now_s: float,
    since_s: float = 0.0,
    quotas: Mapping[str, int] | None = None,
) -> list[Usage]:
    """Usage between `since_s` and `now_s`, the largest user first.

    Args:
        events: the log from its beginning, oldest first.
        quotas: slots that each team has for itself; without it nothing counts as lent.
    """
    log = list(events)
    drawn, facts = lanes(log), _facts(log)
    lent = _lent(drawn, facts, quotas or {}, now_s)
    rows: dict[str, Usage] = {}
    for job_id, lane in drawn.jobs.items():
        row = _row(lane, facts[job_id], since_s, now_s, lent)
        if row is not None:
            of = facts[job_id].names[by]
            rows.setdefault(of, Usage(of)).add(row)
    return sorted(rows.values(), key=lambda row: (-row.held_s, -row.waited_s, row.of))


def _facts(log: Iterable[Event]) -> dict[str, _Facts]:
    facts: dict[str, _Facts] = {}
    for event in log:
        if event.job_id is None:
            continue
        job = facts.get(event.job_id)
        if job is None:
            names = {"user": NOBODY, "team": NOBODY, "model": NOBODY, "job": event.job_id}
            job = facts[event.job_id] = _Facts(names, [], [])
        data = event.data
        if event.kind is EventKind.SUBMITTED:
            model = PurePath(str(data.get("model") or NOBODY)).name
            job.names |= {"user": str(data.get("owner") or NOBODY), "team": str(data.get("team") or NOBODY)}
            job.names |= {"model": model, "job": str(data.get("name") or event.job_id)}
        elif event.kind in CHANGES:
            job.pauses.append((event.time_s, float(data.get("pause_s") or 0.0)))
        elif event.kind is EventKind.PROGRESS and isinstance(data.get("done"), (int, float)):
            job.done.append((event.time_s, float(data["done"])))
    return facts


def _row(
    lane: Lane, facts: _Facts, since_s: float, now_s: float, lent: Mapping[str, tuple[FloatArray, FloatArray]]
) -> Usage | None:
    """One job's figures between two moments; None if it neither held nor waited for anything then."""
    submitted_s = lane.submitted_s if lane.submitted_s is not None else 0.0
    ended_s = min(lane.ended_s if lane.ended_s is not None else now_s, now_s)
    began_s = max(submitted_s, since_s)
    if ended_s < began_s or lane.end == "rejected":
        return None
    held = _clipped(lane.held(now_s), since_s, now_s)
    row = Usage(lane.job_id, jobs=1, held_s=_spent(held))
    row.waited_s = max(ended_s - began_s - sum(end_s - begin_s for begin_s, end_s, _ in held), 0.0)
    pauses = [(moment, moment + pause_s) for moment, pause_s in facts.pauses]
    row.paused_s = _spent(_within(held, pauses))
    wasted = [(since_s, now_s)] if lane.end == "failed" else _repeated(facts.done)
    row.lost_s = _spent(_within(held, wasted)) - _spent(_within(_within(held, wasted), pauses))
    row.useful_s = row.held_s - row.paused_s - row.lost_s
    if (team := facts.names["team"]) in lent:
        moments, share = lent[team]
        row.lent_s = sum(
            gpus * float(np.interp(end_s, moments, share) - np.interp(begin_s, moments, share))
            for begin_s, end_s, gpus in held
        )
    return row


Stretch = tuple[float, float, int]


def _spent(held: Iterable[Stretch]) -> float:
    return float(sum((end_s - begin_s) * gpus for begin_s, end_s, gpus in held))


def _clipped(held: Iterable[Stretch], since_s: float, until_s: float) -> list[Stretch]:
    """The parts of stretches that lie between two moments."""
    cut = [(max(begin_s, since_s), min(end_s, until_s), gpus) for begin_s, end_s, gpus in held]
    return [stretch for stretch in cut if stretch[1] > stretch[0]]


def _within(held: Iterable[Stretch], spans: Iterable[tuple[float, float]]) -> list[Stretch]:
    """The parts of stretches that lie within any of the spans, each counted once."""
    joined: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(spans):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((begin_s, end_s))
    held = list(held)
    return [part for begin_s, end_s in joined for part in _clipped(held, begin_s, end_s)]


def _repeated(done: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans whose work was done again: a report shows less than one before it."""
    spans = []
    for number in range(1, len(done)):
        (before_s, highest), (_, fell_to) = done[number - 1], done[number]
        if fell_to < highest:
            reached_s = next(moment for moment, at in done if at >= fell_to)
            spans.append((reached_s, before_s))
    return spans


def _lent(
    drawn: Lanes, facts: Mapping[str, _Facts], quotas: Mapping[str, int], now_s: float
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """For each team: moments, and the integral up to each of the share of its GPUs that was lent."""
    held: dict[str, list[Stretch]] = defaultdict(list)
    for job_id, lane in drawn.jobs.items():
        held[facts[job_id].names["team"]] += lane.held(now_s)
    lent = {}
    for team, quota in quotas.items():
        if not held[team]:
            continue
        begin_s, end_s, gpus = np.array(held[team], dtype=float).T
        moments, index = np.unique(np.concatenate([begin_s, end_s]), return_inverse=True)
        had = np.cumsum(np.bincount(index, np.concatenate([gpus, -gpus]), len(moments)))[:-1]
        share = np.maximum(had - quota, 0.0) / np.maximum(had, 1.0)
        lent[team] = (moments, np.concatenate([[0.0], np.cumsum(share * np.diff(moments))]))
    return lent
