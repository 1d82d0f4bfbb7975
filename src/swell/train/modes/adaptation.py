"""Adaptive mode connected to a job: its flat gradients, its loader, its progress.

`AdaptiveMode` works on numbers only. This thin layer takes the numbers from the job's model and reducer and
applies the decisions to the loader, so that `job` only reports what happens in a step.

How long to train: `job.epochs(n)` in adaptive mode means as much progress as n epochs at the tuned batch. A
larger batch makes less progress per sample, so training needs more samples, though fewer steps and less time.
That is what goodput weighs, and it keeps the resulting model the same. Training ends at the step that reaches
this progress, even in the middle of a pass. Schedulers follow progress too. A job that must see the data
exactly n times uses `job.epochs(n, by="data")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from swell.perf.goodput import BatchLimits
from swell.train.agent.errors import UsageError
from swell.train.data.loader import ElasticLoader
from swell.train.modes.adaptive import warm_up
from swell.train.modes.adaptive_mode import AdaptiveMode
from swell.train.modes.agreed import AgreedBatch, Header
from swell.train.modes.meter import NoiseMeter, StepGradient
from swell.train.modes.noise import AdamPreconditioner, NoiseScale
from swell.train.sync.memory import FlatModel
from swell.train.sync.reducer import Norms, Reduced

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
