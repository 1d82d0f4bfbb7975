"""A job's curves over time, read from the event log and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swell.domain import Event, EventKind

CHANGES = (
    EventKind.ALLOCATED,
    EventKind.RESIZED,
    EventKind.PREEMPTED,
    EventKind.WORKER_LOST,
    EventKind.CHECKPOINT_SAVED,
)
"""Kinds of events that are marked on the time axis of a job's curves."""


def series(events: Iterable[Event]) -> dict[str, Any]:
    """One job's progress as columns of equal length (null where a report lacks a value), and its changes."""
    reports, changes = [], []
    for event in events:
        if event.kind is EventKind.PROGRESS:
            reports.append((event.time_s, dict(event.data)))
        elif event.kind in CHANGES:
            changes.append({"time_s": event.time_s, "kind": event.kind.value} | dict(event.data))
    names = sorted({name for _, data in reports for name in data if name != "metrics"})
    metrics = sorted({name for _, data in reports for name in data.get("metrics") or {}})
    return {
        "time_s": [time_s for time_s, _ in reports],
        "curves": {name: [data.get(name) for _, data in reports] for name in names},
        "metrics": {name: [(data.get("metrics") or {}).get(name) for _, data in reports] for name in metrics},
        "changes": changes,
    }
