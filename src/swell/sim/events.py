"""The events that a simulation writes about its jobs, with the fields that a live cluster writes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swell.board import Move
from swell.domain import NORMAL, Cluster, Event, EventKind, JobSpec

EventSink = Callable[[Event], None]


class JobEvents:
    """Writes what happens to the jobs of a run, if anybody reads it."""

    def __init__(self, jobs: Sequence[JobSpec], sink: EventSink | None) -> None:
        self._jobs, self._sink = jobs, sink

    @property
    def wanted(self) -> bool:
        """Whether anybody reads the events; else there is no need to find out what they would say."""
        return self._sink is not None

    def write(self, now_s: float, kind: EventKind, row: int, **data: Any) -> None:
        """Write one event of a job."""
        if self._sink is not None:
            values = {k: (float(v) if isinstance(v, np.floating) else v) for k, v in data.items()}
            self._sink(Event(now_s, kind, job_id=self._jobs[row].job_id, data=values))

    def submitted(self, now_s: float, row: int) -> None:
        """Write that a job was submitted."""
        if self._sink is not None:
            self.write(now_s, EventKind.SUBMITTED, row, **_submitted_figures(self._jobs[row]))

    def moved(self, now_s: float, move: Move, cluster: Cluster) -> None:
        """Write that a job got, lost or changed its GPUs."""
        if self._sink is not None:
            kind, figures = _move_figures(move, cluster)
            self.write(now_s, kind, move.row, **figures)


def _submitted_figures(spec: JobSpec) -> dict[str, Any]:
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


def _move_figures(move: Move, cluster: Cluster) -> tuple[EventKind, dict[str, Any]]:
    """What the event of a job's change of GPUs says."""
    data: dict[str, Any] = {"gpus": move.after, "before": move.before, "pause_s": move.pause_s}
    data |= cluster.type_figure(move.after)
    if not move.before:
        kind = EventKind.ALLOCATED
        del data["before"]
    elif move.after:
        kind = EventKind.RESIZED
    else:
        kind, data = EventKind.PREEMPTED, {"before": move.before}
    return kind, data | ({"reason": move.reason} if move.reason else {})
