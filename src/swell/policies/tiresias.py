"""Tiresias (NSDI'19, section 3): least attained service in queues, and its version with the Gittins index.

Service is two-dimensional: GPUs x time, pauses for resizing included. A job starts in the first queue and
moves to the next one when its service passes a threshold. Queues are served in order, and a job gets all the
GPUs it asked for or none; jobs behind one that does not fit may pass it. Running jobs that are chosen again
keep their GPUs.

Two settings are in use. Our default is that of the Pollux authors: one threshold of 16 GPU-hours, and each
queue in order of entry. The public simulator of Tiresias, which the ElasticFlow authors used, has thresholds
of 3250 and 7200 GPU-seconds and queues in order of first start:
`tiresias:thresholds=3250/7200,fifo=start`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies._shares import fill, grow
from swell.policies.base import Decision, Knowledge, PlacerName, Policy
from swell.policies.memory import JobMemory
from swell.policies.snapshot import Snapshot

_SLACK_GPU_S = 1e-3
"""A threshold counts as reached this early, so that rounding errors of the clock cause no extra wake-ups."""


_HISTORY = 10_000
"""The Gittins index is computed from this many of the jobs that left last."""


def _memory(**more: float) -> JobMemory:
    """The memory of a Tiresias policy. Its columns, one entry per job:

    - queue: the queue the job is in.
    - entered: when the job entered its queue, as a count of all demotions until then; 0 in the first queue.
    - forgiven_s, forgiven_gpu_s: run time and service that no longer count since the job was promoted.
    - last_ran_s: when the job last held GPUs, or was first seen.
    """
    return JobMemory(queue=0.0, entered=0.0, forgiven_s=0.0, forgiven_gpu_s=0.0, last_ran_s=-1.0, **more)


@dataclass(kw_only=True)
class Tiresias(Policy):
    """Discretised two-dimensional least attained service (2D-LAS)."""

    name: ClassVar[str] = "tiresias"
    paper: ClassVar[str] = "Tiresias, NSDI'19"
    goal: ClassVar[str] = "low average JCT for rigid jobs of unknown length"
    rigid: ClassVar[bool] = True
    placer: ClassVar[PlacerName] = "most-free"
    changes_with_time: ClassVar[bool] = False

    thresholds: str = "57600"
    """GPU-seconds of service at which a job moves to the next queue, ascending, such as 3250/7200."""
    fifo: str = "arrival"
    """Order inside a queue: 'arrival' in the queue, or 'start', the job's first start."""
    promote: float = 0.0
    """A job that has waited this many times its run time goes back to the first queue; 0 for never."""

    _limits: FloatArray = field(init=False, repr=False)
    _jobs: JobMemory = field(init=False, repr=False, default_factory=_memory)
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
        self._jobs["last_ran_s"][gpus > 0] = snapshot.now_s
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the next running job reaches its threshold, or the next waiting job is promoted."""
        runs = decision.gpus > 0
        limit = self._limits[self._jobs["queue"].astype(np.int64)]
        togo_s = (limit[runs] - self._service(snapshot)[runs]) / decision.gpus[runs]
        wake_s = snapshot.now_s + float(togo_s.min(initial=np.inf))
        if self.promote:
            patience_s = self._starves_at_s(snapshot)[~runs]
            wake_s = min(wake_s, float(patience_s.min(initial=np.inf)))
        return wake_s

    def _service(self, snapshot: Snapshot) -> FloatArray:
        """GPU-seconds since the job's last promotion: earlier ones do not count."""
        if not self.promote:
            return snapshot.attained_gpu_s
        return snapshot.attained_gpu_s - self._jobs["forgiven_gpu_s"]

    def _starves_at_s(self, snapshot: Snapshot) -> FloatArray:
        """When each job, if it keeps waiting, goes back to the first queue; infinite if it is there."""
        jobs = self._jobs
        counted_s = snapshot.run_s - jobs["forgiven_s"]
        return np.where(jobs["queue"] > 0, jobs["last_ran_s"] + self.promote * counted_s, np.inf)

    def _move_between_queues(self, snapshot: Snapshot) -> None:
        jobs = self._jobs
        jobs.follow(snapshot)
        queue, entered = jobs["queue"], jobs["entered"]
        if self.promote:
            last_ran_s = jobs["last_ran_s"]
            last_ran_s[(snapshot.gpus > 0) | (last_ran_s < 0)] = snapshot.now_s
            starved = (snapshot.gpus == 0) & (self._starves_at_s(snapshot) <= snapshot.now_s + _SLACK_GPU_S)
            jobs["forgiven_s"][starved] = snapshot.run_s[starved]
            jobs["forgiven_gpu_s"][starved] = snapshot.attained_gpu_s[starved]
            queue[starved] = 0
            entered[starved] = 0
        now = self._limits.searchsorted(self._service(snapshot) + _SLACK_GPU_S, side="right")
        fallen = (now > queue).nonzero()[0]
        if len(fallen):
            queue[fallen] = now[fallen]
            entered[fallen] = self._demotions + 1 + np.arange(len(fallen))
            self._demotions += len(fallen)

    def _order(self, snapshot: Snapshot) -> IntArray:
        """The jobs in the order in which they are served."""
        if self.fifo == "start":
            return np.lexsort((snapshot.first_start_s, self._jobs["queue"]))
        if len(self._limits) == 2:  # two queues: demoted jobs come last, in order of demotion
            return self._jobs["entered"].argsort(kind="stable")
        return np.lexsort((self._jobs["entered"], self._jobs["queue"]))


