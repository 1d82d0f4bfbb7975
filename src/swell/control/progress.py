"""Which of a job's progress reports go into the event log: a bounded number, evenly spread over its life.

Jobs report twice a second. The log takes one report every `FIRST_S` seconds; once a job has `MOST` of them
every second one is deleted and the spacing doubles. So a curve is fine for a job of a minute, and a job of a
month has no more than `MOST` points. The first report of an epoch need not wait for all of that time, because
a sweep may wait for it. The last report before a job's end goes into the log in any case.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from swell.control.store import Store
from swell.domain import Event, EventKind

FIRST_S = 2.0
"""Seconds between two reports in the log at first."""
AT_EPOCH = 0.25
"""The part of that time after which the first report of another epoch goes into the log."""
MOST = 600
"""Most reports of one job in the log."""


@dataclass(slots=True)
class _Kept:
    count: int
    spacing_s: float
    last_s: float = float("-inf")
    epoch: object = None
    """The epoch of the last report in the log."""


class ProgressLog:
    """Decides which progress reports are written to the log, and thins those that are there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, _Kept] = {}
        self._newest: dict[str, Event] = {}
        """By job: the newest report that is not in the log."""

    def heard(self, event: Event) -> None:
        """Take a job's newest report."""
        assert event.job_id is not None
        self._newest[event.job_id] = event

    def due(self, ended: Collection[str]) -> dict[str, Event]:
        """The reports that belong in the log, by job: one now and then, and the last of jobs that ended."""
        return {
            job_id: event
            for job_id, event in self._newest.items()
            if job_id in ended or self._is_due(event, self._of(job_id))
        }

    def _is_due(self, event: Event, kept: _Kept) -> bool:
        part = AT_EPOCH if event.data.get("epoch") != kept.epoch else 1.0
        return event.time_s - kept.last_s >= kept.spacing_s * part

    def _of(self, job_id: str) -> _Kept:
        kept = self._jobs.get(job_id)
        if kept is None:
            # The log may hold reports from before a restart of the control plane.
            count, span_s = self._store.tally(job_id, EventKind.PROGRESS)
            kept = self._jobs[job_id] = _Kept(count, max(FIRST_S, span_s / max(count, 1)))
        return kept

    def written(self, job_id: str, now_s: float) -> None:
        """Count a report that was written to the log, and thin the log if it is full."""
        kept = self._of(job_id)
        written = self._newest.pop(job_id, None)
        kept.count, kept.last_s = kept.count + 1, now_s
        kept.epoch = None if written is None else written.data.get("epoch")
        if kept.count >= MOST:
            self._store.thin(job_id, EventKind.PROGRESS)
            kept.count -= kept.count // 2
            kept.spacing_s *= 2

    def forget(self, job_id: str) -> None:
        """Forget a job that is over."""
        self._jobs.pop(job_id, None)
        self._newest.pop(job_id, None)
