"""Swim-lanes: how many GPUs each job had and when, and how many there were, read from events alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swell.domain import Event, EventKind
from swell.domain.events import was_withdrawn

ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)
CHANGES = (EventKind.ALLOCATED, EventKind.RESIZED, EventKind.PREEMPTED)
NODES = (EventKind.NODE_JOINED, EventKind.NODE_LOST)
JOBS = (EventKind.SUBMITTED, *CHANGES, EventKind.WORKER_LOST, *ENDS)
"""The kinds of events that lanes of jobs are made of."""


@dataclass(slots=True)
class Lane:
    """One job's GPUs over time."""

    job_id: str
    name: str
    submitted_s: float | None = None
    """None if the job was submitted before the log begins."""
    deadline_s: float | None = None
    changes: list[tuple[float, int]] = field(default_factory=list)
    """Moments, and how many GPUs the job had from then on."""
    resizes: int = 0
    pause_s: float = 0.0
    ended_s: float | None = None
    end: str | None = None
    """The kind of the event that ended the job; None while it goes on."""
    met: bool | None = None
    """Whether the job met its deadline; None if it has none or goes on."""
    withdrawn: bool = False
    """Whether a person cancelled the job, so that its deadline was neither met nor missed."""

    def held(self, until_s: float) -> list[tuple[float, float, int]]:
        """Stretches with GPUs: from, to, how many. The last one goes on until `until_s` at most."""
        ends = [moment for moment, _ in self.changes[1:]] + [until_s]
        return [
            (begin_s, end_s, gpus)
            for (begin_s, gpus), end_s in zip(self.changes, ends)
            if gpus and end_s > begin_s
        ]


@dataclass(slots=True)
class Lanes:
    """All jobs' lanes, and the cluster's capacity."""

    jobs: dict[str, Lane] = field(default_factory=dict)
    capacity: list[tuple[float, int]] = field(default_factory=list)
    """Moments, and how many GPUs were in service and not reserved from then on."""
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    """Moment, kind and subject of what went wrong or changed: lost workers, nodes that came and went."""
    began_s: float = 0.0
    ended_s: float = 0.0
    """Moments of the first and the last event."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the dashboard."""
        return {
            "jobs": {
                lane.job_id: {"name": lane.name, "changes": lane.changes, "ended_s": lane.ended_s}
                for lane in self.jobs.values()
                if lane.changes
            },
            "capacity": self.capacity,
            "marks": self.marks,
        }


def lanes(events: Iterable[Event], began_s: float | None = None) -> Lanes:
    """The lanes of a log, oldest event first. `began_s`: when the log begins, if not with its first event."""
    found, nodes, highest = Lanes(), list[Event](), -1
    for event in events:
        if began_s is None:
            began_s = event.time_s
        found.began_s, found.ended_s = began_s, max(found.ended_s, event.time_s)
        if event.kind in NODES:
            nodes.append(event)
            found.marks.append((event.time_s, event.kind.value, str(event.node)))
        elif event.kind is EventKind.HELD:
            nodes.append(event)
            highest = max([highest, *event.data["gpus"]])
        elif event.kind in JOBS:
            _job(found, event)
            highest = max([highest, *(event.data.get("gpus") or ())]) if event.kind in CHANGES else highest
    found.capacity = _capacity(nodes, found.began_s, highest + 1)
    return found


def _capacity(events: Iterable[Event], began_s: float, seen: int) -> list[tuple[float, int]]:
    """GPUs in service over time, without those that reservations hold. Nodes that never joined in this log
    were there before; the log of a simulation names only nodes that are lost, so there are at least as many
    GPUs as were ever given out."""
    up, steps, before = dict[str, int](), list[tuple[float, int]](), 0
    joined_first: bool | None = None
    for event in events:
        if event.kind is EventKind.HELD:
            steps.append((event.time_s, len(event.data["before"]) - len(event.data["gpus"])))
            continue
        if joined_first is None:
            joined_first = event.kind is EventKind.NODE_JOINED
        node, gpus = str(event.node), int(event.data.get("gpus") or 0)
        if event.kind is EventKind.NODE_LOST and node not in up:
            before += gpus
            up[node] = gpus
        change = gpus - up.get(node, 0) if event.kind is EventKind.NODE_JOINED else -up.get(node, 0)
        up[node] = up.get(node, 0) + change
        if change:
            steps.append((event.time_s, change))
    now = before if joined_first else max(before, seen)
    out = [(began_s, now)] if now else []
    for moment, change in steps:
        now += change
        if out and out[-1][0] == moment:
            out[-1] = (moment, now)
        else:
            out.append((moment, now))
    return out


def _job(found: Lanes, event: Event) -> None:
    assert event.job_id is not None
    data = event.data
    lane = found.jobs.get(event.job_id)
    if lane is None:
        lane = found.jobs[event.job_id] = Lane(event.job_id, event.job_id)
        before = len(data.get("before") or ())
        if before:  # the log begins in the middle of this job's life
            lane.changes.append((found.began_s, before))
    if event.kind is EventKind.SUBMITTED:
        lane.submitted_s = event.time_s
        lane.name = str(data.get("name") or event.job_id)
        deadline_s = data.get("deadline_s")
        lane.deadline_s = None if deadline_s is None else float(deadline_s)
    elif event.kind in CHANGES:
        lane.changes.append((event.time_s, len(data.get("gpus") or ())))
        lane.resizes += event.kind is EventKind.RESIZED
        lane.pause_s += float(data.get("pause_s") or 0.0) if event.kind is EventKind.RESIZED else 0.0
    elif event.kind is EventKind.WORKER_LOST:
        found.marks.append((event.time_s, event.kind.value, event.job_id))
    elif event.kind in ENDS:
        if lane.changes:
            lane.changes.append((event.time_s, 0))
        lane.ended_s, lane.end = event.time_s, event.kind.value
        met = data.get("met")
        lane.met = met if isinstance(met, bool) else None
        lane.withdrawn = was_withdrawn(event)


def apart(spans: Mapping[str, tuple[float, float]], colours: int) -> dict[str, int]:
    """A colour for each job such that jobs at the same time differ, as far as there are enough colours.

    `spans`: when each job began and ended. A job gets a colour that no job has at
    that time, the one given out longest ago, so that neighbours in time differ too.
    """
    given_at = [-1] * colours
    until_s = [-math.inf] * colours
    chosen: dict[str, int] = {}
    for number, (job_id, (began_s, ended_s)) in enumerate(sorted(spans.items(), key=lambda one: one[1][0])):
        free = [c for c in range(colours) if until_s[c] <= began_s] or list(range(colours))
        colour = min(free, key=lambda c: (given_at[c], c))
        given_at[colour], until_s[colour] = number, max(until_s[colour], ended_s)
        chosen[job_id] = colour
    return chosen
