"""A policy's memory: columns of numbers about each job, kept from one decision to the next.

Rows of the table come in any order and are used again, so a policy must not remember anything by row. A
`JobMemory` identifies jobs by their numbers. It forgets a job that is missing from a snapshot, so it never
holds more jobs than are active.
"""

from __future__ import annotations

import numpy as np

from swell.domain import FloatArray, IntArray
from swell.perf._compiled import compiled
from swell.policies.snapshot import Snapshot


class JobMemory:
    """Named columns of numbers, each with one entry per job, in the order of the snapshot last followed.

    memory = JobMemory(queue=0.0)          # a newcomer's queue is 0
    memory.follow(snapshot)
    memory["queue"][snapshot.gpus == 0] += 1
    """

    def __init__(self, **defaults: float) -> None:
        self.numbers: IntArray = np.empty(0, dtype=np.int64)
        """The jobs that are remembered."""
        self._column = {name: i for i, name in enumerate(defaults)}
        self._defaults: FloatArray = np.array(list(defaults.values()), dtype=np.float64)
        self._values: FloatArray = np.empty((len(defaults), 0))

    def follow(self, snapshot: Snapshot) -> None:
        """Forget the jobs that are gone, and enter new jobs with the defaults."""
        if snapshot.numbers is not self.numbers:
            self._values = _aligned(self.numbers, snapshot.numbers, self._values, self._defaults)
            self.numbers = snapshot.numbers

    def __getitem__(self, name: str) -> FloatArray:
        """One column; writing to it changes the memory."""
        column: FloatArray = self._values[self._column[name]]
        return column


@compiled
def _aligned(before: IntArray, numbers: IntArray, values: FloatArray, defaults: FloatArray) -> FloatArray:
    """Rearrange `values` (columns x jobs, for the jobs `before`) for the jobs `numbers`."""
    columns = len(defaults)
    aligned = np.empty((columns, len(numbers)))
    old = 0
    for i in range(len(numbers)):  # both lists of numbers are ascending
        while old < len(before) and before[old] < numbers[i]:
            old += 1
        known = old < len(before) and before[old] == numbers[i]
        for c in range(columns):
            aligned[c, i] = values[c, old] if known else defaults[c]
    return aligned
