"""EDL (TPDS'21, section 5): Tiresias for elastic jobs.

EDL itself is a way to resize a job without stopping it; `swell.train` does that. The paper also has a
scheduler that makes use of it: Elastic-Tiresias, the policy in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swell.domain import InputError
from swell.policies._shares import fill, grow
from swell.policies.base import Decision, Knowledge, PlacerName
from swell.policies.snapshot import Snapshot
from swell.policies.tiresias import Tiresias


@dataclass(kw_only=True)
class ElasticTiresias(Tiresias):
    """Tiresias with jobs that shrink to let others run and grow into idle GPUs.

    Compaction: while more than `pending` jobs would wait, each job gets only the part `least` of its request,
    so that more jobs run; GPUs that are left over bring the running jobs back towards their requests.
    Expansion: when no job waits, running jobs get idle GPUs beyond their requests. In both cases a GPU goes
    to the job whose rate grows most, relative to its rate at the request.
    """

    name: ClassVar[str] = "elastic-tiresias"
    paper: ClassVar[str] = "EDL, TPDS'21"
    goal: ClassVar[str] = "Tiresias without idle GPUs"
    knows: ClassVar[Knowledge] = "profiles"
    rigid: ClassVar[bool] = False
    placer: ClassVar[PlacerName] = "packed"
    changes_with_time: ClassVar[bool] = False

    least: float = 0.5
    """The smallest part of its request that a job is shrunk to."""
    pending: int = 0
    """How many jobs may wait before others are shrunk for them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= 1:
            raise InputError(f"least must be above 0 and at most 1, got {self.least}", field="least")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Serve the queues as Tiresias does, with smaller shares if too many jobs wait; then grow shares."""
        self._move_between_queues(snapshot)
        order, want, most = self._order(snapshot), snapshot.requested, snapshot.max_gpus
        capacity, rates, curve = snapshot.capacity, snapshot.curves.rates, snapshot.curve
        gpus = fill(order, want, most, capacity, False)
        able = want <= most
        if np.count_nonzero(able & (gpus == 0)) > self.pending:
            small = np.maximum(np.ceil(self.least * want).astype(np.int64), snapshot.min_gpus)
            runs = snapshot.rate_at(np.minimum(small, most)) > 0
            gpus = fill(order, np.where(runs, small, want), np.where(able, most, 0), capacity, False)
        asked = snapshot.rate_at(np.minimum(want, most))
        weight = np.divide(1.0, asked, out=np.zeros(len(asked)), where=asked > 0)
        free, step = capacity - int(gpus.sum()), snapshot.per_replica
        gpus = grow(rates, curve, gpus, np.minimum(want, most), weight, free, False, step)
        if not np.any(able & (gpus == 0)):
            gpus = grow(rates, curve, gpus, most, weight, capacity - int(gpus.sum()), False, step)
        self._jobs["last_ran_s"][gpus > 0] = snapshot.now_s
        return Decision(gpus)
