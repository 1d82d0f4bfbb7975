"""Profiles that are models: seven parameters per GPU type and a schedule of the gradient noise scale.

This is what ships with swell. The JSON form, one object per model under "profiles":

    {"name": "resnet50", "aliases": ["imagenet"], "source": "...", "model_bytes": 1.02e8,
     "limits": {"init_batch": 200, "max_batch": 12800, "min_local": 20, "max_local": 200},
     "throughput": {"T4": {"alpha_c": ..., ..., "gamma": ...}, "A100": {...}},
     "training": {"epochs": 90, "iterations_per_epoch": 6406,
                  "noise_scale": [[0.0, 900], [0.5, 8000], [1.0, 15000]], "noise_batch_exponent": 0.2}}

`noise_scale` are knots (share of the training done, samples at the initial batch size), interpolated in the
logarithm. At a larger batch the noise scale is higher by (batch / init_batch) ** noise_batch_exponent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from swell.domain import FloatArray, InputError
from swell.perf.batch import BatchLimits, fixed_plan
from swell.perf.epochs import Epochs
from swell.perf.profile import Profile, Shape
from swell.perf.throughput import ThroughputParams, step_times


@dataclass(frozen=True, slots=True)
class Training:
    """The length of a run, and how its gradient noise scale grows."""

    epochs: int
    iterations_per_epoch: float
    noise_scale: tuple[tuple[float, float], ...]
    """(share of the training done, noise scale in samples at the initial batch size), ascending."""
    noise_batch_exponent: float = 0.0

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.noise_scale]
        if self.epochs < 1 or self.iterations_per_epoch <= 0:
            raise InputError(
                f"training needs at least one epoch of some iterations, got epochs={self.epochs}, "
                f"iterations_per_epoch={self.iterations_per_epoch}",
                field="training",
            )
        if not shares or shares != sorted(set(shares)) or any(noise <= 0 for _, noise in self.noise_scale):
            raise InputError(
                "noise_scale needs knots of ascending shares and positive values", field="noise_scale"
            )

    def course(self, limits: BatchLimits) -> Epochs:
        """The training epoch by epoch, in a table with one row for each doubling of the batch."""
        doublings = math.ceil(math.log2(limits.max_batch / limits.init_batch) - 1e-9)
        batches = [min(limits.init_batch << i, limits.max_batch) for i in range(doublings + 1)]
        shares, noise = np.array(self.noise_scale).T
        middle = (np.arange(self.epochs) + 0.5) / self.epochs
        by_epoch = np.exp(np.interp(middle, shares, np.log(noise)))
        by_batch = (np.array(batches) / limits.init_batch) ** self.noise_batch_exponent
        return Epochs.from_noise(
            self.iterations_per_epoch, limits.init_batch, batches, np.outer(by_batch, by_epoch)
        )


class ModelProfile(Profile):
    """A job whose true performance is the throughput model itself."""

    def __init__(
        self,
        name: str,
        throughput: Mapping[str, ThroughputParams],
        limits: BatchLimits,
        model_bytes: float,
        training: Training | None = None,
        *,
        aliases: tuple[str, ...] = (),
        source: str = "",
    ) -> None:
        if not throughput:
            raise InputError(
                f"profile '{name}' needs the parameters of at least one GPU type", field="throughput"
            )
        epochs = training.course(limits) if training is not None else None
        super().__init__(name, tuple(throughput), limits, epochs, model_bytes)
        self.throughput = dict(throughput)
        self.training = training
        self.aliases = aliases
        self.source = source

    def _measure(self, shape: Shape, local_batch: int, gpu_type: str) -> tuple[float, float]:
        grad_s, step_s = step_times(self.throughput[gpu_type], len(shape), sum(shape), local_batch)
        return float(step_s), float(step_s - grad_s)

    def _curve(self, batch_size: int, max_gpus: int, gpus_per_node: int, gpu_type: str) -> FloatArray:
        curve = np.zeros(max_gpus + 1)
        most = min(max_gpus, batch_size // self.limits.min_local)
        if batch_size > self.limits.max_batch or most < 1:
            return curve
        plans = [fixed_plan(self.limits, batch_size, gpus) for gpus in range(1, most + 1)]
        local = np.array([plan.local_batch for plan in plans])
        accumulation = np.array([plan.accumulation for plan in plans])
        gpus = np.arange(1, most + 1)
        params = self.throughput[self.resolve(gpu_type)]
        grad_s, step_s = step_times(params, -(-gpus // gpus_per_node), gpus, local)
        curve[1 : most + 1] = np.where(
            local >= self.limits.min_local, 1.0 / (accumulation * grad_s + step_s), 0.0
        )
        return curve

    def to_json(self) -> dict[str, Any]:
        """The profile as it is kept in a file."""
        out: dict[str, Any] = {"name": self.name, "aliases": list(self.aliases), "source": self.source}
        out |= {"model_bytes": self.model_bytes, "limits": asdict(self.limits)}
        out["throughput"] = {kind: asdict(params) for kind, params in self.throughput.items()}
        if self.training is not None:
            out["training"] = asdict(self.training)
        return out

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelProfile:
        """Read what `to_json` wrote; unknown keys are refused, because they are probably typing errors."""
        try:
            training = raw.get("training")
            profile = cls(
                str(raw["name"]),
                {kind: ThroughputParams(**params) for kind, params in raw["throughput"].items()},
                BatchLimits(**raw["limits"]),
                float(raw["model_bytes"]),
                Training(**training | {"noise_scale": tuple(map(tuple, training["noise_scale"]))})
                if training
                else None,
                aliases=tuple(raw.get("aliases", ())),
                source=str(raw.get("source", "")),
            )
        except KeyError as error:
            raise InputError(f"profile '{raw.get('name', '?')}': field {error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"profile '{raw.get('name', '?')}': {error}") from error
        return profile
