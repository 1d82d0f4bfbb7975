"""The job table of a live cluster: rows come and go, and are used again.

Policies know a job by its row and forget it once a snapshot comes without it. So the row of a job that ended
is given to another only after a decision has been made without the first.
"""

from __future__ import annotations

import numpy as np

from swell.domain import IntArray, JobSpec
from swell.policies import JobTable

_FIRST = 64


class Ledger:
    """The table of the jobs that are active now."""

    def __init__(self) -> None:
        empty = JobSpec(job_id="-", submit_s=0.0, model="-", batch_size=1)
        self.table = JobTable([empty] * _FIRST)
        self.rows: dict[str, int] = {}
        """Row of each active job."""
        self._free = list(range(_FIRST - 1, -1, -1))
        self._leaving: list[int] = []

    def add(self, spec: JobSpec) -> int:
        """Give a job a row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        fresh = JobTable([spec])
        for name, column in vars(self.table).items():
            column[row] = getattr(fresh, name)[0]
        self.rows[spec.job_id] = row
        return row

    def remove(self, job_id: str) -> None:
        """The job is active no more."""
        self._leaving.append(self.rows.pop(job_id))

    def active(self) -> IntArray:
        """Rows of the active jobs, in order of submission."""
        rows = np.fromiter(self.rows.values(), dtype=np.int64, count=len(self.rows))
        return rows[np.lexsort((rows, self.table.submit_s[rows]))]

    def decided(self) -> None:
        """A decision was made: rows of jobs that were not in it may be used again."""
        self._free.extend(self._leaving)
        self._leaving.clear()

    def _grow(self) -> None:
        old = len(self.table)
        bigger = JobTable(self.table.specs * 2)
        for name, column in vars(self.table).items():
            getattr(bigger, name)[:old] = column
        self.table = bigger
        self._free = list(range(2 * old - 1, old - 1, -1))
