"""Learning-rate rules: the factor on the tuned learning rate when the batch is `scale` times the tuned one.

Pure functions of a `BatchState`; one registry for `rule="..."` in the API.

    adascale      lr x gain for SGD (Johnson et al. 2020; Pollux section 3.1), lr x sqrt(gain) for Adam-like
                  optimizers, whose update does not grow with the gradient
    square_root   lr x sqrt(scale)
    linear        lr x scale (Goyal et al. 2017)
    legw          lr x sqrt(scale) with the warm-up stretched to scale x as many epochs (You et al. 2019). The
                  user's own schedule already ramps over `warmup_epochs`, so the factor is the stretched ramp
                  over the tuned one
    constant      the learning rate stays

Adam's running averages have a memory of 1 / (1 - beta) steps. A step worth g tuned ones has to forget as much
as g of them did, beta^g, or a run with fewer, larger steps drags its early gradients along and falls behind:
the rule of Malladi et al. (2022, "On the SDEs and scaling rules for adaptive gradient algorithms"), with the
measured gain in place of the ratio of batches. `adaptive_mode` applies it together with the factor of the
learning rate.

AdaScale needs no warm-up: early gradients have little noise, so the gain is close to 1 by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
