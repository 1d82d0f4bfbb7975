"""The adaptive batch: batch size and learning rate follow the gradients and the number of workers.

`BatchTuner` chooses a batch by goodput; all members agree on it (`AgreedBatch`), and `Adaptation` is what a
worker does for it in a step. docs/how/adaptive.md explains it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from swell.perf.efficiency import SETTLED_UPDATES, gain
from swell.perf.goodput import BatchLimits, BatchPlan, best_goodput, fixed_plan
from swell.perf.throughput import ThroughputParams, fit_throughput, iteration_s
from swell.train.agent.errors import UsageError
from swell.train.data.loader import ElasticLoader
from swell.train.modes.noise import AdamPreconditioner, BatchState, NoiseMeter, NoiseScale, StepGradient, rule
from swell.train.sync.memory import FlatModel
from swell.train.sync.reducer import Norms, Reduced

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


# ---------------------------------------------------------------------- the batch that all agree on
# The batch that all workers of a job agree on, and how they come to a new one.
#
# With the messages of a step the workers exchange how long their last step took and what did not fit into
# their memory; rank 0 adds a new plan when it has one. A new plan in the headers holds from the next step
# on, and the batch changes at no other moment. After a resize or a death the batch stays as it is, only
# split over other workers, because survivors may be in the middle of a step.
#
# All workers record the same times, so that any of them can become rank 0.


Header = dict[str, Any]


class AgreedBatch:
    """The present batch, and this worker's message to the others about the next one."""

    def __init__(self, limits: BatchLimits, *, decide_every: int = 10) -> None:
        """A new plan is considered every `decide_every` steps, and after each change of the workers."""
        if decide_every < 1:
            raise ValueError(f"decide_every: got {decide_every}, must be at least 1")
        self.limits = limits
        self.tuner = BatchTuner(limits)
        self.batch = limits.init_batch
        """Samples in a step."""
        self.micro_batch = limits.max_local
        """The most samples that one gradient is computed on."""
        self._decide_every = decide_every
        self._decide_soon = True
        self._last: list[float] | None = None
        """This worker's last step: its times, its samples and its micro-batches."""
        self._proposal: BatchPlan | None = None
        self._failed: int | None = None
        """The fewest samples that did not fit here, not yet sent to the others."""

    def header(self) -> Header:
        """This worker's part of the step header."""
        header: Header = {}
        if self._last is not None:
            header["last"] = self._last
        if self._proposal is not None:
            header["plan"] = [self._proposal.local_batch, self._proposal.accumulation]
        if self._failed is not None:
            header["failed"] = self._failed
        return header

    def observe(self, iteration_time_s: float, sync_time_s: float, samples: int, micro_batches: int) -> None:
        """Record this worker's last committed step: its times, its samples and its micro-batches."""
        self._last = [iteration_time_s, sync_time_s, samples, micro_batches] if samples else None

    def out_of_memory(self, local_batch: int) -> int:
        """Record that a number of samples did not fit; returns the size to try. The next header has it."""
        self._failed = min(local_batch, self._failed or local_batch)
        if self._failed <= self.limits.min_local:
            self.tuner.out_of_memory(self._failed)  # raises, because nothing smaller is allowed
        return max(self._failed // 2, self.limits.min_local)

    def commit(self, headers: Sequence[Header], nodes: int, steps: int, noise: Noise) -> None:
        """Adopt the headers of this step (in rank order), and make the next proposal.

        `nodes` are the machines that the workers are on; `steps` counts those committed so far, this one
        included.
        """
        self._learn_times(headers, nodes)
        if (plan := headers[0].get("plan")) is not None:
            adopted = BatchPlan(int(plan[0]), int(plan[1]))
            self.batch, self.micro_batch = adopted.total(len(headers)), adopted.local_batch
        self._proposal = self._last = None
        failed = [int(header["failed"]) for header in headers if header.get("failed")]
        if failed:
            self.tuner.out_of_memory(min(failed))
            self.micro_batch = min(self.micro_batch, self.tuner.max_local)
            self._failed = None
        if failed or self._decide_soon or steps % self._decide_every == 0:
            self._decide_soon = False
            chosen = self.tuner.choose(nodes, len(headers), noise)
            if (chosen.total(len(headers)), chosen.local_batch) != (self.batch, self.micro_batch):
                self._proposal = chosen

    def _learn_times(self, headers: Sequence[Header], nodes: int) -> None:
        """Record the mean times over all workers."""
        last = [header["last"] for header in headers if header.get("last")]
        if len(last) != len(headers):
            return
        samples, micro_batches = int(last[0][2]), int(last[0][3])
        self.tuner.observe(
            nodes=nodes,
            replicas=len(headers),
            local_batch=-(-samples // micro_batches),
            accumulation=micro_batches - 1,
            iteration_time_s=sum(entry[0] for entry in last) / len(last),
            sync_time_s=sum(entry[1] for entry in last) / len(last),
        )

    def membership_changed(self) -> None:
        """Note that the workers have changed: the last step's times do not count, and a new plan is due."""
        self._last = self._proposal = None
        self._decide_soon = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {"tuner": self.tuner.state_dict(), "batch": self.batch, "micro_batch": self.micro_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self.tuner.load_state_dict(state["tuner"])
        self.batch, self.micro_batch = int(state["batch"]), int(state["micro_batch"])
        self._failed = None


# ---------------------------------------------------------------------- the mode of a job
# The *adaptive* batch mode of one job: noise statistics, learning rate and batch plan, step by step.
#
# What happens around one step, on every worker:
#
# 1. The header of the agreed batch (`agreed`) is added to the message that the workers exchange anyway. It
# has    this worker's last times and, from rank 0, a new plan. 2. While gradients are summed, the squared
# norms of every worker's share and of the sum are taken (times    `meter.weights`). A single worker that
# accumulates keeps its first micro-batch instead (`keep_first`). 3. `commit` turns these numbers into one
# update of the noise scale (`meter`), into the factor on the learning    rate, and into the batch of the
# next step. All workers read the same numbers in the same order, so the    learning rates of all copies of
# the model stay equal. 4. `scaled_learning_rate` wraps the optimizer's step. The factor is applied for that
# call only: schedulers and    users keep seeing the learning rate they tuned.


class AdaptiveMode:
    """Learning rate and progress of a job whose batch follows goodput."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        meter: NoiseMeter,
        agreed: AgreedBatch,
        *,
        learning_rate_rule: str = "adascale",
        warmup_epochs: float = 0.0,
    ) -> None:
        self.meter = meter
        self.agreed = agreed
        self.progress = 0.0
        """Steps at the tuned batch that training so far is worth."""
        self.step = 0
        self.factor = 1.0
        """The factor on the learning rate in the last step."""
        self.worth = 1.0
        """Steps at the tuned batch that the last step was worth."""
        self._optimizer = optimizer
        self._adam_like = AdamPreconditioner.applies_to(optimizer)
        self._rule = rule(learning_rate_rule)
        self._warmup_epochs = warmup_epochs
        self._init_batch = agreed.limits.init_batch

    @property
    def measuring(self) -> bool:
        """Whether norms are taken in the present step; the same on all workers."""
        return self.meter.due(self.step)

    def keep_first(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Keep the first micro-batch's gradient; called by a single worker that accumulates."""
        self.meter.keep_first(self.step, gradients, samples)

    def commit(
        self, headers: Sequence[Header], gradient: StepGradient, *, nodes: int, epochs_done: float
    ) -> float:
        """Use what all workers exchanged for this step; returns the learning-rate factor.

        Args:
            headers: what the agreed batch's `header` gave on each worker, in rank order.
            gradient: the norms that were taken in this step.
            nodes: machines the workers are on.
            epochs_done: passes over the data before this step.
        """
        scale = gradient.samples / self._init_batch
        self.meter.update(self.step, gradient, scale)
        noise = self.meter.noise
        # The short batch at the end of an epoch keeps the tuned rate, as in a plain loop.
        at_least = max(scale, 1.0)
        self.worth = noise.gain(at_least)
        self.factor = self._rule(
            BatchState(
                scale=at_least,
                gain=self.worth,
                epochs_done=epochs_done,
                adaptive_optimizer=self._adam_like,
                warmup_epochs=self._warmup_epochs,
            )
        )
        # A short batch counts by its samples, so that an epoch at the tuned batch is worth exactly one.
        self.progress += self.worth if scale >= 1.0 else scale
        self.step += 1
        self.agreed.commit(headers, nodes, self.step, noise)
        return self.factor

    def membership_changed(self) -> None:
        """Note that the workers have changed."""
        self.agreed.membership_changed()
        self.meter.membership_changed()

    @contextlib.contextmanager
    def scaled_learning_rate(self) -> Iterator[None]:
        """Multiply every group's learning rate by the step's factor while the optimizer steps.

        Adam's averages decay with every step. This step is worth `worth` tuned ones, so the averages decay as
        much as in that many steps (see `scaling`).
        """
        groups = self._optimizer.param_groups
        names = ("lr", "betas") if self._adam_like else ("lr",)
        before = [{name: group[name] for name in names} for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor
            if self._adam_like:
                group["betas"] = tuple(beta**self.worth for beta in group["betas"])
        try:
            yield
        finally:
            for group, values in zip(groups, before):
                group.update(values)

    def report(self) -> dict[str, float | int | bool | None]:
        """Numbers for the job's reports."""
        noise = self.meter.noise
        noise_scale = noise.noise_scale(self._init_batch)
        return {
            "grad_sqr": noise.sqr,
            "grad_var": noise.var,
            "noise_scale": noise_scale if math.isfinite(noise_scale) else None,
            "noise_biased": noise.biased,
            "learning_rate_factor": self.factor,
            "init_batch": self._init_batch,
            "batch": self.agreed.batch,
            "micro_batch": self.agreed.micro_batch,
            "progress": self.progress,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes; the parts' values are side by side in it."""
        own = {"progress": self.progress, "step": self.step}
        return {**self.meter.state_dict(), **self.agreed.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`; the optimizer's state must have been loaded before."""
        self.meter.load_state_dict(state)
        self.agreed.load_state_dict(state)
        self.progress = float(state["progress"])
        self.step = int(state["step"])
        self.membership_changed()


# ---------------------------------------------------------------------- in a worker's step
# Adaptive mode connected to a job: its flat gradients, its loader, its progress.
#
# `AdaptiveMode` works on numbers only. This thin layer takes the numbers from the job's model and reducer
# and applies the decisions to the loader, so that `job` only reports what happens in a step.
#
# How long to train: `job.epochs(n)` in adaptive mode means as much progress as n epochs at the tuned batch.
# A larger batch makes less progress per sample, so training needs more samples, though fewer steps and less
# time. That is what goodput weighs, and it keeps the resulting model the same. Training ends at the step
# that reaches this progress, even in the middle of a pass. Schedulers follow progress too. A job that must
# see the data exactly n times uses `job.epochs(n, by="data")`.


_EVERY = ((64_000_000, 16), (1_000_000, 4), (0, 1))
"""How often norms that need extra passes are taken: one step of so many, for models of so many parameters."""

_NEW_LENGTH = 0.02
"""A guessed length is reported again only when it has changed by more than this share."""

DEFAULT_GROWTH = 32
"""The largest batch tried if the user sets none, as a multiple of the tuned one."""


_MOST_MEASURED = 1 << 26
"""Norms are taken of at most about this many elements of the gradient."""
_WIDEST_STRIDE = 16


def stride(elements: int) -> int:
    """Norms are taken of each element at a multiple of this: 1 for all but large models."""
    step = 1
    while elements // step > _MOST_MEASURED and step < _WIDEST_STRIDE:
        step *= 2
    return step


class Adaptation:
    """One job's adaptive batch: `begin` a step, `after_backward`, `commit`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flat: FlatModel,
        loader: ElasticLoader,
        *,
        max_batch: int | None = None,
        min_local: int = 1,
        max_local: int | None = None,
        learning_rate_rule: str = "adascale",
        warmup_epochs: float = 0.0,
    ) -> None:
        tuned = loader.batch_size
        bounds = [bound for bound in (max_local, loader.micro_batch) if bound is not None]
        limits = _limits(tuned, len(loader.dataset), max_batch, min_local, min(bounds, default=None))
        self._flat = flat
        self._loader = loader
        self._tuned = tuned
        self._stride = stride(sum(p.numel() for p in flat.parameters.values()))
        self._generation = -1
        adam, per_parameter, self._buckets = _precondition(optimizer, flat, self._stride)
        packed = Packed(flat, self._stride) if packs(flat.device) else None
        self._gradients: Callable[[], Sequence[Tensor]] = (
            packed.gradients if packed is not None else lambda: _gradients(flat, self._stride)
        )
        """The present gradient as this worker takes norms of it: by bucket on a GPU, else by parameter."""
        elements = sum(p.numel() for p in flat.parameters.values())
        every = next(steps for size, steps in _EVERY if elements >= size)
        meter = NoiseMeter(
            every=every if adam is not None else 1,
            alone_every=every,
            adam=adam,
            weights=per_parameter if packed is None else packed.weights(self._buckets),
            epoch_scale=len(loader.dataset) / tuned,
        )
        self._mode = AdaptiveMode(
            optimizer,
            meter,
            AgreedBatch(limits),
            learning_rate_rule=learning_rate_rule,
            warmup_epochs=warmup_epochs,
        )
        self.noise: NoiseScale = meter.noise
        """The running statistics; the same on every worker."""
        self._reported_of = 0.0
        self.until_epochs: float | None = None
        """Training ends, even in the middle of a pass, once it is worth this many epochs."""
        warm_up()
        loader.micro_batch = self._mode.agreed.micro_batch

    # ------------------------------------------------------------------ one step

    @property
    def norms(self) -> Norms | None:
        """How the reducer takes norms in this step, if it has to."""
        if not self._mode.measuring:
            return None
        return Norms(self._stride, self._buckets if self._mode.meter.weights is not None else None)

    def header(self, generation: int) -> Header:
        """This mode's part of the step header, under one key."""
        if generation != self._generation:
            self._generation = generation
            self._mode.membership_changed()
        return {"adaptive": self._mode.agreed.header()}

    def after_backward(self, samples: int) -> None:
        """Called by a single worker after the first of several micro-batches."""
        self._mode.keep_first(self._gradients(), samples)

    def commit(self, reduced: Reduced, *, alone: bool, nodes: int, unscale: float = 1.0) -> None:
        """Update the statistics and the learning rate, just before a step takes effect."""
        loader = self._loader
        self._mode.commit(
            [header.get("adaptive", {}) for header in reduced.headers],
            StepGradient(
                part_samples=[int(header["n"]) for header in reduced.headers],
                part_squares=reduced.part_squares,
                total_square=reduced.total_square,
                whole=self._gradients if alone else None,
                unscale=unscale * (self._stride if alone else 1),
            ),
            nodes=nodes,
            epochs_done=loader.passes + loader.cursor / len(loader.dataset),
        )

    def follow(self) -> None:
        """Set the loader to the agreed batch, after a step has taken effect."""
        self._loader.batch_size = self._mode.agreed.batch
        self._loader.micro_batch = self._mode.agreed.micro_batch

    def observe(self, step_s: float, sync_s: float, samples: int, micro_batches: int) -> None:
        """Record how long this worker's last step took, and what it computed."""
        self._mode.agreed.observe(step_s, sync_s, samples, max(micro_batches, 1))

    def out_of_memory(self, samples: int) -> int:
        """Record that a micro-batch did not fit; returns the size to cut this step's part into."""
        return self._mode.agreed.out_of_memory(samples)

    def scaled_learning_rate(self) -> AbstractContextManager[None]:
        """The learning rate for this step, for the duration of the optimizer's step."""
        return self._mode.scaled_learning_rate()

    # ------------------------------------------------------------------ progress and state

    @property
    def noise_scale(self) -> float:
        """The batch size, in samples, at which noise and signal of the gradient are equally strong."""
        return self.noise.noise_scale(self._tuned)

    @property
    def preconditioner(self) -> list[Tensor] | None:
        """Flat, by parameter: the factors on the gradients before norms are taken; or None."""
        return self._mode.meter.weights

    def enough(self) -> bool:
        """Whether training has made the progress that was asked for."""
        return self.until_epochs is not None and self.epochs_worth >= self.until_epochs - 1e-6

    @property
    def steps_per_epoch(self) -> float:
        """Steps at the tuned batch in one pass over the data; a shorter last step counts by its samples."""
        samples = len(self._loader.dataset)
        return samples // self._tuned if self._loader.drop_last else samples / self._tuned

    @property
    def epochs_worth(self) -> float:
        """Epochs at the tuned batch that training so far is worth."""
        return self._mode.progress / self.steps_per_epoch

    @property
    def steps_worth(self) -> float:
        """Steps at the tuned batch that training so far is worth."""
        return self._mode.progress

    def progress(self, epochs: int | None, passes_done: float | None = None) -> dict[str, float | None]:
        """Steps at the tuned batch, so far and in total.

        A job that counts passes over the data gives `passes_done`. The total is then a guess, which assumes
        that the coming passes make as much progress per sample as the present batch does.
        """
        done = self._mode.progress
        if epochs is None:
            return {"done": done, "of": None}
        if passes_done is None:
            return {"done": done, "of": epochs * self.steps_per_epoch}
        worth = self.noise.efficiency(max(self._mode.agreed.batch / self._tuned, 1.0))
        of = done + max(epochs - passes_done, 0.0) * self.steps_per_epoch * worth
        if abs(of - self._reported_of) > _NEW_LENGTH * of:
            self._reported_of = of
        return {"done": done, "of": max(self._reported_of, done)}

    def report(self) -> dict[str, float | int | bool | None]:
        """The statistics so far, as numbers."""
        return self._mode.report()

    def beat(self) -> dict[str, Any]:
        """All statistics for the job's reports, and separately the figures that a scheduler reads."""
        out: dict[str, Any] = {"adaptive": self.report(), "limits": self._mode.agreed.tuner.limits.as_dict()}
        if self.noise.ready:
            out |= {"sqr": self.noise.sqr, "var": self.noise.var, "noise_updates": self.noise.updates}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return self._mode.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`; load model, optimizer and loaders before."""
        self._mode.load_state_dict(state)
        self.follow()


def _limits(
    tuned: int, samples: int, max_batch: int | None, min_local: int, max_local: int | None
) -> BatchLimits:
    if max_batch is not None and max_batch < tuned:
        raise UsageError(f"max_batch: got {max_batch}, must be at least the tuned batch size {tuned}")
    if min_local < 1:
        raise UsageError(f"min_local: got {min_local}, must be at least 1")
    if max_local is not None and max_local < min_local:
        raise UsageError(f"max_local: got {max_local}, must be at least min_local ({min_local})")
    # A gradient over more than a tenth of the data is hardly stochastic any more.
    largest = max_batch or max(tuned, min(DEFAULT_GROWTH * tuned, samples // 10))
    return BatchLimits(
        init_batch=tuned,
        max_batch=largest,
        min_local=min_local,
        max_local=max(max_local or largest, min_local),
    )


def _precondition(
    optimizer: torch.optim.Optimizer, flat: FlatModel, step: int
) -> tuple[AdamPreconditioner | None, list[Tensor], list[Tensor]]:
    """The factors on the gradients before norms are taken: by parameter, and by bucket for the reducer."""
    if not AdamPreconditioner.applies_to(optimizer):
        return None, [], []
    buckets = [torch.zeros(-(-b.numel // step), device=flat.device) for b in flat.layout.buckets]
    slots = {s.name: s for s in flat.layout.slots if not s.buffer}
    places = []
    for name, parameter in flat.parameters.items():
        begin = slots[name].offset // step  # offsets are multiples of any stride
        places.append(buckets[slots[name].bucket][begin : begin + -(-parameter.numel() // step)])
    pairs = list(zip(flat.parameters.values(), places))
    return AdamPreconditioner(optimizer, pairs, step), places, buckets


def _gradients(flat: FlatModel, step: int) -> Sequence[Tensor]:
    """Flat, by parameter: each element of the gradient at a multiple of `step`."""
    return [
        torch.zeros(-(-p.numel() // step), device=p.device)
        if p.grad is None
        else p.grad.detach().reshape(-1)[::step]
        for p in flat.parameters.values()
    ]


def packs(device: torch.device) -> bool:
    """Whether norms are taken of vectors that are collected first; on a CPU that is only one more pass."""
    return device.type != "cpu"


class Packed:
    """The elements of the gradient that count, collected into one vector for each bucket.

    A GPU of a model with hundreds of parameters waits for the processor that launches its kernels. Norms of a
    few long vectors need some tens of launches where those of each parameter would need thousands.
    """

    def __init__(self, flat: FlatModel, step: int) -> None:
        self._step = step
        slots = {s.name: s for s in flat.layout.slots if not s.buffer}
        buckets = flat.layout.buckets
        self._lengths = [-(-b.gradients // step) for b in buckets]
        self._parts: list[list[tuple[Tensor, int]]] = [[] for _ in buckets]
        """By bucket, in the order of their places: each parameter, and the elements from it to the next."""
        for index, length in enumerate(self._lengths):
            places = [(slots[n], p) for n, p in flat.parameters.items() if slots[n].bucket == index]
            own = sorted(((slot.offset // step, p) for slot, p in places), key=lambda place: place[0])
            ends = [begin for begin, _ in own[1:]] + [length]
            self._parts[index] = [(p, end - begin) for (begin, p), end in zip(own, ends)]
        self._zeros = [torch.zeros((), dtype=b.dtype, device=flat.device) for b in buckets]

    def weights(self, buckets: Sequence[Tensor]) -> list[Tensor]:
        """The places of gradients in vectors with one place for each element of a bucket."""
        return [bucket[:length] for bucket, length in zip(buckets, self._lengths)]

    def gradients(self) -> list[Tensor]:
        """One new vector for each bucket; zero where there is no gradient, and between parameters."""
        out = []
        for parts, zero in zip(self._parts, self._zeros):
            pieces: list[Tensor] = []
            for parameter, room in parts:
                found = parameter.grad
                if found is not None:
                    pieces.append(found.detach().reshape(-1)[:: self._step])
                if missing := room - (len(pieces[-1]) if found is not None else 0):
                    pieces.append(zero.expand(missing))
            out.append(torch.cat(pieces) if pieces else zero.expand(0))
        return out
