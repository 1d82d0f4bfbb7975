"""The options of `swell.elastic`, in small groups near what they are for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from swell.train.agent.errors import UsageError

MODES = ("fixed", "adaptive", "consistent")
DEFAULT_CHECKPOINT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """When and where checkpoints are written."""

    checkpoint_dir: str | os.PathLike[str] | None = None
    """Where to; by default the job's own directory, and nowhere without `swell run`."""
    checkpoint_every_s: float | None = DEFAULT_CHECKPOINT_S
    """Seconds between two checkpoints; None for none by time."""
    checkpoint_every_steps: int | None = None
    """Steps between two checkpoints; None for none by steps."""
    keep_checkpoints: int = 3
    """How many are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptions:
    """How *adaptive* mode chooses batch and learning rate (docs/guides/adaptive.md)."""

    learning_rate_rule: str = "adascale"
    """How the learning rate follows the batch."""
    warmup_epochs: float = 0.0
    """How long the learning rate rises slowly."""
    max_batch: int | None = None
    """The largest batch of a step."""
    min_local: int = 1
    """The fewest samples that a worker computes at once."""
    max_local: int | None = None
    """The most samples that a worker computes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `swell.elastic` besides models and optimizers."""

    scheduler: Any = None
    """A learning-rate scheduler; the job steps it."""
    step_scheduler: str = "epoch"
    """When the scheduler is stepped: after each 'epoch', each 'step', or 'never' by the job."""
    mode: str = "fixed"
    """The batch mode, for when workers come and go: 'fixed', 'adaptive' or 'consistent'."""
    logical_ranks: int = 4
    """In *consistent* mode: how many parts each step is computed in, whatever the number of workers."""
    clip_norm: float | None = None
    """Clip the norm of the gradients to this before each update."""
    scaler: Any = None
    """A `torch.amp.GradScaler`."""
    seed: int = 0
    """Seed for the data order and for every worker's random numbers."""
    device: torch.device | str | None = None
    """Refuse a model that is not there."""
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    adaptive: AdaptiveOptions = field(default_factory=AdaptiveOptions)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode: got {self.mode!r}, must be one of {', '.join(MODES)}")
        if self.logical_ranks < 1:
            raise UsageError(f"logical_ranks: got {self.logical_ranks}, must be at least 1")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """The options by the names that scripts use, which are those of all groups together."""
        groups = {"checkpoints": CheckpointOptions, "adaptive": AdaptiveOptions}
        names = {name: [f.name for f in fields(group)] for name, group in groups.items()}
        names["own"] = [f.name for f in fields(cls) if f.name not in groups]
        known = sorted(name for group in names.values() for name in group)
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(f"{unknown[0]}: swell.elastic has no such option; there are {', '.join(known)}")
        made = {
            name: group(**{key: given[key] for key in names[name] if key in given})
            for name, group in groups.items()
        }
        return cls(**{key: given[key] for key in names["own"] if key in given}, **made)
