"""The result of a simulation: one record of figures per run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swell.domain import FloatArray, IntArray


@dataclass(kw_only=True)
class SimulationResult:
    """The outcome of one run, job by job and in total. A time is NaN for a job that never came so far."""

    policy: str
    cluster: str
    belief: str
    """The policy's source for the jobs' speed; 'oracle' if it saw the true profiles."""
    job_ids: list[str]
    submit_s: FloatArray
    deadline_s: FloatArray
    weight: FloatArray
    finish_s: FloatArray
    promised_s: FloatArray
    rejected: IntArray
    """1 where the policy refused the job."""
    rho: FloatArray
    """Finish-time fairness: JCT over the time the job would have needed alone on its share of the cluster."""
    job_resizes: IntArray
    """How often each job went on with other GPUs; starts and preemptions are not counted, as in reports."""
    gpu_seconds: float
    """GPU-seconds held by jobs."""
    capacity_gpu_seconds: float
    """GPU-seconds in service between the first submission and the last finish."""
    cost: float | None = None
    """Cost of the rented nodes; None for a cluster that is simply there."""
    node_hours: float | None = None
    decision_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    stalled: bool = False
    """True if jobs were left that the policy never gave enough GPUs to run."""

    @property
    def jct_s(self) -> FloatArray:
        """Completion times of the jobs that finished."""
        done = ~np.isnan(self.finish_s)
        return self.finish_s[done] - self.submit_s[done]

    @property
    def deadline_met(self) -> int:
        """Jobs that ended, overhead included, by their deadline."""
        with np.errstate(invalid="ignore"):
            return int(np.sum(np.isfinite(self.deadline_s) & (self.finish_s <= self.deadline_s)))

    @property
    def promises_broken(self) -> int:
        """Jobs that were promised a finish by their deadline and missed it."""
        promised = ~np.isnan(self.promised_s)
        with np.errstate(invalid="ignore"):
            return int(np.sum(promised & ~(self.finish_s <= self.deadline_s)))

    def record(self) -> dict[str, Any]:
        """The figures as plain values; None for a figure that has no value."""
        jct = self.jct_s
        deadline_jobs = int(np.isfinite(self.deadline_s).sum())
        done = ~np.isnan(self.finish_s)
        rho = self.rho[done & ~np.isnan(self.rho)]
        decisions = np.array(self.decision_s)
        return {
            "policy": self.policy,
            "cluster": self.cluster,
            "belief": self.belief,
            "jobs": len(self.job_ids),
            "finished": int(done.sum()),
            "rejected": int(self.rejected.sum()),
            "avg_jct_s": _or_none(np.mean, jct),
            "weighted_jct_s": float(np.average(jct, weights=self.weight[done])) if len(jct) else None,
            "p50_jct_s": _or_none(np.median, jct),
            "p99_jct_s": _or_none(lambda x: np.percentile(x, 99), jct),
            "makespan_s": float(np.nanmax(self.finish_s)) - float(self.submit_s.min())
            if done.any()
            else None,
            "deadline_jobs": deadline_jobs,
            "deadline_met": self.deadline_met,
            "deadline_ratio": self.deadline_met / deadline_jobs if deadline_jobs else None,
            "promises_broken": self.promises_broken,
            "avg_rho": _or_none(np.mean, rho),
            "max_rho": _or_none(np.max, rho),
            "gpu_utilisation": (
                self.gpu_seconds / self.capacity_gpu_seconds if self.capacity_gpu_seconds else None
            ),
            "cost": self.cost,
            "node_hours": self.node_hours,
            "resizes": int(self.job_resizes.sum()),
            "decisions": len(self.decision_s),
            "decision_ms_mean": _or_none(np.mean, decisions * 1e3),
            "decision_ms_p99": _or_none(lambda x: np.percentile(x, 99), decisions * 1e3),
            "cpu_s": self.cpu_s,
            "stalled": self.stalled,
        }


def _or_none(reduce: Any, values: FloatArray) -> float | None:
    return float(reduce(values)) if len(values) else None
