"""Gandiva (OSDI'18, sections 3 and 4): time slicing when jobs outnumber GPUs, lending when GPUs are idle.

Rigid jobs get the GPUs they asked for. While some jobs wait, all GPUs are given out again at every turn of a
common clock, to the jobs that have waited longest; between turns running jobs stay. While no job waits, idle
GPUs are lent to running jobs, which doubles a job's share, and taken back when the next job needs them. A
loan is a trial: if the measured rate does not rise, the job is not grown that far again.

Two things of the paper are left out: packing two jobs on one GPU, and migration for locality (the placer
packs jobs). Suspending and resuming a job costs a resize in the simulation. With turns of 60 s this cost
should be small, as it is in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.policies._shares import fill
from swell.policies.base import Decision, Policy
from swell.policies.memory import JobMemory
from swell.policies.snapshot import Snapshot


@dataclass(kw_only=True)
class Gandiva(Policy):
    """Round-robin time slices for all jobs; idle GPUs are lent to running jobs."""

    name: ClassVar[str] = "gandiva"
    paper: ClassVar[str] = "Gandiva, OSDI'18"
    goal: ClassVar[str] = "every job makes early progress, no GPU idles"
    rigid: ClassVar[bool] = True
    changes_with_time: ClassVar[bool] = False

    quantum_s: float = 60.0
    """Length of a time slice."""
    lend: bool = True
    """Lend idle GPUs to running jobs."""

    _turn: float = field(init=False, repr=False, default=-1.0)
    _jobs: JobMemory = field(
        init=False,
        repr=False,
        default_factory=lambda: JobMemory(had_gpus_s=-1.0, before=np.inf, rate_before=0.0, enough=np.inf),
    )
    """For each job: when it last held GPUs (negative for never), the share that it was last grown from, its
    rate at that share, and the share beyond which a trial showed no gain."""

    def __post_init__(self) -> None:
        if not self.quantum_s > 0:
            raise InputError(f"quantum_s must be above 0, got {self.quantum_s}", field="quantum_s")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give out time slices if a job must wait, else lend the idle GPUs."""
        held, now_s = snapshot.gpus, snapshot.now_s
        self._jobs.follow(snapshot)
        had_gpus_s = self._jobs["had_gpus_s"]
        had_gpus_s[held > 0] = now_s
        idle_since_s = np.maximum(had_gpus_s, snapshot.submit_s)
        turn = math.floor(now_s / self.quantum_s + 1e-9)
        stays = (held > 0) & (turn == self._turn)
        self._turn = turn
        order = np.lexsort((snapshot.run_s, idle_since_s, ~stays))
        gpus = fill(order, snapshot.requested, snapshot.max_gpus, snapshot.capacity, False)
        if self.lend and not self._waiting(snapshot, gpus):
            gpus = self._lend(snapshot, gpus)
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """The next turn, if a job waits or a job that has just grown may be grown further."""
        grew = np.any(decision.gpus > np.maximum(snapshot.gpus, snapshot.requested))
        if not grew and not self._waiting(snapshot, decision.gpus):
            return np.inf
        return (self._turn + 1) * self.quantum_s

    @staticmethod
    def _waiting(snapshot: Snapshot, gpus: IntArray) -> bool:
        """Whether a job waits that the cluster could hold."""
        return bool(np.any((gpus == 0) & (snapshot.requested <= snapshot.max_gpus)))

    def _lend(self, snapshot: Snapshot, gpus: IntArray) -> IntArray:
        """Keep the loans that help, and double the smallest shares while GPUs are idle."""
        held, free = snapshot.gpus, snapshot.capacity - int(gpus.sum())
        most = np.minimum(snapshot.max_gpus, self._learn(snapshot)).astype(np.int64)
        loan = np.clip(np.minimum(held, most) - gpus, 0, None) * (gpus > 0)
        gpus = gpus + fill(np.argsort(gpus, kind="stable"), loan, loan, free, False)
        free = snapshot.capacity - int(gpus.sum())
        # Only jobs whose rate at the present share is known are grown: a trial needs a rate to compare with.
        more = np.where((gpus == held) & (gpus > 0) & (2 * gpus <= most), gpus, 0)
        more = fill(np.argsort(gpus, kind="stable"), more, more, free, False)
        grows = more > 0
        self._jobs["before"][grows] = gpus[grows]
        self._jobs["rate_before"][grows] = snapshot.table.rate[snapshot.rows[grows]]
        return gpus + more

    def _learn(self, snapshot: Snapshot) -> FloatArray:
        """Compare the rates of grown jobs with their rates before; returns the useful share of each job."""
        before, enough = self._jobs["before"], self._jobs["enough"]
        no_faster = snapshot.table.rate[snapshot.rows] <= self._jobs["rate_before"]
        useless = (snapshot.gpus > before) & no_faster
        enough[useless] = np.minimum(enough, before)[useless]
        return enough
