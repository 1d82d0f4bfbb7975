"""Online gradient noise scale, after Pollux (OSDI'21, sections 3.1 and 4.1) and McCandlish et al. (2018).

A gradient over a batch of b samples has E|g|^2 = |G|^2 + v/b. Two batch sizes seen in one step therefore give
both unknowns: the small one is a *part* (what one worker contributes), the large one is the whole step.
With n = whole / part, S the mean of the parts' squared norms and T the squared norm of the whole:

    sqr = (n T - S) / (n - 1)            |G|^2, the signal
    var = (S - T) scale / (n - 1)        v / M0, the noise at the tuned batch; scale = M / M0

Both stay unbiased when parts differ in size, provided S is weighted by part size and n is whole / mean part:
then E[S] = |G|^2 + v / (mean part) and E[T] = |G|^2 + v / whole. So an uneven last batch needs no special
case, and n need not be an integer.

Samples are drawn without replacement: disjoint parts of N samples are less alike than independent ones, both
E[S] and E[T] are v / N lower, and so is the signal. It is added back (`epoch_scale`), which matters where the
data set is not much larger than the noise scale.

Several workers give a part each. One worker that accumulates gives two: its first micro-batch and the rest.
One worker that does not accumulate has a single part. Two consecutive gradients then stand in for two parts
(n = 2, scale doubled); the weights moved between them, so the estimate is marked `biased` and thrown away
once n > 1 returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_REFRESH_PRECONDITIONER = 10
"""Adam's second moment is read again after this many measured steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGradient:
    """Figures of one step's gradient that all workers have."""

    part_samples: Sequence[int]
    """By rank: samples behind the worker's share of the gradient."""
    part_squares: Sequence[float]
    """By rank: squared norm of the share, a share being samples / all samples times its mean."""
    total_square: float
    """Squared norm of the sum of the shares, the mean gradient."""
    whole: Callable[[], Sequence[Tensor]] | None = None
    """Gives the mean gradient as flat buffers; used where there is a single worker."""
    unscale: float = 1.0
    """The factor on squared norms that undoes the scaling of the loss."""

    @property
    def samples(self) -> int:
        """Samples in the step."""
        return sum(self.part_samples)


