"""Tiresias (NSDI'19, section 3): least attained service in queues; and EDL's elastic version of it (TPDS'21).

Service is two-dimensional: GPUs x time, pauses for resizing included. A job starts in the first queue and
falls into the next one when its service passes a threshold; queues are served in order, rigid jobs all or
nothing, and a job that does not fit is passed over by those behind it. Jobs that run and are chosen again
keep their GPUs.

Two settings are in use. The Pollux authors ran one threshold of 16 GPU-hours and queues in order of entry:
our default. The public simulator of Tiresias, and the ElasticFlow authors with it, have 3250 and 7200
GPU-seconds and queues in order of first start: `tiresias:thresholds=3250/7200,fifo=start`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies._shares import fill, grow, per_row
from swell.policies.base import Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

_SLACK_GPU_S = 1e-3
"""A threshold counts as reached this early: the clock's rounding must not ask for one wake-up after another.
"""


def _nothing() -> FloatArray:
    return np.empty(0)


@dataclass(kw_only=True)
class Tiresias(Policy):
    """Discretised two-dimensional least attained service (2D-LAS)."""

    name: ClassVar[str] = "tiresias"
    paper: ClassVar[str] = "Tiresias, NSDI'19"
    goal: ClassVar[str] = "low average JCT for rigid jobs of unknown length"
    placer: ClassVar[PlacerName] = "most-free"
    changes_with_time: ClassVar[bool] = False

    thresholds: str = "57600"
    """GPU-seconds of service at which a job falls into the next queue, ascending, such as 3250/7200."""
    fifo: str = "arrival"
    """Order inside a queue: 'arrival' in the queue, or 'start', the job's first start."""
    promote: float = 0.0
    """A job that has waited this many times its run time goes back to the first queue; 0 for never."""

    _limits: FloatArray = field(init=False, repr=False)
    _queue: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    _entered: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    """When a job came into its queue, as a count of all demotions; 0 in the first queue."""
    _forgiven_s: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    """Run time before the job's last promotion, which no longer counts; so for service."""
    _forgiven_gpu_s: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    _last_ran_s: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    _demotions: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        try:
            limits = [float(part) for part in self.thresholds.split("/")]
        except ValueError:
            limits = []
        if not limits or limits[0] <= 0 or any(b <= a for a, b in pairwise(limits)):
            raise InputError(
                f"thresholds must be ascending GPU-seconds such as 3250/7200, got '{self.thresholds}'",
                field="thresholds",
            )
        if self.fifo not in ("arrival", "start"):
            raise InputError(f"fifo must be 'arrival' or 'start', got '{self.fifo}'", field="fifo")
        if not self.promote >= 0:
            raise InputError(f"promote must be at least 0, got {self.promote}", field="promote")
        self._limits = np.array([*limits, np.inf])

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Bring the queues up to date, then serve them in order."""
        self._move_between_queues(snapshot)
        gpus = fill(self._order(snapshot), snapshot.requested, snapshot.max_gpus, snapshot.capacity, False)
        if self.promote:
            self._last_ran_s[snapshot.rows[gpus > 0]] = snapshot.now_s
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the next running job reaches its threshold, or the next waiting one has starved enough."""
        runs = decision.gpus > 0
        limit = self._limits[self._queue[snapshot.rows].astype(np.int64)]
        togo_s = (limit[runs] - self._service(snapshot)[runs]) / decision.gpus[runs]
        wake_s = snapshot.now_s + float(togo_s.min(initial=np.inf))
        if self.promote:
            patience_s = self._starves_at_s(snapshot)[~runs]
            wake_s = min(wake_s, float(patience_s.min(initial=np.inf)))
        return wake_s

    def _service(self, snapshot: Snapshot) -> FloatArray:
        """GPU-seconds that count: since the job's last promotion."""
        if not self.promote:
            return snapshot.attained_gpu_s
        return snapshot.attained_gpu_s - self._forgiven_gpu_s[snapshot.rows]

    def _starves_at_s(self, snapshot: Snapshot) -> FloatArray:
        """When each job, if it waits on, may go back to the first queue; infinite for those who are there."""
        rows = snapshot.rows
        counted_s = snapshot.run_s - self._forgiven_s[rows]
        return np.where(self._queue[rows] > 0, self._last_ran_s[rows] + self.promote * counted_s, np.inf)

    def _move_between_queues(self, snapshot: Snapshot) -> None:
        rows = snapshot.rows
        self._queue = per_row(self._queue, rows, 0.0)
        self._entered = per_row(self._entered, rows, 0.0)
        if self.promote:
            self._forgiven_s = per_row(self._forgiven_s, rows, 0.0)
            self._forgiven_gpu_s = per_row(self._forgiven_gpu_s, rows, 0.0)
            self._last_ran_s = per_row(self._last_ran_s, rows, -1.0)
            news = (snapshot.gpus > 0) | (self._last_ran_s[rows] < 0)
            self._last_ran_s[rows[news]] = snapshot.now_s
            starved = (snapshot.gpus == 0) & (self._starves_at_s(snapshot) <= snapshot.now_s + _SLACK_GPU_S)
            self._forgiven_s[rows[starved]] = snapshot.run_s[starved]
            self._forgiven_gpu_s[rows[starved]] = snapshot.attained_gpu_s[starved]
            self._queue[rows[starved]] = 0
            self._entered[rows[starved]] = 0
        before = self._queue[rows]
        now = np.searchsorted(self._limits, self._service(snapshot) + _SLACK_GPU_S, side="right")
        fallen = rows[now > before]
        if len(fallen):
            self._queue[fallen] = now[now > before]
            self._entered[fallen] = self._demotions + 1 + np.arange(len(fallen))
            self._demotions += len(fallen)

    def _order(self, snapshot: Snapshot) -> IntArray:
        """The jobs in the order in which they are served."""
        rows = snapshot.rows
        if self.fifo == "start":
            return np.lexsort((snapshot.first_start_s, self._queue[rows]))
        if len(self._limits) == 2:  # two queues: whoever was demoted comes later, in order of demotion
            return np.argsort(self._entered[rows], kind="stable")
        return np.lexsort((self._entered[rows], self._queue[rows]))