def gittins_index(
    history: FloatArray, sums: FloatArray, service: FloatArray, quantum: FloatArray
) -> FloatArray:
    """P(S <= a + d | S > a) / E[min(S, a + d) - a | S > a] for service a, quantum d and past services S.

    `history` holds the S ascending, `sums` the sums of its first 0, 1, 2 ... entries. The index is 0 for a
    service above all of the history.
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
    """2D-Gittins: in each queue the jobs come first that, by the service past jobs took, will end soonest.

    The policy builds this history itself, from jobs that have left. A queue's quantum is the service between
    its thresholds, and infinite for the last queue. Until `learn` jobs have left, the order is as in 2D-LAS.
    """

    name: ClassVar[str] = "tiresias-gittins"
    goal: ClassVar[str] = "low average JCT for rigid jobs when the spread of service times is known"

    learn: int = 20
    """The number of jobs that must have left before the history is used."""

    _jobs: JobMemory = field(init=False, repr=False, default_factory=lambda: _memory(service=0.0, gpus=0.0))
    """The memory of Tiresias, plus each job's service at the last decision and the GPUs it got then."""
    _at_s: float = field(init=False, repr=False, default=0.0)
    """When the last decision was."""
    _departed: deque[float] = field(init=False, repr=False, default_factory=lambda: deque(maxlen=_HISTORY))
    """Service of the last jobs that left."""
    _unlearnt: int = field(init=False, repr=False, default=0)
    """The number of jobs in `_departed` that are not in `_history` yet."""
    _history: FloatArray = field(init=False, repr=False, default_factory=lambda: np.empty(0))
    _sums: FloatArray = field(init=False, repr=False, default_factory=lambda: np.zeros(1))

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Learn from the jobs that left, then decide as Tiresias does."""
        self._learn(snapshot)
        decision = super().allocate(snapshot)
        self._jobs["service"][:] = snapshot.attained_gpu_s
        self._jobs["gpus"][:] = decision.gpus
        self._at_s = snapshot.now_s
        return decision

    def _learn(self, snapshot: Snapshot) -> None:
        """Add the service of the jobs that left since the last decision to the history."""
        jobs = self._jobs
        gone = ~np.isin(jobs.numbers, snapshot.numbers, assume_unique=True)
        if not gone.any():
            return
        service = jobs["service"][gone] + jobs["gpus"][gone] * (snapshot.now_s - self._at_s)
        learnt = service[service > 0].tolist()
        self._departed.extend(learnt)
        self._unlearnt += len(learnt)
        if self._unlearnt >= 0.05 * len(self._history):  # sorting after every job would be slow
            self._history = np.sort(np.array(self._departed))
            self._sums = np.concatenate([[0.0], np.cumsum(self._history)])
            self._unlearnt = 0

    def _order(self, snapshot: Snapshot) -> IntArray:
        if len(self._history) < self.learn:
            return super()._order(snapshot)
        queue = self._jobs["queue"].astype(np.int64)
        quantum = np.diff(self._limits, prepend=0.0)[queue]
        index = gittins_index(self._history, self._sums, self._service(snapshot), quantum)
        return np.lexsort((self._jobs["entered"], -index, queue))


# EDL (TPDS'21, section 5): Tiresias for elastic jobs.
#
# EDL itself is a way to resize a job without stopping it; `swell.train` does that. The paper also has a
# scheduler that makes use of it: Elastic-Tiresias, the policy in this file.


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
