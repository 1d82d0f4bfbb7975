"""Choosing the batch for the present allocation while training goes on, after Pollux (OSDI'21).

`BatchTuner` records how long steps take, fits the throughput model to that, and picks the (local batch,
accumulation) with the highest goodput that the gradient noise allows. Three things keep it calm and safe:

- *hysteresis*: the plan changes only for a predicted gain of more than 5%; a change costs a little, and
  predictions err;
- *exploration*: in one change the local batch at most doubles and the total at most quadruples (one worker
  needs a larger local batch *and* accumulation to gain at all), and nothing grows before the noise has been
  averaged over some steps. Further out both models are mere extrapolation;
- *memory*: what fits is not known in advance. The tuner remembers the largest local batch that ran and the
  smallest that ran out of memory, and halves the gap between them until it is less than an eighth.

There is no clock, I/O or torch here: callers pass in times and get a plan. One worker decides and tells the
others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swell.perf.efficiency import SETTLED_UPDATES, gain
from swell.perf.goodput import BatchLimits, BatchPlan, best_goodput, fixed_plan
from swell.perf.throughput import ThroughputParams, fit_throughput, iteration_s

_WINDOW = 32
"""Number of times kept per configuration; the model is fitted to their median."""


class Noise(Protocol):
    """The part of `NoiseScale` that the tuner uses."""

    @property
    def sqr(self) -> float: ...
    @property
    def var(self) -> float: ...
    @property
    def updates(self) -> int: ...


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """The configuration in which a step time was measured."""

    nodes: int
    replicas: int
    local_batch: int
    accumulation: int


class OutOfMemory(RuntimeError):
    """Not even the smallest local batch fits the memory."""


class MemoryBound:
    """The largest local batch that fits, found by trying."""

    __slots__ = ("_fails", "_fits", "_max_local", "_min_local")

    def __init__(self, min_local: int, max_local: int) -> None:
        self._min_local = min_local
        self._max_local = max_local
        self._fits = 0
        self._fails: int | None = None

    def ran(self, local_batch: int) -> None:
        """Record that a step with that local batch succeeded."""
        if self._fails is None or local_batch < self._fails:
            self._fits = max(self._fits, local_batch)

    def failed(self, local_batch: int) -> None:
        """Record that a step with that local batch ran out of memory, even if one succeeded before."""
        if local_batch <= self._min_local:
            raise OutOfMemory(
                f"a local batch of {local_batch} does not fit the memory and is the smallest allowed; "
                "lower min_local, or make the model or its input smaller"
            )
        self._fails = local_batch if self._fails is None else min(self._fails, local_batch)
        if self._fits >= local_batch:
            # Memory use has crept up. What fits now is unknown; a quarter less probably does.
            self._fits = max(local_batch * 3 // 4, self._min_local)

    @property
    def limit(self) -> int:
        """The largest local batch to try now: twice the largest that ran, or half-way to one that failed."""
        fits = max(self._fits, self._min_local)
        if self._fails is None:
            return min(2 * fits, self._max_local) if self._fits else self._max_local
        gap = self._fails - fits
        return fits if gap <= max(fits // 8, 1) else fits + gap // 2

    @property
    def largest(self) -> int:
        """The largest local batch that may ever run: the largest allowed, or less once a batch has failed."""
        return self._max_local if self._fails is None else self.limit

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that `load_state_dict` takes."""
        return {"fits": self._fits, "fails": self._fails}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self._fits = int(state["fits"])
        self._fails = None if state["fails"] is None else int(state["fails"])


class _Times:
    """The last times of one setting, without the first few steps, which warm up caches and compilers."""

    __slots__ = ("grad_s", "step_s", "to_skip")

    def __init__(self, to_skip: int) -> None:
        self.to_skip = to_skip
        self.grad_s: deque[float] = deque(maxlen=_WINDOW)
        self.step_s: deque[float] = deque(maxlen=_WINDOW)

    def add(self, grad_s: float, step_s: float) -> None:
        if self.to_skip:
            self.to_skip -= 1
            return
        self.grad_s.append(grad_s)
        self.step_s.append(step_s)


