"""Themis (NSDI'20, sections 3 and 4): max-min fairness of finish times, with leases.

A job's rho is its time from submission to finish, divided by the time it would take alone on 1/N of the
cluster, where N is the number of jobs that are active now. In the paper the 1 - f of the jobs with the
largest rho bid for free GPUs, and a partial allocation mechanism picks winners. Here, as is usual in
simulation, there are no bids. GPUs that are free or whose lease has run out go, step by step, to the job with
the largest rho at that moment, a greedy way to keep the largest rho small. This order replaces the filter f.
The paper needs its auction so that bids are truthful; a scheduler that knows the curves does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.perf._compiled import compiled
from swell.policies._shares import least_share
from swell.policies.base import Decision, Knowledge, Policy
from swell.policies.memory import JobMemory
from swell.policies.snapshot import Snapshot


@compiled
def lift_the_worst(
    rates: FloatArray,
    curve: IntArray,
    gpus: IntArray,
    least: IntArray,
    most: IntArray,
    age_s: FloatArray,
    left: FloatArray,
    wait_s: FloatArray,
    ideal_s: FloatArray,
    free: int,
) -> IntArray:
    """Give `free` GPUs step by step to the job with the largest rho; pass over jobs they cannot help.

    A step gives a job without GPUs its least share, and any other job the next share with a higher rate.
    `wait_s` is the time that a job needs from now on if it gets no GPUs now.
    """
    gpus = gpus.copy()
    n = len(gpus)
    rho = np.empty(n)
    for i in range(n):
        rate = rates[curve[i], gpus[i]]
        rho[i] = (age_s[i] + (left[i] / rate if rate > 0.0 else wait_s[i])) / ideal_s[i]
        if least[i] == 0:
            rho[i] = -1.0
    while free > 0:
        worst = np.argmax(rho)
        if rho[worst] < 0.0:
            break
        share = gpus[worst]
        row = rates[curve[worst]]
        target = least[worst] if share == 0 else share + 1
        while share > 0 and target <= most[worst] and row[target] <= row[share]:
            target += 1
        if target > most[worst] or target - share > free:
            rho[worst] = -1.0
            continue
        free -= target - share
        gpus[worst] = target
        rho[worst] = (age_s[worst] + left[worst] / row[target]) / ideal_s[worst]
    return gpus


@dataclass(kw_only=True)
class Themis(Policy):
    """Keep the worst finish-time fairness low."""

    name: ClassVar[str] = "themis"
    paper: ClassVar[str] = "Themis, NSDI'20"
    goal: ClassVar[str] = "finish-time fairness"
    knows: ClassVar[Knowledge] = "profiles"
    changes_with_time: ClassVar[bool] = False

    lease_s: float = 1200.0
    """How long a job keeps its GPUs before they are offered again. Shorter is fairer but costs resizes: on
    the Pollux workloads the largest rho is 14 to 22 with 1200 s, as in the paper, and 3 to 4 with 120 s."""

    _jobs: JobMemory = field(
        init=False, repr=False, default_factory=lambda: JobMemory(total=-1.0, lease_end_s=-1.0)
    )
    """For each job its total work (what was left when it was first seen), and when its lease ends."""

    def __post_init__(self) -> None:
        if not self.lease_s > 0:
            raise InputError(f"lease_s must be above 0, got {self.lease_s}", field="lease_s")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give GPUs that are free or whose lease has ended to the jobs with the largest rho."""
        jobs, now_s, left = len(snapshot), snapshot.now_s, snapshot.remaining
        self._jobs.follow(snapshot)
        total, lease_end_s = self._jobs["total"], self._jobs["lease_end_s"]
        np.maximum(total, left, out=total)
        least, most = least_share(snapshot), snapshot.max_gpus
        fair = np.clip(max(snapshot.capacity // jobs, 1), least, np.maximum(most, least))
        fair_rate = np.maximum(snapshot.rate_at(fair), snapshot.rate_at(least))
        able = (least > 0) & (total > 0)
        ideal_s = np.divide(total, fair_rate, out=np.ones(jobs), where=able)
        wait_s = self.lease_s + np.divide(left, fair_rate, out=np.zeros(jobs), where=able)
        holds = (lease_end_s > now_s + 1e-6) & (snapshot.gpus <= most)
        kept = np.where(holds, snapshot.gpus, 0)
        gpus = lift_the_worst(
            snapshot.curves.rates, snapshot.curve, kept, least, most, snapshot.age_s, left, wait_s, ideal_s,
            snapshot.capacity - int(kept.sum()),
        )  # fmt: skip
        lease_end_s[gpus == 0] = -1.0
        lease_end_s[(gpus > 0) & ~holds] = now_s + self.lease_s
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the next lease runs out."""
        ends_s = self._jobs["lease_end_s"][decision.gpus > 0]
        return float(ends_s.min(initial=np.inf))