class NoiseMeter:
    """Turns the gradients of steps into statistics of their noise."""

    def __init__(
        self,
        *,
        every: int = 1,
        alone_every: int = 1,
        adam: AdamPreconditioner | None = None,
        weights: Sequence[Tensor] = (),
        epoch_scale: float = math.inf,
    ) -> None:
        """`adam` fills `weights`, flat buffers that match those of `StepGradient.whole` and `keep_first`.

        Norms are taken every `every` steps, or every `alone_every` by a single worker, which they cost more.
        """
        for name, value in (("every", every), ("alone_every", alone_every)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        self.noise = NoiseScale(epoch_scale=epoch_scale)
        self._every = every
        self._alone_every = alone_every
        self._adam = adam
        self._weights = list(weights)
        self._measured = 0
        self._memory = GradientMemory()
        self._first_samples = 0

    def due(self, step: int) -> bool:
        """Whether several workers take norms in that step; the same on all of them."""
        return step % self._every == 0

    @property
    def weights(self) -> list[Tensor] | None:
        """The element-wise factors on the gradients before norms are taken; or None."""
        return self._weights if self._adam is not None and self._adam.ready else None

    def keep_first(self, step: int, gradients: Sequence[Tensor], samples: int) -> None:
        """Keep the first micro-batch's gradient; called by a single worker that accumulates.

        `gradients` are flat buffers like `StepGradient.whole`, with what this micro-batch of `samples`
        samples adds to the mean.
        """
        self._first_samples = samples
        if step % self._alone_every == 0:
            self._memory.keep(gradients, self.weights)

    def update(self, step: int, gradient: StepGradient, scale: float) -> None:
        """Update the statistics if norms are taken in this step; `scale` is its batch / the tuned batch."""
        samples = gradient.samples
        if not samples or not (self.due(step) or len(gradient.part_samples) == 1):
            return
        shares = [(sqr, size) for sqr, size in zip(gradient.part_squares, gradient.part_samples) if size]
        first, self._first_samples = self._first_samples, 0
        if len(shares) > 1:
            # A share is size / samples times its worker's mean gradient, and its weight is size / samples.
            mean = sum(sqr * samples / size for sqr, size in shares) * gradient.unscale
            self.noise.update(mean, gradient.total_square * gradient.unscale, len(shares), scale)
            self._memory.forget()
            self._refresh_if_due()
        elif gradient.whole is not None:
            since = step % self._alone_every
            if since < 2:  # norms are taken in a step and the one after it, then not for a while
                self._update_alone(since, first / samples, gradient.whole(), gradient.unscale, scale)

    def _update_alone(
        self, since: int, first: float, whole: Sequence[Tensor], unscale: float, scale: float
    ) -> None:
        """Update from a single worker: by the share that `keep_first` kept, or by pairing steps in a row.

        `since` is 0 in the first of two such steps and 1 in the second.
        """
        if 0.0 < first < 1.0:
            norms = self._memory.split(whole, first, self.weights) if since == 0 else None
            biased = False
        elif since == 0 and self._alone_every > 1:
            self._memory.keep(whole, self.weights)
            return
        else:
            again = self._alone_every == 1  # else the next pair begins some steps from now
            norms = self._memory.pair(whole, self.weights, keep=again)
            biased = True
        if norms is not None:
            parts, total = norms.parts_sqr * unscale, norms.total_sqr * unscale
            self.noise.update(parts, total, 2.0, 2.0 * scale if biased else scale, biased=biased)
        if since == 1 or self._alone_every == 1:
            self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if self._adam is not None and self._measured % _REFRESH_PRECONDITIONER == 0:
            self._adam.refresh()
            self._memory.forget()  # norms under two different preconditioners cannot be compared
        self._measured += 1

    def membership_changed(self) -> None:
        """Note that the workers have changed: no gradient from before is compared with the next."""
        self._memory.forget()
        if self._adam is not None:
            self._adam.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {"noise": self.noise.state_dict(), "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self.noise.load_state_dict(state["noise"])
        self._measured = int(state["measured"])
        self._first_samples = 0


# ---------------------------------------------------------------------- the noise scale


_CHUNK = 1 << 15  # 128 kB of floats: operand, preconditioner and scratch stay in the second-level cache
_V_FLOOR = 1e-3  # of a tensor's mean second moment; see AdamPreconditioner


class NoiseScale:
    """Exponential averages of the gradient's squared norm and variance at the initial batch size."""

    __slots__ = ("_decay", "_epoch_scale", "_sqr", "_var", "_weight", "biased", "skipped", "updates")

    def __init__(self, *, decay: float = 0.999, epoch_scale: float = math.inf) -> None:
        """`epoch_scale`: size of the data set over the initial batch, if batches of an epoch are disjoint."""
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay: got {decay}, must lie strictly between 0 and 1")
        if not epoch_scale > 0.0:
            raise ValueError(f"epoch_scale: got {epoch_scale}, must be positive")
        self._decay = decay
        self._epoch_scale = epoch_scale
        self._sqr = self._var = self._weight = 0.0
        self.biased = False
        self.updates = 0
        self.skipped = 0

    def update(
        self, parts_sqr: float, total_sqr: float, count: float, scale: float, *, biased: bool = False
    ) -> bool:
        """Record one step; False if it was skipped because a norm was not finite.

        Args:
            parts_sqr: mean over the parts of their squared gradient norm, weighted by part size.
            total_sqr: squared norm of the step's mean gradient.
            count: whole batch / mean part size; must exceed 1.
            scale: whole batch / initial batch.
            biased: the parts are gradients at different weights (see `GradientMemory.pair`).
        """
        if not count > 1.0 or not math.isfinite(count):
            raise ValueError(
                f"count: got {count}, needs at least two parts (more than 1) to tell noise from signal"
            )
        if not scale > 0.0 or not math.isfinite(scale):
            raise ValueError(f"scale: got {scale}, must be positive and finite")
        if not (math.isfinite(parts_sqr) and math.isfinite(total_sqr)):
            self.skipped += 1
            return False
        if biased:
            self.biased = True
        elif self.biased:
            self.restart()
        keep = self._decay**scale
        sqr = (count * total_sqr - parts_sqr) / (count - 1.0)
        var = (parts_sqr - total_sqr) * scale / (count - 1.0)
        self._sqr = keep * self._sqr + (1.0 - keep) * sqr
        self._var = keep * self._var + (1.0 - keep) * var
        self._weight = keep * self._weight + (1.0 - keep)
        self.updates += 1
        return True

    def restart(self) -> None:
        """Forget the averages, as when unbiased estimates become available again."""
        self._sqr = self._var = self._weight = 0.0
        self.biased = False
        self.updates = 0

    @property
    def ready(self) -> bool:
        """Whether anything has been averaged yet; before that `gain` is 1 for every scale."""
        return self._weight > 0.0

    @property
    def sqr(self) -> float:
        """Squared norm of the true gradient; single estimates may be negative, the answer is not."""
        if not self.ready:
            return 0.0
        return max((self._sqr + self._var / self._epoch_scale) / self._weight, 0.0)

    @property
    def var(self) -> float:
        """Variance of a gradient at the initial batch size, summed over parameters."""
        return max(self._var / self._weight, 0.0) if self.ready else 0.0

    def gain(self, scale: float) -> float:
        """How many steps at the initial batch one step at `scale` times that batch is worth (1 to scale)."""
        return gain(self.sqr, self.var, scale)

    def efficiency(self, scale: float) -> float:
        """Progress per sample at `scale`, relative to the initial batch."""
        return self.gain(scale) / scale

    def noise_scale(self, initial_batch: float) -> float:
        """The batch size (in samples) at which noise and signal are equally strong; inf without signal."""
        sqr, var = self.sqr, self.var
        if sqr > 0.0:
            return var / sqr * initial_batch
        return math.inf if var > 0.0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that `load_state_dict` takes."""
        return {
            "decay": self._decay,
            "sqr": self._sqr,
            "var": self._var,
            "weight": self._weight,
            "biased": self.biased,
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self._decay = float(state["decay"])
        self._sqr = float(state["sqr"])
        self._var = float(state["var"])
        self._weight = float(state["weight"])
        self.biased = bool(state["biased"])
        self.updates = int(state["updates"])
        self.skipped = int(state["skipped"])


def gain(sqr: float, var: float, scale: float) -> float:
    """(var + sqr) / (var / scale + sqr), and 1 where neither is known."""
    if not scale > 0.0:
        raise ValueError(f"scale: got {scale}, must be positive")
    below = var / scale + sqr
    return (var + sqr) / below if below > 0.0 else 1.0


def squared_norm(flat: Tensor, preconditioner: Tensor | None = None) -> Tensor:
    """Squared 2-norm of a flat contiguous buffer as a float32 scalar on its device, optionally after an
    element-wise product with `preconditioner`; no temporary larger than a cache-sized chunk on the CPU."""
    if flat.dim() != 1:
        raise ValueError(f"flat: got {flat.dim()} dimensions, needs a one-dimensional buffer")
    if preconditioner is None:
        if flat.dtype in (torch.float32, torch.float64):
            return torch.dot(flat, flat).float()
        return torch.linalg.vector_norm(flat, dtype=torch.float32).square()
    if preconditioner.shape != flat.shape:
        raise ValueError(f"preconditioner: got {preconditioner.numel()} elements, needs {flat.numel()}")
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat * preconditioner, dtype=torch.float32).square()
    scratch = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32)
    sums = torch.empty(-(-flat.numel() // _CHUNK), dtype=torch.float32)
    for i, (part, factor) in enumerate(zip(torch.split(flat, _CHUNK), torch.split(preconditioner, _CHUNK))):
        product = torch.mul(part, factor, out=scratch[: part.numel()])
        torch.dot(product, product, out=sums[i])
    return sums.sum()


@dataclass(frozen=True, slots=True)
class PairNorms:
    """Squared norms of two parts and of the whole, ready for `NoiseScale.update` with a count of 2."""

    parts_sqr: float
    total_sqr: float


class GradientMemory:
    """One earlier gradient, for a single worker: to split a step's gradient in two, or to pair it with the
    last.

    A gradient is a list of flat buffers (one for each dtype), each times its `weights` where given.
    """

    __slots__ = ("_filled", "_kept", "_kept_sqr")

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._kept_sqr = torch.zeros(())
        """The kept gradient's squared norm; read with the next one's, in one wait for the device."""
        self._filled = False

    def keep(self, flats: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> None:
        """Remember a gradient in place of the one before."""
        vectors = _weighted(flats, weights)
        self._store(vectors, _sum_of_squares(vectors))

    def pair(
        self, flats: Sequence[Tensor], weights: Sequence[Tensor] | None = None, *, keep: bool = True
    ) -> PairNorms | None:
        """Norms of the kept gradient and this one as two parts of a twice as large batch.

        With `keep`, this one is kept for the next pair; otherwise nothing is.
        """
        vectors = _weighted(flats, weights)
        sqr = _sum_of_squares(vectors)
        pair = self._paired(vectors, sqr) if self._fits(vectors) else None
        if keep:
            self._store(vectors, sqr)
        else:
            self.forget()
        return pair

    def split(
        self, flats: Sequence[Tensor], share: float, weights: Sequence[Tensor] | None = None
    ) -> PairNorms | None:
        """Norms of a step's two parts, the kept sum over the first `share` of its samples and the rest.

        Both parts are used although the first would be enough: their difference does not contain the signal,
        so the estimate needs far fewer steps.
        """
        vectors = _weighted(flats, weights)
        if not self._fits(vectors):
            return None
        first, total, cross = self._read(vectors, _sum_of_squares(vectors))
        self.forget()
        if not math.isfinite(first):
            return None
        rest = total + first - 2.0 * cross
        return PairNorms(first / share + rest / (1.0 - share), total)

    def forget(self) -> None:
        """Drop the kept gradient (not its memory), as after a resize or a skipped step."""
        self._filled = False

    def _fits(self, vectors: Sequence[Tensor]) -> bool:
        return self._filled and [k.shape for k in self._kept] == [v.shape for v in vectors]

    def _paired(self, vectors: Sequence[Tensor], sqr: Tensor) -> PairNorms | None:
        before, now, cross = self._read(vectors, sqr)
        if not (math.isfinite(before) and math.isfinite(now)):
            return None
        parts = 0.5 * (before + now)
        # |(a+b)/2|^2 by expansion: one dot product instead of a temporary the size of the model.
        return PairNorms(parts, 0.5 * (parts + cross))

    def _read(self, vectors: Sequence[Tensor], sqr: Tensor) -> tuple[float, float, float]:
        """Squared norms of the kept gradient and this one, and their product; one wait for the device."""
        cross = torch.stack([torch.dot(k, v.float()) for k, v in zip(self._kept, vectors)]).sum()
        before, now, product = torch.stack([self._kept_sqr, sqr, cross]).tolist()
        return before, now, product

    def _store(self, vectors: Sequence[Tensor], sqr: Tensor) -> None:
        if [k.shape for k in self._kept] != [v.shape for v in vectors]:
            self._kept = [torch.empty_like(v, dtype=torch.float32) for v in vectors]
        torch._foreach_copy_(self._kept, list(vectors))
        self._kept_sqr, self._filled = sqr, True


def _weighted(flats: Sequence[Tensor], weights: Sequence[Tensor] | None) -> list[Tensor]:
    return list(flats) if weights is None else list(torch._foreach_mul(list(flats), list(weights)))


def _sum_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([squared_norm(v) for v in vectors]).sum()


class AdamPreconditioner:
    """1 / (sqrt(v_hat) + eps) of Adam-like optimizers, written where the flat gradient buffers have each
    parameter.

    Adam moves along the preconditioned gradient, so noise is measured there. The second moment changes over
    about 1 / (1 - beta2) steps; `refresh` every few steps is enough, at steps that all workers agree on.
    Adam's own v already holds the gradient it divides, ours does not: a row of an embedding met for the first
    time would weigh 1 / eps. Therefore v is floored at a thousandth of its tensor's mean, about the bound
    that beta2 = 0.999 gives Adam itself.
    """

    __slots__ = ("_optimizer", "_places", "_stride", "ready")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Sequence[tuple[Tensor, Tensor]],
        stride: int = 1,
    ) -> None:
        """`places` pairs each parameter with the view (any shape) that takes its factors.

        With a `stride`, only each `stride`-th element of a parameter has one.
        """
        self._optimizer = optimizer
        self._places = list(places)
        self._stride = stride
        self.ready = False
        """Whether the places hold factors; not before every parameter has had a step."""

    @staticmethod
    def applies_to(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer keeps Adam's second moment (Adam, AdamW, NAdam, RAdam and look-alikes)."""
        return all("betas" in group and "eps" in group for group in optimizer.param_groups)

    @torch.no_grad()
    def refresh(self) -> bool:
        """Recompute the factors from the optimizer's state; False where that has no second moments yet."""
        eps_of: dict[Tensor, float] = {}
        beta2_of: dict[Tensor, float] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                eps_of[param], beta2_of[param] = float(group["eps"]), float(group["betas"][1])
        states = [self._optimizer.state.get(param, {}) for param, _ in self._places]
        self.ready = any("exp_avg_sq" in state for state in states)
        known = [
            (param, place, state)
            for (param, place), state in zip(self._places, states)
            if "exp_avg_sq" in state
        ]
        if len(known) < len(states):  # no gradient ever reached the others: leave them out
            torch._foreach_zero_([p for (_, p), s in zip(self._places, states) if "exp_avg_sq" not in s])
        if not known:
            return self.ready
        # Few calls for all tensors instead of ten for each: a GPU would wait for the process that makes them.
        places = [place for _, place, _ in known]
        seconds = [state["exp_avg_sq"].reshape(-1)[:: self._stride].view(p.shape) for _, p, state in known]
        torch._foreach_copy_(places, seconds)
        steps = torch.stack([torch.as_tensor(state["step"]) for _, _, state in known]).tolist()
        corrections = [1.0 - beta2_of[p] ** max(step, 1.0) for (p, _, _), step in zip(known, steps)]
        torch._foreach_div_(places, corrections)
        sums = torch.stack(torch._foreach_norm(places, 1)).tolist()
        means = [total / place.numel() for total, place in zip(sums, places)]
        torch._foreach_clamp_min_(places, [_V_FLOOR * mean for mean in means])
        torch._foreach_sqrt_(places)
        torch._foreach_add_(places, [eps_of[param] for param, _, _ in known])
        torch._foreach_reciprocal_(places)
        if silent := [place for place, mean in zip(places, means) if not mean > 0.0]:
            torch._foreach_zero_(silent)
        return self.ready


def direct_noise_scale(gradients: Iterable[Tensor], batch: int) -> float:
    """Noise scale in samples from many independent gradients of `batch` samples at fixed weights.

    The reference that the online estimate is held against: sample mean and sample variance, unbiased.
    """
    mean: Tensor | None = None
    spread = 0.0
    n = 0
    for gradient in gradients:
        g = gradient.detach().to(torch.float64).reshape(-1)
        n += 1
        if mean is None:
            mean = g.clone()
            continue
        delta = g - mean
        mean += delta / n
        spread += float(torch.dot(delta, g - mean))
    if mean is None or n < 2:
        raise ValueError(f"gradients: got {n}, needs at least 2 to measure a variance")
    variance = spread / (n - 1)  # of one gradient of `batch` samples
    signal = float(torch.dot(mean, mean)) - variance / n
    return variance / signal * batch if signal > 0.0 else math.inf


# ---------------------------------------------------------------------- learning-rate rules
# Learning-rate rules: the factor on the tuned learning rate when the batch is `scale` times the tuned one.
#
# Pure functions of a `BatchState`; one registry for `rule="..."` in the API.
#
#     adascale      lr x gain for SGD (Johnson et al. 2020; Pollux section 3.1), lr x sqrt(gain) for Adam-
# like                   optimizers, whose update does not grow with the gradient     square_root   lr x
# sqrt(scale)     linear        lr x scale (Goyal et al. 2017)     legw          lr x sqrt(scale) with the
# warm-up stretched to scale x as many epochs (You et al. 2019). The                   user's own schedule
# already ramps over `warmup_epochs`, so the factor is the stretched ramp                   over the tuned
# one     constant      the learning rate stays
#
# Adam's running averages have a memory of 1 / (1 - beta) steps. A step worth g tuned ones has to forget as
# much as g of them did, beta^g, or a run with fewer, larger steps drags its early gradients along and falls
# behind: the rule of Malladi et al. (2022, "On the SDEs and scaling rules for adaptive gradient
# algorithms"), with the measured gain in place of the ratio of batches. `adaptive_mode` applies it together
# with the factor of the learning rate.
#
# AdaScale needs no warm-up: early gradients have little noise, so the gain is close to 1 by itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The facts that a rule may use."""

    scale: float
    """Total batch / tuned batch."""
    gain: float = 1.0
    """Worth of one step in steps at the tuned batch, from `NoiseScale.gain(scale)`."""
    epochs_done: float = 0.0
    """Passes over the data so far, fractions included."""
    adaptive_optimizer: bool = False
    """The optimizer normalises its update (Adam and kin)."""
    warmup_epochs: float = 0.0
    """Linear warm-up the user tuned for the initial batch."""

    def __post_init__(self) -> None:
        for name in ("scale", "gain"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name}: got {value}, must be finite and positive")
        for name in ("epochs_done", "warmup_epochs"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: got {value}, must be finite and at least 0")


LearningRateRule = Callable[[BatchState], float]


def constant(state: BatchState) -> float:
    """1, whatever the batch."""
    return 1.0


def linear(state: BatchState) -> float:
    """Proportional to the batch."""
    return state.scale


def square_root(state: BatchState) -> float:
    """Proportional to the square root of the batch."""
    return math.sqrt(state.scale)


def adascale(state: BatchState) -> float:
    """The gain of the step; its square root where the optimizer normalises the update."""
    return math.sqrt(state.gain) if state.adaptive_optimizer else state.gain


def legw(state: BatchState) -> float:
    """Square root of the batch, reached over a warm-up that lasts `scale` times as many epochs."""
    peak = math.sqrt(state.scale)
    if state.warmup_epochs == 0.0:
        return peak
    tuned = _ramp(state.epochs_done, state.warmup_epochs)
    stretched = _ramp(state.epochs_done, state.warmup_epochs * state.scale)
    return peak * stretched / tuned


def _ramp(epochs_done: float, warmup_epochs: float) -> float:
    """Height of a linear warm-up, kept off zero so that a ratio of two has its limit at the start."""
    return min(1.0, max(epochs_done, 1e-12) / warmup_epochs)


RULES: Mapping[str, LearningRateRule] = MappingProxyType(
    {"adascale": adascale, "square_root": square_root, "linear": linear, "legw": legw, "constant": constant}
)


def rule(name: str) -> LearningRateRule:
    """The rule of that name."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"rule: got {name!r}, must be one of {', '.join(sorted(RULES))}") from None
