"""The *adaptive* batch mode of one job: noise statistics, learning rate and batch plan, step by step.

What happens around one step, on every worker:

1. The header of the agreed batch (`agreed`) is added to the message that the workers exchange anyway. It has
   this worker's last times and, from rank 0, a new plan.
2. While gradients are summed, the squared norms of every worker's share and of the sum are taken (times
   `meter.weights`). A single worker that accumulates keeps its first micro-batch instead (`keep_first`).
3. `commit` turns these numbers into one update of the noise scale (`meter`), into the factor on the learning
   rate, and into the batch of the next step. All workers read the same numbers in the same order, so the
   learning rates of all copies of the model stay equal.
4. `scaled_learning_rate` wraps the optimizer's step. The factor is applied for that call only: schedulers and
   users keep seeing the learning rate they tuned.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swell.train.modes.agreed import AgreedBatch, Header
from swell.train.modes.meter import NoiseMeter, StepGradient
from swell.train.modes.noise import AdamPreconditioner
from swell.train.modes.scaling import BatchState, rule


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
