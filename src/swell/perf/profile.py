"""A profile: the true performance of one kind of job, from measurements or from a model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from swell.domain import ANY_GPU, FloatArray, InputError, packed_shape
from swell.perf.batch import BatchLimits, fixed_plan
from swell.perf.epochs import Epochs

Shape = tuple[int, ...]
"""GPUs on each node."""


class Profile(ABC):
    """How fast a model trains on a placement, and how many iterations it takes. Answers are cached."""

    def __init__(
        self,
        name: str,
        gpu_types: tuple[str, ...],
        limits: BatchLimits,
        epochs: Epochs | None,
        model_bytes: float,
        *,
        max_gpus: int | None = None,
        pinned_batch: int | None = None,
        startup_s: float | None = None,
    ) -> None:
        self.name = name
        self.gpu_types = gpu_types
        """GPU types that the profile was measured on; the first is used where no type is given."""
        self.limits = limits
        self.epochs = epochs
        """The course of a whole run; None where only the speed is known."""
        self.model_bytes = model_bytes
        """Size of the parameters."""
        self.startup_s = startup_s
        """How long a start of such a job takes; None where that was not measured."""
        self.max_gpus = max_gpus
        """The most GPUs worth giving such a job; None for no such bound."""
        self.pinned_batch = pinned_batch
        """The batch size that such a job keeps even under a policy that adapts batch sizes, or None."""
        self._step_times: dict[tuple[Shape, int, str], tuple[float, float]] = {}
        self._rates: dict[tuple[Shape, int, str], float] = {}
        self._curves: dict[tuple[int, int, int, str], FloatArray] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, gpu_types={self.gpu_types})"

    @property
    def trains(self) -> bool:
        """Whether step times at any batch are known, so that batch sizes can adapt and models be fitted."""
        return True

    @abstractmethod
    def _measure(self, shape: Shape, local_batch: int, gpu_type: str) -> tuple[float, float]:
        """Seconds of one step, and how many of them synchronising adds."""

    def step_time(self, shape: Shape, local_batch: int, gpu_type: str = ANY_GPU) -> tuple[float, float]:
        """Seconds of one step on a placement, and the synchronising time that computing does not hide."""
        key = (shape, local_batch, gpu_type)
        times = self._step_times.get(key)
        if times is None:
            times = self._measure(shape, local_batch, self.resolve(gpu_type))
            self._step_times[key] = times
        return times

    def rate(self, shape: Shape, batch_size: int, gpu_type: str = ANY_GPU) -> float:
        """Iterations per second at a fixed global batch size; 0 if it cannot run."""
        key = (shape, batch_size, gpu_type)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = self._rate(shape, batch_size, gpu_type)
        return rate

    def _rate(self, shape: Shape, batch_size: int, gpu_type: str) -> float:
        gpus, limits = sum(shape), self.limits
        # Checked here because rounding the local batch up would hide that the batch is too small for so many
        # GPUs; `_curve` has the same bound.
        if not gpus or batch_size > limits.max_batch or gpus * limits.min_local > batch_size:
            return 0.0
        plan = fixed_plan(limits, batch_size, gpus)
        if plan.local_batch < limits.min_local:
            return 0.0
        step_s, sync_s = self.step_time(shape, plan.local_batch, gpu_type)
        return 1.0 / (step_s + plan.accumulation * (step_s - sync_s))

    def curve(
        self, batch_size: int, max_gpus: int, gpus_per_node: int, gpu_type: str = ANY_GPU
    ) -> FloatArray:
        """Rates on 0 to `max_gpus` GPUs, packed on as few nodes as possible (read only)."""
        key = (batch_size, max_gpus, gpus_per_node, gpu_type)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curve(batch_size, max_gpus, gpus_per_node, gpu_type)
            curve.setflags(write=False)
            self._curves[key] = curve
        return curve

    def _curve(self, batch_size: int, max_gpus: int, gpus_per_node: int, gpu_type: str) -> FloatArray:
        curve = np.zeros(max_gpus + 1)
        # On more GPUs than this, the batch does not give each GPU its smallest local batch.
        for gpus in range(1, min(max_gpus, batch_size // self.limits.min_local) + 1):
            curve[gpus] = self.rate(packed_shape(gpus, gpus_per_node), batch_size, gpu_type)
        return curve

    def grad_stats(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient during an epoch (0-based), at the initial batch size."""
        return self._course().grad_stats(batch_size, epoch)

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Iterations at that batch size from the start to the end of an epoch (0-based; -1 is the last)."""
        return self._course().iterations(batch_size, epoch)

    def resolve(self, gpu_type: str) -> str:
        """A GPU type as this profile spells it; case does not matter."""
        if gpu_type in self.gpu_types:
            return gpu_type
        if gpu_type == ANY_GPU:
            return self.gpu_types[0]
        for known in self.gpu_types:
            if known.lower() == gpu_type.lower():
                return known
        raise InputError(
            f"profile '{self.name}' was not measured on GPU type '{gpu_type}'; it has: "
            f"{', '.join(self.gpu_types)}",
            field="gpu-type",
        )

    def _course(self) -> Epochs:
        if self.epochs is None:
            raise InputError(
                f"profile '{self.name}' says how fast it trains but not for how many epochs; give the jobs"
                " their number of iterations, or use a profile with epochs",
                field="profiles",
            )
        return self.epochs
