"""A scheduler's belief about one job's performance, learned from the job's reports.

A belief starts with a prior: speed proportional to GPUs, which makes a scheduler explore, or a model carried
over from similar jobs. Each new configuration the job runs in is one more observation for the throughput
model, which is fitted again when it is next needed. A belief also has an estimate of its own error, for
callers that plan with a margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from swell.domain import FloatArray, IntArray
from swell.perf.efficiency import gain_at
from swell.perf.goodput import (
    BatchLimits,
    BatchPlan,
    Candidates,
    candidate_times,
    candidates,
    fixed_plan,
    goodput_table,
)
from swell.perf.throughput import SMALLEST, ThroughputParams, fit_throughput, step_times

REFIT_CHANGE = 0.02
"""The model is fitted again once a configuration's mean times differ by this share from the last fit's."""

UNSEEN_ERROR = 0.10
"""Relative error added per doubling of the GPUs beyond the most observed, and for a first run on several
nodes."""

PRIOR_ERROR = 0.25
"""Relative error of a model carried over from other jobs, before this job has been observed."""

NO_NOISE_LIMIT = (0.0, 1.0)
"""Gradient statistics of a job to which every sample is worth the same, however large the batch."""


class _Observed:
    """Mean times of one configuration, and those the last fit used."""

    __slots__ = ("count", "grad_s", "step_s", "used_grad_s", "used_step_s")

    def __init__(self, grad_s: float, step_s: float) -> None:
        self.count = 1
        self.grad_s = self.used_grad_s = grad_s
        self.step_s = self.used_step_s = step_s

    def add(self, grad_s: float, step_s: float) -> bool:
        """Take one more measurement into the mean; True if a new fit is due."""
        self.count += 1
        self.grad_s += (grad_s - self.grad_s) / self.count
        self.step_s += (step_s - self.step_s) / self.count
        return (
            abs(self.step_s - self.used_step_s) > REFIT_CHANGE * self.used_step_s
            or abs(self.grad_s - self.used_grad_s) > REFIT_CHANGE * self.used_grad_s
        )


class JobBelief:
    """The believed goodput of one job. Its answers change only when `version` does."""

    def __init__(
        self,
        limits: BatchLimits,
        fixed_batch: int | None = None,
        prior: ThroughputParams | None = None,
        *,
        throughput_only: bool = False,
    ) -> None:
        """`fixed_batch`: the batch size of a job that keeps it; `prior`: a model fitted on similar jobs.

        With `throughput_only`, all samples count alike: gradient statistics are ignored.
        """
        self.limits = limits
        self.fixed_batch = fixed_batch
        self.prior = prior
        self.explores = prior is None
        """Whether the job has to grow step by step, because it is not known how it scales."""
        self.version = 0
        """Grows whenever an answer may have changed."""
        self.most_gpus = 0
        """The most GPUs the job was ever seen on."""
        self.throughput_only = throughput_only
        self.sqr, self.var = NO_NOISE_LIMIT if throughput_only else (1.0, 0.0)
        self.noise_known = False
        """True once `sqr` and `var` were reported; until then a larger batch counts as no gain."""
        self._observed: dict[tuple[int, int, int], _Observed] = {}
        self._params: ThroughputParams | None = prior
        self._stale = False
        self._candidates: Candidates | None = None
        self._times_s: FloatArray | None = None
        self._table: tuple[FloatArray, IntArray] | None = None
        self._plans: dict[tuple[bool, int], BatchPlan] = {}

    @classmethod
    def from_figures(cls, figures: Mapping[str, Any]) -> JobBelief:
        """A belief that starts from the figures of an earlier job (docs/how/history.md lists them)."""
        batch = max(int(figures.get("batch_size") or 1), 1)
        limits = figures.get("limits") or BatchLimits(batch, batch, 1, batch).as_dict()
        fixed_batch = None if figures.get("mode") == "adaptive" else batch
        made = cls(BatchLimits(**limits), fixed_batch, prior=ThroughputParams(*figures["params"]))
        if figures.get("var") is not None:
            made.observe_gradients(float(figures["sqr"]), float(figures["var"]))
        return made

    @property
    def known(self) -> bool:
        """True if there is a throughput model: a prior, or one fitted on observations."""
        return self._params is not None or self._stale

    @property
    def params(self) -> ThroughputParams | None:
        """The fitted throughput model, None before the first observation if there is no prior."""
        if self._stale:
            self._fit()
        return self._params

    @property
    def observations(self) -> int:
        """The number of different configurations the job has been observed in."""
        return len(self._observed)

    @property
    def synchronised(self) -> bool:
        """Whether the job was ever observed on several GPUs."""
        return any(gpus > 1 for _, gpus, _ in self._observed)

    @property
    def local_batch(self) -> int | None:
        """The largest batch per GPU that the job was observed at; None before the first observation."""
        return max((local_batch for _, _, local_batch in self._observed), default=None)

    def measured(self) -> list[dict[str, float]]:
        """The points that the model is fitted to: mean step time and goodput of each configuration.

        The goodput is the value that `curve` has there if the model meets the point exactly.
        """
        points = []
        for (nodes, gpus, local_batch), seen in sorted(self._observed.items()):
            rate = 1.0 / seen.step_s
            if self.fixed_batch is not None:
                gradients = max(round(self.fixed_batch / (gpus * local_batch)), 1)
                rate = 1.0 / ((gradients - 1) * seen.grad_s + seen.step_s)
            elif self.noise_known:
                rate *= float(gain_at(self.sqr, self.var, gpus * local_batch / self.limits.init_batch))
            points.append(
                {
                    "nodes": nodes,
                    "workers": gpus,
                    "local_batch": local_batch,
                    "step_s": round(seen.step_s, 6),
                    "rate": round(rate, 6),
                    "reports": seen.count,
                }
            )
        return points

    def observe(self, nodes: int, gpus: int, local_batch: int, step_s: float, sync_s: float) -> None:
        """Record a measured step: its whole time, and the synchronising time that computing does not hide."""
        grad_s = max(step_s - sync_s, SMALLEST)
        key = (nodes, gpus, local_batch)
        seen = self._observed.get(key)
        if seen is None:
            self._observed[key] = _Observed(grad_s, step_s)
            self.most_gpus = max(self.most_gpus, gpus)
        elif not seen.add(grad_s, step_s):
            return
        self._stale = True
        self._forget(times=True)

    def set_limits(self, limits: BatchLimits, fixed_batch: int | None = None) -> None:
        """Change the batches the job may use; the observations of its speed stay valid."""
        if (limits, fixed_batch) != (self.limits, self.fixed_batch):
            self.limits, self.fixed_batch = limits, fixed_batch
            self._candidates = None
            self._forget(times=True)

    def observe_gradients(self, sqr: float, var: float) -> None:
        """Record new gradient statistics, measured at the tuned batch size."""
        if self.throughput_only:
            return
        self.noise_known = True
        if (sqr, var) != (self.sqr, self.var):
            self.sqr, self.var = sqr, var
            self._forget(times=False)

    def max_gpus(self, bound: int) -> int:
        """The most GPUs to try, up to `bound`: twice the most observed, or all of them with a prior."""
        bound = min(bound, self.limits.max_gpus)
        return min(max(2 * self.most_gpus, 1), bound) if self.explores else bound

    def goodput(self, nodes: npt.ArrayLike, gpus: npt.ArrayLike) -> FloatArray:
        """Progress per second on the best batch for each placement; proportional to GPUs before any fit."""
        nodes, gpus = np.asarray(nodes), np.asarray(gpus)
        rates: FloatArray = self.table(int(gpus.max(initial=1)))[(nodes > 1).astype(np.int64), gpus]
        return rates

    def table(self, max_gpus: int) -> FloatArray:
        """All goodputs at once: row 0 on one node, row 1 on several, column k on k GPUs (read only).

        The table may have more columns than asked for.
        """
        if not self.known:
            return _proportional(max_gpus)
        return self._tables(max_gpus)[0]

    def plan(self, nodes: int, gpus: int) -> BatchPlan:
        """The batch plan the job should use on a placement."""
        if self.fixed_batch is not None:
            return fixed_plan(self.limits, self.fixed_batch, gpus)
        if not self.known:
            batch_size = max(self.limits.init_batch, self.limits.min_local * gpus)
            return fixed_plan(self.limits, batch_size, gpus)
        key = (nodes > 1, gpus)
        plan = self._plans.get(key)
        if plan is None:
            chosen = int(self._tables(gpus)[1][int(nodes > 1), gpus])
            if chosen < 0:  # more GPUs than the largest batch can feed: get as near to it as possible
                plan = fixed_plan(self.limits, self.limits.max_batch, gpus)
            else:
                assert self._candidates is not None
                plan = BatchPlan(
                    int(self._candidates.local_batch[chosen]), int(self._candidates.accumulation[chosen])
                )
            self._plans[key] = plan
        return plan

    def curve(self, max_gpus: int, gpus_per_node: int) -> FloatArray:
        """Goodput on 0 to `max_gpus` GPUs, packed on as few nodes as possible."""
        gpus = np.arange(max_gpus + 1)
        return self.goodput(-(-gpus // gpus_per_node), gpus)

    def throughput(self, max_gpus: int, gpus_per_node: int) -> FloatArray:
        """Throughput on 0 to `max_gpus` packed GPUs, in tuned batches per second, whatever it is good for."""
        params = self.params
        assert params is not None
        table = candidates(self.limits, max_gpus, self.fixed_batch)
        rates, _ = goodput_table(table, candidate_times(params, table), *NO_NOISE_LIMIT)
        gpus = np.arange(max_gpus + 1)
        return rates[(gpus > gpus_per_node).astype(np.int64), gpus]

    def shown(self, max_gpus: int) -> FloatArray:
        """The job's measured speed over that of the model, on 0 to `max_gpus` GPUs.

        For each number of GPUs that the job was observed on, the configuration seen most often counts;
        between two of them it is interpolated, beyond the last it is as there.
        """
        params = self.params
        if params is None or not self._observed:
            return np.ones(max_gpus + 1)
        often: dict[int, tuple[int, float]] = {}
        for (nodes, gpus, local_batch), seen in self._observed.items():
            faster = float(step_times(params, nodes, gpus, local_batch)[1]) / seen.step_s
            often[gpus] = max(often.get(gpus, (0, 1.0)), (seen.count, faster))
        counts = sorted(often)
        return np.interp(
            np.log(np.arange(max_gpus + 1) + 1e-9), np.log(counts), [often[k][1] for k in counts]
        )

    def relative_error(self, nodes: npt.ArrayLike, gpus: npt.ArrayLike) -> FloatArray:
        """One standard deviation of the predicted step time, relative to it, for each placement.

        The error is what the fit leaves unexplained (with a prior for few observations), and it grows with
        the distance of a placement from the observed ones.
        """
        nodes, gpus = np.broadcast_arrays(np.asarray(nodes), np.asarray(gpus))
        residual = self.residual
        if not self._observed:
            return np.full(gpus.shape, residual)
        doublings = np.log2(np.maximum(gpus / self.most_gpus, 1.0))
        first_across = (nodes > 1) & (not any(n > 1 for n, _, _ in self._observed))
        return np.hypot(residual, UNSEEN_ERROR * (doublings + first_across))

    @property
    def residual(self) -> float:
        """Relative error of the model where it was observed, shrunk towards a prior of 10% on few samples."""
        params = self.params
        if not self._observed:
            return PRIOR_ERROR if params is not None else math.inf
        assert params is not None
        nodes, gpus, local = np.array(list(self._observed)).T
        step_s = np.array([o.step_s for o in self._observed.values()])
        errors = np.log(step_times(params, nodes, gpus, local)[1] / step_s)
        return math.sqrt((UNSEEN_ERROR**2 + float(errors @ errors)) / (1 + len(errors)))

    def _fit(self) -> None:
        nodes, gpus, local = np.array(list(self._observed), dtype=np.float64).T
        for seen in self._observed.values():
            seen.used_grad_s, seen.used_step_s = seen.grad_s, seen.step_s
        grad_s = np.array([o.grad_s for o in self._observed.values()])
        step_s = np.array([o.step_s for o in self._observed.values()])
        self._params = fit_throughput(nodes, gpus, local, grad_s, step_s, self.prior)
        self._stale = False

    def _forget(self, *, times: bool) -> None:
        self.version += 1
        self._table = None
        self._plans = {}
        if times:
            self._times_s = None

    def _tables(self, max_gpus: int) -> tuple[FloatArray, IntArray]:
        if self._candidates is None or self._candidates.max_gpus < max_gpus:
            # The size is a power of two, so that a growing job does not compute new candidates at each step.
            size = 1 << max(max_gpus - 1, 7).bit_length()
            self._candidates = candidates(self.limits, size, self.fixed_batch)
            self._times_s = self._table = None
        if self._table is None:
            params = self.params
            assert params is not None
            if self._times_s is None:
                self._times_s = candidate_times(params, self._candidates)
            self._table = goodput_table(self._candidates, self._times_s, self.sqr, self.var)
            self._table[0].setflags(write=False)
        return self._table


def _proportional(max_gpus: int) -> FloatArray:
    """The exploration prior: goodput in proportion to the number of GPUs."""
    return np.tile(np.arange(max_gpus + 1, dtype=np.float64), (2, 1))
