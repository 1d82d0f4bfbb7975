"""The *adaptive* batch mode of one job: noise statistics, learning rate and batch plan, step by step.

What happens around one step, on every worker:

1. `header` is added to the message that the workers exchange anyway: this worker's last times and, from rank
0, a new plan. 2. While gradients are summed, the squared norms of every worker's share and of the sum are
taken (times `weights`).
   A single worker that accumulates keeps its first micro-batch instead (`keep_first`).
3. `commit` turns all that into one update of the noise scale. All workers read the same numbers in the same
order, so they
   hold the same statistics, and the learning rates of all copies of the model stay equal. A new plan in the
   headers holds from the next step on.
4. `scaled_learning_rate` wraps the optimizer's step. The factor is on for that call only: schedulers and
users keep
   seeing the learning rate they tuned.

Norms can be taken every `every` steps: averages over a thousand steps do not need each of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swell.perf.batch import BatchLimits, BatchPlan
from swell.train.adaptive import BatchTuner
from swell.train.noise import AdamPreconditioner, GradientMemory, NoiseScale
from swell.train.scaling import BatchState, rule

_REFRESH_PRECONDITIONER = 10
"""Measured steps between two looks at Adam's second moment."""

Header = dict[str, Any]


class AdaptiveMode:
    """Statistics and decisions of a job whose batch follows goodput."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        limits: BatchLimits,
        *,
        learning_rate_rule: str = "adascale",
        warmup_epochs: float = 0.0,
        every: int = 1,
        decide_every: int = 10,
        places: Sequence[tuple[Tensor, Tensor]] = (),
        weights: Sequence[Tensor] = (),
        tuner: BatchTuner | None = None,
    ) -> None:
        """`weights` are float buffers laid out like the flat gradients, zero at first; `places` pairs each
        parameter with its view of them. Only optimizers like Adam need them (see `wants_weights`)."""
        for name, value in (("every", every), ("decide_every", decide_every)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        self._optimizer = optimizer
        self._limits = limits
        self._rule = rule(learning_rate_rule)
        self._warmup_epochs = warmup_epochs
        self._every = every
        self._decide_every = decide_every
        self.noise = NoiseScale()
        self.tuner = tuner or BatchTuner(limits)
        self.plan: BatchPlan | None = None
        """What rank 0 last proposed and everybody adopted; None before `begin`."""
        self.progress = 0.0
        """Steps at the tuned batch that training so far is worth."""
        self.step = 0
        self.factor = 1.0
        """What the learning rate of the last step was multiplied by."""
        self._adam = AdamPreconditioner(optimizer, places) if self.wants_weights(optimizer) else None
        self._weights = list(weights)
        self._measured = 0
        self._memory = GradientMemory()
        self._first_samples = 0
        self._times: tuple[float, float] | None = None
        self._proposal: BatchPlan | None = None

    @staticmethod
    def wants_weights(optimizer: torch.optim.Optimizer) -> bool:
        """Whether norms are to be taken of preconditioned gradients."""
        return AdamPreconditioner.applies_to(optimizer)

    # ------------------------------------------------------------------ measuring

    @property
    def measuring(self) -> bool:
        """Whether norms are wanted in the present step; the same on all workers."""
        return self.step % self._every == 0

    @property
    def weights(self) -> list[Tensor] | None:
        """What gradients are to be multiplied by, element by element, before norms are taken; or None."""
        return self._weights if self._adam is not None and self._adam.ready else None

    def keep_first(self, gradients: Sequence[Tensor], samples: int) -> None:
        """A single worker that accumulates calls this after its first micro-batch, of `samples` samples.

        `gradients` are flat buffers like those of `commit`, with what this micro-batch adds to the mean.
        """
        if self.measuring:
            self._memory.keep(gradients, self.weights)
            self._first_samples = samples

    # ------------------------------------------------------------------ the exchange

    def header(self) -> Header:
        """What this worker adds to the header of the step."""
        header: Header = {}
        if self._times is not None:
            header["times"] = list(self._times)
        if self._proposal is not None:
            header["plan"] = [self._proposal.local_batch, self._proposal.accumulation]
        return header

    def observe(self, iteration_time_s: float, sync_time_s: float) -> None:
        """Tell how long this worker's last committed step took; travels with the next header."""
        self._times = (iteration_time_s, sync_time_s)

    def commit(
        self,
        headers: Sequence[Header],
        *,
        part_samples: Sequence[int],
        part_squares: Sequence[float],
        total_square: float,
        nodes: int,
        epochs_done: float,
        whole: Sequence[Tensor] = (),
    ) -> float:
        """Take in what all workers exchanged for this step (in rank order); the learning-rate factor.

        Args:
            headers: what `header` gave on each worker.
            part_samples: samples behind each worker's share of the gradient.
            part_squares: squared norm of each share, a share being samples / all samples times its mean.
            total_square: squared norm of the sum of the shares, the mean gradient.
            nodes: machines the workers are on.
            epochs_done: passes over the data before this step.
            whole: the mean gradient as flat buffers; used where there is a single worker.
        """
        samples = sum(part_samples)
        scale = samples / self._limits.init_batch
        if self.measuring and samples:
            self._update_noise(part_samples, part_squares, total_square, scale, whole)
        self._observe(headers, nodes)
        at_least = max(
            scale, 1.0
        )  # the short batch that ends an epoch keeps the tuned rate, as in a plain loop
        self.factor = self._rule(
            BatchState(
                scale=at_least,
                gain=self.noise.gain(at_least),
                epochs_done=epochs_done,
                adaptive_optimizer=self._adam is not None,
                warmup_epochs=self._warmup_epochs,
            )
        )
        if samples:
            self.progress += self.noise.gain(scale)
        self.step += 1
        self._times = None
        if (plan := headers[0].get("plan")) is not None:
            self.plan = BatchPlan(int(plan[0]), int(plan[1]))
            self._proposal = None
        if self.step % self._decide_every == 0:
            chosen = self.tuner.choose(nodes, len(headers), self.noise)
            self._proposal = chosen if chosen != self.plan else None
        return self.factor

    def _update_noise(
        self,
        part_samples: Sequence[int],
        part_squares: Sequence[float],
        total_square: float,
        scale: float,
        whole: Sequence[Tensor],
    ) -> None:
        samples = sum(part_samples)
        shares = [(sqr, size) for sqr, size in zip(part_squares, part_samples, strict=True) if size]
        first, self._first_samples = self._first_samples, 0
        if len(shares) > 1:
            # A share is size / samples times the mean gradient of its worker; that mean counts size /
            # samples.
            mean = sum(sqr * samples / size for sqr, size in shares)
            self.noise.update(mean, total_square, len(shares), scale)
            self._memory.forget()
        elif 0 < first < samples:
            norms = self._memory.split(whole, first / samples, self.weights)
            if norms is not None:
                self.noise.update(norms.parts_sqr, norms.total_sqr, 2.0, scale)
        elif whole and (norms := self._memory.pair(whole, self.weights)) is not None:
            self.noise.update(norms.parts_sqr, norms.total_sqr, 2.0, 2.0 * scale, biased=True)
        if self._adam is not None and self._measured % _REFRESH_PRECONDITIONER == 0:
            self._adam.refresh()
            self._memory.forget()  # norms under two different preconditioners cannot be compared
        self._measured += 1

    def _observe(self, headers: Sequence[Header], nodes: int) -> None:
        """Everybody records the same times, the means over the workers, so that anybody can become rank 0."""
        times = [header["times"] for header in headers if header.get("times")]
        if self.plan is None or len(times) != len(headers):
            return
        self.tuner.observe(
            nodes=nodes,
            replicas=len(headers),
            local_batch=self.plan.local_batch,
            accumulation=self.plan.accumulation,
            iteration_time_s=sum(t[0] for t in times) / len(times),
            sync_time_s=sum(t[1] for t in times) / len(times),
        )

    # ------------------------------------------------------------------ decisions

    def begin(self, nodes: int, replicas: int) -> BatchPlan:
        """The plan of the first step with this membership; the same on all workers."""
        self.plan = self.tuner.choose(nodes, replicas, self.noise)
        self._proposal = self._times = None
        self._memory.forget()
        if self._adam is not None:
            self._adam.refresh()
        return self.plan

    def out_of_memory(self, local_batch: int, nodes: int, replicas: int) -> BatchPlan:
        """Remember what did not fit; the plan to go on with, to be told to the others."""
        self.tuner.out_of_memory(local_batch)
        self._proposal = self.tuner.choose(nodes, replicas, self.noise)
        return self._proposal

    @contextlib.contextmanager
    def scaled_learning_rate(self) -> Iterator[None]:
        """Multiply every group's learning rate by the step's factor while the optimizer steps."""
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * self.factor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def report(self) -> dict[str, float | int | bool | None]:
        """Numbers for the job's reports."""
        noise_scale = self.noise.noise_scale(self._limits.init_batch)
        return {
            "grad_sqr": self.noise.sqr,
            "grad_var": self.noise.var,
            "noise_scale": noise_scale if math.isfinite(noise_scale) else None,
            "noise_biased": self.noise.biased,
            "learning_rate_factor": self.factor,
            "local_batch": self.plan.local_batch if self.plan else None,
            "accumulation": self.plan.accumulation if self.plan else None,
            "progress": self.progress,
        }

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {
            "noise": self.noise.state_dict(),
            "tuner": self.tuner.state_dict(),
            "plan": None if self.plan is None else [self.plan.local_batch, self.plan.accumulation],
            "progress": self.progress,
            "step": self.step,
            "measured": self._measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`; the optimizer's state must have been loaded before."""
        self.noise.load_state_dict(state["noise"])
        self.tuner.load_state_dict(state["tuner"])
        self.plan = None if state["plan"] is None else BatchPlan(*state["plan"])
        self.progress = float(state["progress"])
        self.step = int(state["step"])
        self._measured = int(state["measured"])
        self._times = self._proposal = None
        self._first_samples = 0
        self._memory.forget()
        if self._adam is not None:
            self._adam.refresh()
