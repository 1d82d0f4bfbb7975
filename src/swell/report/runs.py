"""The figures of one event log, for comparison with others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from swell.domain import Event, FloatArray
from swell.report.lanes import Lane, Lanes, lanes

BINS = 240
"""Points of a curve over time."""


@dataclass(frozen=True)
class Run:
    """One log: a live period, or one trace under one policy."""

    label: str
    lanes: Lanes

    @classmethod
    def read(cls, label: str, events: Iterable[Event]) -> Run:
        return cls(label, lanes(events))

    @cached_property
    def jobs(self) -> list[Lane]:
        """All jobs, in order of submission."""
        return sorted(self.lanes.jobs.values(), key=lambda lane: lane.submitted_s or self.lanes.began_s)

    @cached_property
    def finished(self) -> list[Lane]:
        """Jobs that came to a good end, and whose beginning is in the log."""
        return [j for j in self.jobs if j.end == "finished" and j.submitted_s is not None]

    @property
    def refused(self) -> int:
        """Jobs that the policy did not admit."""
        return sum(job.end == "rejected" for job in self.jobs)

    @property
    def jct_s(self) -> FloatArray:
        """Completion times, sorted."""
        return np.sort([(j.ended_s or 0.0) - (j.submitted_s or 0.0) for j in self.finished])

    @property
    def deadlines(self) -> tuple[int, int]:
        """How many jobs with a deadline met it, and how many there were.

        A refused job did not meet it. One that a person cancelled does not count.
        """
        over = [job for job in self.jobs if job.end is not None and not job.withdrawn]
        with_deadline = [job for job in over if job.deadline_s is not None]
        met = sum(
            job.end == "finished"
            and (job.met if job.met is not None else (job.ended_s or 0.0) <= job.deadline_s)
            for job in with_deadline
            if job.deadline_s is not None
        )
        return met, len(with_deadline)

    @property
    def waiting(self) -> FloatArray:
        """The share of each finished job's life in which it had no GPU, sorted."""
        shares = []
        for job in self.finished:
            life_s = (job.ended_s or 0.0) - (job.submitted_s or 0.0)
            held_s = sum(end_s - begin_s for begin_s, end_s, _ in job.held(job.ended_s or 0.0))
            if life_s > 0:
                shares.append(max(1.0 - held_s / life_s, 0.0))
        return np.sort(shares)

    @property
    def fairness(self) -> float | None:
        """Jain's index of the mean GPUs that finished jobs had over their lives: 1 if all had the same."""
        means = []
        for job in self.finished:
            life_s = (job.ended_s or 0.0) - (job.submitted_s or 0.0)
            used = sum((end_s - begin_s) * gpus for begin_s, end_s, gpus in job.held(job.ended_s or 0.0))
            if life_s > 0:
                means.append(used / life_s)
        shares = np.array(means)
        return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())) if (shares > 0).any() else None

    @property
    def resizes(self) -> int:
        return sum(job.resizes for job in self.jobs)

    @cached_property
    def span(self) -> tuple[float, float]:
        """From the first submission to the last end."""
        submitted = [job.submitted_s for job in self.jobs if job.submitted_s is not None]
        return min(submitted, default=self.lanes.began_s), self.lanes.ended_s

    def capacity_at(self, times: FloatArray) -> FloatArray:
        """GPUs in service at some moments; NaN if the log does not have it."""
        known = self.lanes.capacity
        if not known:
            return np.full(len(times), np.nan)
        moments = np.array([moment for moment, _ in known])
        counts = np.array([gpus for _, gpus in known], dtype=float)
        return counts[np.maximum(np.searchsorted(moments, times, side="right") - 1, 0)]

    def nearly_over(self, share: float) -> float:
        """The moment by which this share of the jobs had ended; the very end if that is not much later."""
        began_s, last_s = self.span
        ends = sorted(job.ended_s or last_s for job in self.jobs if job.changes)
        if not ends:
            return last_s
        cut_s = ends[min(math.ceil(share * len(ends)), len(ends)) - 1] + 0.02 * (last_s - began_s)
        return cut_s if cut_s - began_s < 0.8 * (last_s - began_s) else last_s

    def used(self, until_s: float | None = None) -> tuple[FloatArray, FloatArray]:
        """Moments up to the end or `until_s`, and the mean GPUs in use around each."""
        began_s, ended_s = self.span
        ended_s = ended_s if until_s is None else until_s
        edges = np.linspace(began_s, max(ended_s, began_s + 1e-9), BINS + 1)
        moments, gpu_s = self._gpu_time
        gained = np.diff(np.interp(edges, moments, gpu_s)) if len(moments) else np.zeros(BINS)
        return (edges[:-1] + edges[1:]) / 2, gained / (edges[1] - edges[0])

    @cached_property
    def _gpu_time(self) -> tuple[FloatArray, FloatArray]:
        """Moments at which somebody's GPUs changed, and the GPU time used until then."""
        held = [stretch for job in self.jobs for stretch in job.held(self.span[1])]
        begin_s, end_s, gpus = np.array(held, dtype=float).reshape(-1, 3).T
        moments, index = np.unique(np.concatenate([begin_s, end_s]), return_inverse=True)
        change = np.bincount(index, np.concatenate([gpus, -gpus]), len(moments))
        spent = np.cumsum(change)[:-1] * np.diff(moments)
        return moments, np.concatenate([[0.0], np.cumsum(spent)])[: len(moments)]

    @property
    def utilisation(self) -> float | None:
        """The share of GPU time in service that jobs held."""
        times, used = self.used()
        there = self.capacity_at(times)
        return float(used.sum() / there.sum()) if np.isfinite(there).all() and there.sum() > 0 else None


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in groups that had the same jobs, so that they can be compared."""
    groups: dict[frozenset[str], list[Run]] = {}
    for run in runs:
        groups.setdefault(frozenset(run.lanes.jobs), []).append(run)
    return list(groups.values())