def gittins_index(
    history: FloatArray, sums: FloatArray, service: FloatArray, quantum: FloatArray
) -> FloatArray:
    """P(S <= a + d | S > a) / E[min(S, a + d) - a | S > a] for service a, quantum d and past services S.

    `history` holds the S ascending, `sums` the sums of its first 0, 1, 2 ... entries. Beyond everything that
    was ever seen the index is 0.
    """
    n = len(history)
    first = np.searchsorted(history, service, side="right")
    last = np.searchsorted(history, service + quantum, side="right")
    ends = (last - first).astype(np.float64)
    beyond = n - last
    cost = sums[last] - sums[first] - service * ends
    cost += np.multiply(quantum, beyond, out=np.zeros(len(service)), where=beyond > 0)
    return np.divide(ends, cost, out=np.zeros(len(service)), where=cost > 0)


@dataclass(kw_only=True)
class TiresiasGittins(Tiresias):
    """2D-Gittins: in each queue the jobs most likely to end soon, judged by how much service past jobs took.

    The history is learnt on the way, from jobs that have left. A queue's quantum is the service between its
    thresholds, and endless for the last. Until `learn` jobs have left the order is that of 2D-LAS.
    """

    name: ClassVar[str] = "tiresias-gittins"
    goal: ClassVar[str] = "low average JCT for rigid jobs when the spread of service times is known"

    learn: int = 20
    """Jobs that must have left before their history is trusted."""

    _rows: IntArray = field(init=False, repr=False, default_factory=lambda: np.empty(0, dtype=np.int64))
    _seen: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    """Service of those jobs when last asked, and what they have received since."""
    _gpus: IntArray = field(init=False, repr=False, default_factory=lambda: np.empty(0, dtype=np.int64))
    _at_s: float = field(init=False, repr=False, default=0.0)
    _departed: list[float] = field(init=False, repr=False, default_factory=list)
    _history: FloatArray = field(init=False, repr=False, default_factory=_nothing)
    _sums: FloatArray = field(init=False, repr=False, default_factory=lambda: np.zeros(1))

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Learn from those who left, then as Tiresias."""
        gone = ~np.isin(self._rows, snapshot.rows, assume_unique=True)
        if gone.any():
            service = self._seen[gone] + self._gpus[gone] * (snapshot.now_s - self._at_s)
            self._departed.extend(service[service > 0].tolist())
            if len(self._departed) >= 1.05 * len(
                self._history
            ):  # sorting for each would cost more than it tells
                self._history = np.sort(np.array(self._departed))
                self._sums = np.concatenate([[0.0], np.cumsum(self._history)])
        decision = super().allocate(snapshot)
        self._rows, self._seen, self._at_s = snapshot.rows, snapshot.attained_gpu_s, snapshot.now_s
        self._gpus = decision.gpus
        return decision

    def _order(self, snapshot: Snapshot) -> IntArray:
        if len(self._history) < self.learn:
            return super()._order(snapshot)
        queue = self._queue[snapshot.rows].astype(np.int64)
        quantum = np.diff(self._limits, prepend=0.0)[queue]
        index = gittins_index(self._history, self._sums, self._service(snapshot), quantum)
        return np.lexsort((self._entered[snapshot.rows], -index, queue))


@dataclass(kw_only=True)
class ElasticTiresias(Tiresias):
    """Tiresias whose jobs shrink to let others in and grow into idle GPUs (EDL, section 5).

    Compaction: while more than `pending` jobs would wait, every job is served with `least` of what it asked
    for, so that more of them run; what is left over brings those who run back towards their request.
    Expansion: when nobody waits, idle GPUs go beyond the requests. Both hand out GPUs where the rate grows
    most, relative to the rate at the request.
    """

    name: ClassVar[str] = "elastic-tiresias"
    paper: ClassVar[str] = "EDL, TPDS'21"
    goal: ClassVar[str] = "Tiresias without idle GPUs"
    knows: ClassVar[Knowledge] = "profiles"
    placer: ClassVar[PlacerName] = "packed"
    changes_with_time: ClassVar[bool] = False

    least: float = 0.5
    """Least part of its request that a job is shrunk to."""
    pending: int = 0
    """How many jobs may wait before others are shrunk for them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= 1:
            raise InputError(f"least must be above 0 and at most 1, got {self.least}", field="least")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Serve the queues as Tiresias does, compacted if need be, then spend what is left."""
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
        free = capacity - int(gpus.sum())
        gpus = grow(rates, curve, gpus, np.minimum(want, most), weight, free, False)
        if not np.any(able & (gpus == 0)):
            gpus = grow(rates, curve, gpus, most, weight, capacity - int(gpus.sum()), False)
        if self.promote:
            self._last_ran_s[snapshot.rows[gpus > 0]] = snapshot.now_s
        return Decision(gpus)