def warm_up() -> None:
    """Load the compiled parts of fitting and choosing now, so that no step waits for them later."""
    params = fit_throughput([1, 1], [1, 2], [8, 8], [0.01, 0.01], [0.01, 0.02])
    best_goodput(params, 1.0, 1.0, BatchLimits(1, 2, 1, 2), [1], [1])


class BatchTuner:
    """Picks (local batch, accumulation) for the present allocation from the steps it has observed."""

    def __init__(
        self,
        limits: BatchLimits,
        *,
        hysteresis: float = 0.05,
        growth: float = 4.0,
        min_noise_updates: int = SETTLED_UPDATES,
        warmup_steps: int = 2,
    ) -> None:
        if hysteresis < 0.0:
            raise ValueError(f"hysteresis: got {hysteresis}, must be at least 0")
        if growth <= 1.0:
            raise ValueError(f"growth: got {growth}, must exceed 1")
        self._limits = limits
        self._hysteresis = hysteresis
        self._growth = growth
        self._min_noise_updates = min_noise_updates
        self._warmup_steps = warmup_steps
        self._memory = MemoryBound(limits.min_local, limits.max_local)
        self._times: dict[Setting, _Times] = {}
        self._largest_total = limits.init_batch
        self._params: ThroughputParams | None = None
        self._fitted_to: dict[Setting, int] = {}
        self._plan: BatchPlan | None = None

    @property
    def limits(self) -> BatchLimits:
        """The limits of the batches that may be used: the user's, reduced by what did not fit the memory.

        `choose` approaches these limits step by step; a scheduler plans with the limits themselves.
        """
        return replace(self._limits, max_local=max(self._memory.largest, self._limits.min_local))

    @property
    def params(self) -> ThroughputParams | None:
        """The throughput model as last fitted, for reports."""
        return self._params

    @property
    def max_local(self) -> int:
        """The largest local batch worth trying now, as far as memory is known."""
        return self._memory.limit

    def observe(
        self,
        *,
        nodes: int,
        replicas: int,
        local_batch: int,
        accumulation: int,
        iteration_time_s: float,
        sync_time_s: float = 0.0,
    ) -> None:
        """Record one committed step: its whole time, and the part of it spent synchronising."""
        for name, value in (("nodes", nodes), ("replicas", replicas), ("local_batch", local_batch)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        if accumulation < 0:
            raise ValueError(f"accumulation: got {accumulation}, must be at least 0")
        self._memory.ran(local_batch)
        total = replicas * local_batch * (accumulation + 1)
        self._largest_total = max(self._largest_total, total)
        computing_s = iteration_time_s - sync_time_s
        if not (math.isfinite(computing_s) and computing_s > 0.0 and sync_time_s >= 0.0):
            return  # the clock jumped, or the step was interrupted
        grad_s = computing_s / (accumulation + 1)
        setting = Setting(nodes, replicas, local_batch, accumulation)
        times = self._times.setdefault(setting, _Times(self._warmup_steps))
        # In the model, a step is one gradient with its synchronising; the gradients before are accumulation.
        times.add(grad_s, grad_s + sync_time_s)

    def out_of_memory(self, local_batch: int) -> None:
        """Remember that a local batch did not fit; raises `OutOfMemory` when nothing smaller is allowed."""
        self._memory.failed(local_batch)
        self._plan = None

    def choose(self, nodes: int, replicas: int, noise: Noise) -> BatchPlan:
        """The plan for this allocation: the present one, unless another is predicted to be clearly better."""
        allowed = self._allowed(replicas)
        present = self._present(allowed, replicas)
        if noise.updates >= self._min_noise_updates and self._refit():
            best = self._best(allowed, nodes, replicas, noise)
            if best is not None and best != present:
                now = self._goodput(present, nodes, replicas, noise)
                then = self._goodput(best, nodes, replicas, noise)
                if then > (1.0 + self._hysteresis) * now:
                    present = best
        self._plan = present
        return present

    def _allowed(self, replicas: int) -> BatchLimits:
        """The user's limits, reduced to the batches that may be tried now."""
        max_local = max(min(self._memory.limit, self._limits.max_local), self._limits.min_local)
        reach = max(int(self._growth * self._largest_total), self._limits.min_local * replicas)
        max_batch = max(min(self._limits.max_batch, reach), self._limits.init_batch)
        return replace(self._limits, max_local=max_local, max_batch=max_batch)

    def _present(self, allowed: BatchLimits, replicas: int) -> BatchPlan:
        """The plan in use if it is legal on this many replicas, else the tuned batch split over them."""
        plan = self._plan
        if (
            plan is not None
            and plan.local_batch <= allowed.max_local
            and allowed.init_batch <= plan.total(replicas) <= allowed.max_batch
        ):
            if replicas == 1 and plan.accumulation == 0:
                return fixed_plan(allowed, plan.total(1), 1)  # accumulates above the tuned batch
            return plan
        return fixed_plan(allowed, max(allowed.init_batch, allowed.min_local * replicas), replicas)

    def _best(self, allowed: BatchLimits, nodes: int, replicas: int, noise: Noise) -> BatchPlan | None:
        assert self._params is not None
        goodput, local_batch, accumulation = best_goodput(
            self._params, noise.sqr, noise.var, allowed, [nodes], [replicas]
        )
        return BatchPlan(int(local_batch[0]), int(accumulation[0])) if goodput[0] > 0.0 else None

    def _goodput(self, plan: BatchPlan, nodes: int, replicas: int, noise: Noise) -> float:
        """Iterations at the tuned batch per second."""
        assert self._params is not None
        scale = plan.total(replicas) / self._limits.init_batch
        seconds = iteration_s(self._params, nodes, replicas, plan.local_batch, plan.accumulation)
        return float(gain(noise.sqr, noise.var, scale)) / float(seconds)

    def _refit(self) -> bool:
        """Fit the model again if some setting's observations have doubled; False without observations."""
        seen = {setting: len(times.step_s) for setting, times in self._times.items() if times.step_s}
        if not seen:
            return False
        stale = any(count >= 2 * self._fitted_to.get(setting, 0) for setting, count in seen.items())
        if self._params is None or stale or sum(seen.values()) % _WINDOW == 0:
            settings = sorted(seen)
            self._params = fit_throughput(
                [s.nodes for s in settings],
                [s.replicas for s in settings],
                [s.local_batch for s in settings],
                [statistics.median(self._times[s].grad_s) for s in settings],
                [statistics.median(self._times[s].step_s) for s in settings],
            )
            self._fitted_to = seen
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers that `load_state_dict` takes; times are kept as their medians."""
        return {
            "times": [
                [
                    [s.nodes, s.replicas, s.local_batch, s.accumulation],
                    statistics.median(times.grad_s),
                    statistics.median(times.step_s),
                ]
                for s, times in sorted(self._times.items())
                if times.step_s
            ],
            "memory": self._memory.state_dict(),
            "largest_total": self._largest_total,
            "plan": None if self._plan is None else [self._plan.local_batch, self._plan.accumulation],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self._times = {}
        for setting, grad_s, step_s in state["times"]:
            times = self._times[Setting(*setting)] = _Times(0)
            times.add(float(grad_s), float(step_s))
        self._memory.load_state_dict(state["memory"])
        self._largest_total = int(state["largest_total"])
        self._plan = None if state["plan"] is None else BatchPlan(*state["plan"])
        self._params, self._fitted_to = None, {}
