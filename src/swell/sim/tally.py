"""What a run adds up for its result."""

from __future__ import annotations

import numpy as np

from swell.domain import FloatArray, IntArray


class Tally:
    """How each job of a run has ended, and integrals over the time of the run."""

    def __init__(self, submit_s: FloatArray) -> None:
        jobs = len(submit_s)
        self._submit_s = submit_s
        self.finish_s: FloatArray = np.full(jobs, np.nan)
        self.promised_s: FloatArray = np.full(jobs, np.nan)
        self.rejected: IntArray = np.zeros(jobs, dtype=np.int64)
        self.ended = 0
        """How many jobs have finished or were refused."""
        self.mean_active: FloatArray = np.full(jobs, np.nan)
        """How many jobs were active on average while each job was, for finish-time fairness."""
        self._active_s = 0.0
        """Integral over time of the number of active jobs."""
        self._active_s_at_submit: FloatArray = np.zeros(jobs)
        self.capacity_gpu_s = 0.0
        """GPU-seconds in service."""

    def passed(self, seconds: float, active: int, capacity: int) -> None:
        """Time has passed, with so many active jobs and GPUs in service."""
        self._active_s += seconds * active
        self.capacity_gpu_s += seconds * capacity

    def came(self, row: int) -> None:
        """A job was submitted."""
        self._active_s_at_submit[row] = self._active_s

    def left(self, row: int, now_s: float) -> None:
        """A job has finished or was refused."""
        self.ended += 1
        lived_s = now_s - self._submit_s[row]
        if lived_s > 0:
            self.mean_active[row] = (self._active_s - self._active_s_at_submit[row]) / lived_s
