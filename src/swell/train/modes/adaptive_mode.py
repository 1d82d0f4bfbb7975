"""The *adaptive* batch mode of one job: noise statistics, learning rate and batch plan, step by step.

What happens around one step, on every worker:

1. `header` is added to the message that the workers exchange anyway. It has this worker's last times and,
   from rank 0, a new plan.
2. While gradients are summed, the squared norms of every worker's share and of the sum are taken (times
   `weights`). A single worker that accumulates keeps its first micro-batch instead (`keep_first`).
3. `commit` turns these numbers into one update of the noise scale. All workers read the same numbers in the
   same order, so they hold the same statistics, and the learning rates of all copies of the model stay equal.
   A new plan in the headers holds from the next step on, and the batch changes at no other moment. After a
   resize or a death the batch stays as it is, only split over other workers, because survivors may be in the
   middle of a step.
4. `scaled_learning_rate` wraps the optimizer's step. The factor is applied for that call only: schedulers and
   users keep seeing the learning rate they tuned.

The statistics are averages over a thousand steps and do not need the norms of every step: large models skip
some.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swell.perf.batch import BatchLimits, BatchPlan
from swell.train.modes.adaptive import BatchTuner
from swell.train.modes.noise import AdamPreconditioner, GradientMemory, NoiseScale
from swell.train.modes.scaling import BatchState, rule

_REFRESH_PRECONDITIONER = 10
"""Adam's second moment is read again after this many measured steps."""

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
        alone_every: int = 1,
        decide_every: int = 10,
        adam: AdamPreconditioner | None = None,
        weights: Sequence[Tensor] = (),
        epoch_scale: float = math.inf,
        tuner: BatchTuner | None = None,
    ) -> None:
        """`adam` fills `weights`, flat buffers that match those given as `whole` and to `keep_first`.

        Norms are taken every `every` steps, or every `alone_every` by a single worker, which they cost more.
        """
        for name, value in (("every", every), ("alone_every", alone_every), ("decide_every", decide_every)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        self._optimizer = optimizer
        self._limits = limits
        self._rule = rule(learning_rate_rule)
        self._warmup_epochs = warmup_epochs
        self._every = every
        self._alone_every = alone_every
        self._decide_every = decide_every
        self.noise = NoiseScale(epoch_scale=epoch_scale)
        self.tuner = tuner or BatchTuner(limits)
        self.batch = limits.init_batch
        """Samples in a step."""
        self.micro_batch = limits.max_local
        """The most samples that one gradient is computed on."""
        self.progress = 0.0
        """Steps at the tuned batch that training so far is worth."""
        self.step = 0
        self.factor = 1.0
        """The factor on the learning rate in the last step."""
        self.worth = 1.0
        """Steps at the tuned batch that the last step was worth."""
        self._adam = adam
        self._weights = list(weights)
        self._measured = 0
        self._memory = GradientMemory()
        self._first_samples = 0
        self._last: list[float] | None = None
        self._proposal: BatchPlan | None = None
        self._failed: int | None = None
        self._decide_soon = True

    # ------------------------------------------------------------------ measuring

    @property
    def measuring(self) -> bool:
        """Whether norms are taken in the present step; the same on all workers."""
        return self.step % self._every == 0

    @property
    def weights(self) -> list[Tensor] | None:
        """The element-wise factors on the gradients before norms are taken; or None."""
        return self._weights if self._adam is not None and self._adam.ready else None

    def keep_first(self, gradients: Sequence[Tensor], samples: int) -> None:
        """Keep the first micro-batch's gradient; called by a single worker that accumulates.

        `gradients` are flat buffers like those of `commit`, with what this micro-batch of `samples` samples
        adds to the mean.
        """
        self._first_samples = samples
        if self.step % self._alone_every == 0:
            self._memory.keep(gradients, self.weights)

    # ------------------------------------------------------------------ the exchange

    def header(self) -> Header:
        """What this worker adds to the header of the step."""
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
        """Record that so many samples did not fit; returns the size to try. The next header tells others."""
        self._failed = min(local_batch, self._failed or local_batch)
        if self._failed <= self._limits.min_local:
            self.tuner.out_of_memory(self._failed)  # raises, because nothing smaller is allowed
        return max(self._failed // 2, self._limits.min_local)

    def commit(
        self,
        headers: Sequence[Header],
        *,
        part_samples: Sequence[int],
        part_squares: Sequence[float],
        total_square: float,
        nodes: int,
        epochs_done: float,
        whole: Callable[[], Sequence[Tensor]] | None = None,
        unscale: float = 1.0,
    ) -> float:
        """Use what all workers exchanged for this step (in rank order); returns the learning-rate factor.

        Args:
            headers: what `header` gave on each worker.
            part_samples: samples behind each worker's share of the gradient.
            part_squares: squared norm of each share, a share being samples / all samples times its mean.
            total_square: squared norm of the sum of the shares, the mean gradient.
            nodes: machines the workers are on.
            epochs_done: passes over the data before this step.
            whole: gives the mean gradient as flat buffers; used where there is a single worker.
            unscale: the factor on squared norms that undoes the scaling of the loss.
        """
        samples = sum(part_samples)
        scale = samples / self._limits.init_batch
        if samples and (self.measuring or len(headers) == 1):
            self._update_noise(part_samples, part_squares, total_square, scale, whole, unscale)
        self._learn_times(headers, nodes)
        at_least = max(
            scale, 1.0
        )  # the short batch at the end of an epoch keeps the tuned rate, as in a plain loop
        self.factor = self._rule(
            BatchState(
                scale=at_least,
                gain=self.noise.gain(at_least),
                epochs_done=epochs_done,
                adaptive_optimizer=self._adam is not None,
                warmup_epochs=self._warmup_epochs,
            )
        )
        self.worth = self.noise.gain(at_least)
        # A short batch counts by its samples, so that an epoch at the tuned batch is worth exactly one.
        self.progress += self.noise.gain(scale) if scale >= 1.0 else scale
        self.step += 1
        self._decide(headers, nodes)
        return self.factor

    def _decide(self, headers: Sequence[Header], nodes: int) -> None:
        """Adopt what rank 0 proposed and what did not fit, and make the next proposal."""
        if (plan := headers[0].get("plan")) is not None:
            adopted = BatchPlan(int(plan[0]), int(plan[1]))
            self.batch, self.micro_batch = adopted.total(len(headers)), adopted.local_batch
        self._proposal = self._last = None
        failed = [int(header["failed"]) for header in headers if header.get("failed")]
        if failed:
            self.tuner.out_of_memory(min(failed))
            self.micro_batch = min(self.micro_batch, self.tuner.max_local)
            self._failed = None
        if failed or self._decide_soon or self.step % self._decide_every == 0:
            self._decide_soon = False
            chosen = self.tuner.choose(nodes, len(headers), self.noise)
            if (chosen.total(len(headers)), chosen.local_batch) != (self.batch, self.micro_batch):
                self._proposal = chosen

    def _update_noise(
        self,
        part_samples: Sequence[int],
        part_squares: Sequence[float],
        total_square: float,
        scale: float,
        whole: Callable[[], Sequence[Tensor]] | None,
        unscale: float,
    ) -> None:
        samples = sum(part_samples)
        shares = [(sqr, size) for sqr, size in zip(part_squares, part_samples) if size]
        first, self._first_samples = self._first_samples, 0
        if len(shares) > 1:
            # A share is size / samples times its worker's mean gradient, and its weight is size / samples.
            mean = sum(sqr * samples / size for sqr, size in shares)
            self.noise.update(mean * unscale, total_square * unscale, len(shares), scale)
            self._memory.forget()
            self._refresh_if_due()
        elif whole is not None:
            since = self.step % self._alone_every
            if since >= 2:
                return  # norms are taken in a step and the one after it, then not for a while
            self._update_alone(first / samples, scale, whole(), unscale, since)
            if since == 1 or self._alone_every == 1:
                self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if self._adam is not None and self._measured % _REFRESH_PRECONDITIONER == 0:
            self._adam.refresh()
            self._memory.forget()  # norms under two different preconditioners cannot be compared
        self._measured += 1

    def _update_alone(
        self, first: float, scale: float, whole: Sequence[Tensor], unscale: float, since: int
    ) -> None:
        """Update from a single worker: by the share that `keep_first` kept, or by pairing steps in a row."""
        if 0.0 < first < 1.0:
            norms = self._memory.split(whole, first, self.weights) if since == 0 else None
            biased = False
        elif since == 0 and self._alone_every > 1:
            self._memory.keep(whole, self.weights)
            return
        else:
            again = self._alone_every == 1  # else the next pair begins some steps from now
            norms = self._memory.pair(whole, self.weights, keep=again) if since < 2 else None
            biased = True
        if norms is not None:
            parts, total = norms.parts_sqr * unscale, norms.total_sqr * unscale
            self.noise.update(parts, total, 2.0, 2.0 * scale if biased else scale, biased=biased)

    def _learn_times(self, headers: Sequence[Header], nodes: int) -> None:
        """Record the mean times over all workers: the same on each, so that any of them can become rank 0."""
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
        self._memory.forget()
        if self._adam is not None:
            self._adam.refresh()

    # ------------------------------------------------------------------ the optimizer's step

    @contextlib.contextmanager
    def scaled_learning_rate(self) -> Iterator[None]:
        """Multiply every group's learning rate by the step's factor while the optimizer steps.

        Adam's averages decay with every step. This step is worth `worth` tuned ones, so the averages decay as
        much as in that many steps (see `scaling`).
        """
        groups = self._optimizer.param_groups
        names = ("lr", "betas") if self._adam is not None else ("lr",)
        before = [{name: group[name] for name in names} for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor
            if self._adam is not None:
                group["betas"] = tuple(beta**self.worth for beta in group["betas"])
        try:
            yield
        finally:
            for group, values in zip(groups, before):
                group.update(values)

    def report(self) -> dict[str, float | int | bool | None]:
        """Numbers for the job's reports."""
        noise_scale = self.noise.noise_scale(self._limits.init_batch)
        return {
            "grad_sqr": self.noise.sqr,
            "grad_var": self.noise.var,
            "noise_scale": noise_scale if math.isfinite(noise_scale) else None,
            "noise_biased": self.noise.biased,
            "learning_rate_factor": self.factor,
            "init_batch": self._limits.init_batch,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "progress": self.progress,
        }

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {
            "noise": self.noise.state_dict(),
            "tuner": self.tuner.state_dict(),
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "progress": self.progress,
            "step": self.step,
            "measured": self._measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`; the optimizer's state must have been loaded before."""
        self.noise.load_state_dict(state["noise"])
        self.tuner.load_state_dict(state["tuner"])
        self.batch, self.micro_batch = int(state["batch"]), int(state["micro_batch"])
        self.progress = float(state["progress"])
        self.step = int(state["step"])
        self._measured = int(state["measured"])
        self._first_samples = 0
        self._failed = None
        self.membership_changed()
