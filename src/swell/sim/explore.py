"""How a live scheduler learns the speed of jobs that are new to it, in simulated time.

On a live cluster a new job starts on one GPU. Once it has run for a little while, it may have twice the most
GPUs it has run on (Pollux's exploration, section 4.1). A simulation that knows all curves from the start
would give it more at once; one that replays a live cluster must not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from swell.domain import IntArray
from swell.policies import JobTable


@dataclass(slots=True)
class Exploration:
    """Bounds the GPUs of each job by the sizes it has run at so far."""

    learn_s: float
    """How long a job must run at one size before its speed there counts as known."""
    known: frozenset[str] = frozenset()
    """The ids of jobs whose speed is known from the start."""
    _most: dict[int, int] = field(default_factory=dict)
    _own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, learn_s: float, known: Iterable[str]) -> Exploration:
        """An exploration in which the jobs `known` have no bound."""
        return cls(learn_s, frozenset(known))

    def bound(self, table: JobTable, rows: IntArray, now_s: float) -> float:
        """Set the jobs' bounds as of now; returns when the next bound may rise."""
        next_s = np.inf
        for row in rows.tolist():
            if table.specs[row].job_id in self.known:
                continue
            own = self._own.setdefault(row, int(table.max_gpus[row]))
            gpus = int(table.gpus[row])
            if gpus > self._most.get(row, 0):
                seen_s = float(table.paused_until_s[row]) + self.learn_s
                if seen_s <= now_s:
                    self._most[row] = gpus
                else:
                    next_s = min(next_s, seen_s)
            least = int(table.min_gpus[row])
            table.max_gpus[row] = min(own, max(2 * self._most.get(row, 0), least, 1))
            table.known[row] = row in self._most
        return next_s
