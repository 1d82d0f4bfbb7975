"""The events that a simulation writes about its jobs, with the fields that a live cluster writes too."""

from __future__ import annotations

from typing import Any

from swell.board import Move
from swell.domain import NORMAL, Cluster, Event, EventKind, JobSpec


def submitted_figures(spec: JobSpec) -> dict[str, Any]:
    """What the event of a submission says of the job; what is as for most jobs is left out."""
    figures: dict[str, Any] = {
        "model": spec.model,
        "batch_size": spec.batch_size,
        "gpus": spec.gpus,
        "work": spec.work,
        "deadline_s": spec.deadline_s,
    }
    if spec.user:
        figures["owner"] = spec.user
    if spec.team:
        figures["team"] = spec.team
    if spec.priority != NORMAL:
        figures["priority"] = spec.priority
    if spec.fill != 1.0:
        figures["fill"] = spec.fill
    return figures


def move_event(now_s: float, job_id: str, move: Move, cluster: Cluster) -> Event:
    """The event that records a job's change of GPUs."""
    data: dict[str, Any] = {"gpus": move.after, "before": move.before, "pause_s": move.pause_s}
    data |= cluster.type_figure(move.after)
    if not move.before:
        kind = EventKind.ALLOCATED
        del data["before"]
    elif move.after:
        kind = EventKind.RESIZED
    else:
        kind, data = EventKind.PREEMPTED, {"before": move.before}
    return Event(now_s, kind, job_id=job_id, data=data | ({"reason": move.reason} if move.reason else {}))
