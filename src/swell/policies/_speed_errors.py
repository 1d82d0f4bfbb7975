"""How wrong beliefs about speed have turned out to be, and what that means for plans.

A belief is compared with what a running job really does. Once a job has run, its own error is known, and its
work is planned at the speed it really has. A job that has not run yet is planned with a margin that covers
most of the errors of the jobs before it: measured, and nothing while beliefs are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf.sharing import promised_part
from swell.policies._reservations import BoolArray
from swell.policies.snapshot import Snapshot

DEVIATIONS = 1.0
"""The margin of a job that has not run yet, in standard deviations of the errors seen."""
EXACT = 1e-6
"""Differences up to this are rounding."""


@dataclass
class SpeedErrors:
    """Believed over real speed, for the jobs that are running or have run."""

    numbers: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The active jobs whose speed has been seen, ascending."""
    ratios: FloatArray = field(default_factory=lambda: np.empty(0))
    """For each of them, believed over real speed."""
    jobs: int = 0
    """How many jobs have been seen, ended ones included."""
    squares: float = 0.0
    """The sum of their squared logarithmic errors."""

    def observe(self, snapshot: Snapshot) -> None:
        """Compare what is believed of the running jobs with what they do; forget jobs that are gone."""
        ratios, seen = self._known(snapshot)
        held = np.minimum(snapshot.gpus, snapshot.curves.max_gpus)
        real, least = snapshot.table.rate[snapshot.rows], snapshot.rate_at(held)
        # Where slots share GPUs, curves are those beside neighbours that fill the GPU. A job with other
        # neighbours is faster, up to its speed alone, but may have them later: that is no error.
        most = least / promised_part(snapshot.cluster.per_gpu)
        believed = np.clip(real, least, most)
        # A job whose row changed in this very moment may have lost GPUs: its rate is that of before.
        settled = snapshot.table.since_s[snapshot.rows] < snapshot.now_s
        runs = (snapshot.gpus > 0) & (real > 0) & (believed > 0) & settled
        now = np.divide(believed, real, out=np.ones(len(real)), where=runs)
        now[np.abs(now - 1) < EXACT] = 1.0
        first = runs & ~seen
        self.jobs += int(first.sum())
        self.squares += float((np.log(now[first]) ** 2).sum())
        keep = seen | runs
        self.numbers, self.ratios = snapshot.numbers[keep], np.where(runs, now, ratios)[keep]

    def factors(self, snapshot: Snapshot) -> FloatArray:
        """What to multiply each job's work with before it is planned with its believed curve."""
        ratios, seen = self._known(snapshot)
        deviation = math.sqrt(self.squares / self.jobs) if self.jobs else 0.0
        return np.where(seen, ratios, math.exp(DEVIATIONS * deviation))

    def _known(self, snapshot: Snapshot) -> tuple[FloatArray, BoolArray]:
        if not len(self.numbers):
            return np.ones(len(snapshot)), np.zeros(len(snapshot), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self.numbers, snapshot.numbers), len(self.numbers) - 1)
        seen = self.numbers[at] == snapshot.numbers
        return np.where(seen, self.ratios[at], 1.0), seen
