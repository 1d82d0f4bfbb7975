"""Sets of profiles: how they are found, how their format is recognised, how they are loaded.

A path may hold any of
- a directory per model with placements.csv, scalability.csv and validation-<batch>.csv (Pollux's format),
- directories throughputs_<GPU type>/ with one CSV per model, or such CSVs themselves (ElasticFlow's format),
- a JSON file of models (ours; the form is shown below).
Without a path, the profiles that ship with swell are loaded.
"""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from swell.domain import ANY_GPU, FloatArray, InputError, IntArray, nearest, packed_shape
from swell.perf.efficiency import gain
from swell.perf.goodput import BatchLimits, fixed_plan
from swell.perf.throughput import ThroughputParams, fit_throughput, step_times

# The course of a training run, epoch by epoch: progress, iterations needed, gradient statistics.
#
# Progress counts iterations at the initial batch size. A larger batch makes an epoch's progress in fewer
# iterations; how many fewer depends on the gradient noise. Statistics are kept for several batch sizes and
# interpolated linearly between them.


class Epochs:
    """Cumulative progress and iterations at the end of each epoch, and its gradient statistics."""

    def __init__(
        self,
        progress: FloatArray,
        batches: Sequence[int],
        iterations: FloatArray,
        sqr: FloatArray,
        var: FloatArray,
    ) -> None:
        """`progress` has one entry per epoch; the other three are batches x epochs."""
        shape = (len(batches), len(progress))
        if not shape[1] or not iterations.shape == sqr.shape == var.shape == shape:
            raise ValueError(f"tables of {shape[0]} batch sizes and {shape[1]} epochs do not agree")
        if list(batches) != sorted(set(batches)) or np.any(np.diff(progress, prepend=0.0) <= 0):
            raise InputError(
                "progress must grow with each epoch, and batch sizes be ascending", field="progress"
            )
        self.progress = progress
        """Progress at the end of each epoch; the last is the whole run."""
        self.progress.setflags(write=False)
        self.batches = tuple(batches)
        # Plain lists: callers read one number at a time, which is several times faster than with arrays.
        self._iterations: list[list[float]] = iterations.tolist()
        self._sqr: list[list[float]] = sqr.tolist()
        self._var: list[list[float]] = var.tolist()

    @classmethod
    def from_noise(
        cls, per_epoch: float, init_batch: int, batches: Sequence[int], noise_scale: FloatArray
    ) -> Epochs:
        """A course from the gradient noise scale (in samples) of each batch and epoch: batches x epochs.

        One epoch is worth `per_epoch` iterations at the initial batch size.
        """
        sqr, var = np.ones_like(noise_scale), noise_scale / init_batch
        scale = np.array(batches, dtype=np.float64)[:, None] / init_batch
        iterations = np.cumsum(per_epoch / gain(sqr, var, scale), axis=1)
        progress = per_epoch * np.arange(1, noise_scale.shape[1] + 1)
        return cls(progress, batches, iterations, sqr, var)

    def __len__(self) -> int:
        return len(self.progress)

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Iterations done at the end of an epoch (0-based) if the whole run uses that batch size."""
        low, high, share = self._neighbours(batch_size)
        return (1 - share) * self._iterations[low][epoch] + share * self._iterations[high][epoch]

    def grad_stats(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient during an epoch (0-based)."""
        low, high, share = self._neighbours(batch_size)
        if low == high:
            return self._sqr[low][epoch], self._var[low][epoch]
        return (
            (1 - share) * self._sqr[low][epoch] + share * self._sqr[high][epoch],
            (1 - share) * self._var[low][epoch] + share * self._var[high][epoch],
        )

    def _neighbours(self, batch_size: int) -> tuple[int, int, float]:
        """The two tabled batch sizes around this one, and how far it is from the first to the second."""
        batches = self.batches
        if batch_size <= batches[0]:
            return 0, 0, 0.0
        if batch_size >= batches[-1]:
            return len(batches) - 1, len(batches) - 1, 0.0
        high = bisect_left(batches, batch_size)
        if batches[high] == batch_size:
            return high, high, 0.0
        return high - 1, high, (batch_size - batches[high - 1]) / (batches[high] - batches[high - 1])


# A profile: the true performance of one kind of job, from measurements or from a model.


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


# Profiles that are models: seven parameters per GPU type and a schedule of the gradient noise scale.
#
# This is what ships with swell. The JSON form, one object per model under "profiles":
#
#     {"name": "resnet50", "aliases": ["imagenet"], "source": "...", "model_bytes": 1.02e8,
#      "limits": {"init_batch": 200, "max_batch": 12800, "min_local": 20, "max_local": 200},
#      "throughput": {"T4": {"alpha_c": ..., ..., "gamma": ...}, "A100": {...}},
#      "training": {"epochs": 90, "iterations_per_epoch": 6406,
#                   "noise_scale": [[0.0, 900], [0.5, 8000], [1.0, 15000]], "noise_batch_exponent": 0.2}}
#
# `noise_scale` are knots (share of the training done, samples at the initial batch size), interpolated in the
# logarithm. At a larger batch the noise scale is higher by (batch / init_batch) ** noise_batch_exponent.


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


# Piecewise linear interpolation of scattered points in three dimensions, on their Delaunay tetrahedra.
#
# The answers are those of scipy's LinearNDInterpolator, with two differences. First, measurements lie on a
# grid, where the tetrahedra on the two sides of a face may split that face along different diagonals. There
# scipy's answer depends on the path of its search; ours is the mean of both. Second, scipy inverts
# thousands of tiny matrices with LAPACK at its first call, which takes half a second where threads compete
# for cores; a 3x3 inverse written out costs nothing.


_SLACK = 1e-9
"""A point this far outside a tetrahedron (in barycentric coordinates) still counts as on its surface."""


class Linear3D:
    """Values at points in space, interpolated linearly inside their convex hull."""

    def __init__(self, points: FloatArray, values: FloatArray) -> None:
        """`points` is n x 3, `values` n x any number of columns."""
        from scipy.spatial import Delaunay

        corners = Delaunay(points).simplices
        origin = points[corners[:, 3]]
        a, b, c = (points[corners[:, i]] - origin for i in range(3))
        volume = np.einsum("ij,ij->i", a, np.cross(b, c))
        solid = np.abs(volume) > 1e-12 * np.ptp(points, axis=0).prod()
        corners, origin, volume = corners[solid], origin[solid], volume[solid]
        a, b, c = a[solid], b[solid], c[solid]
        # Rows of the inverse of the matrix with columns a, b, c: a point's share of each corner.
        inverse = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=1)
        self._inverse: FloatArray = inverse / volume[:, None, None]
        self._origin = origin
        self._corners = corners
        self._values = values
        spans = points[corners]
        slack = _SLACK * np.ptp(points, axis=0)
        self._low, self._high = spans.min(axis=1) - slack, spans.max(axis=1) + slack
        self._at_x: dict[float, IntArray] = {}

    def __call__(self, x: float, y: float, z: float) -> FloatArray | None:
        """The values at a point, None outside the hull."""
        at_x = self._at_x.get(x)
        if at_x is None:
            at_x = self._at_x[x] = np.flatnonzero((self._low[:, 0] <= x) & (x <= self._high[:, 0]))
        point = np.array([x, y, z], dtype=np.float64)
        near = at_x[((self._low[at_x, 1:] <= point[1:]) & (point[1:] <= self._high[at_x, 1:])).all(axis=1)]
        shares = np.einsum("nij,nj->ni", self._inverse[near], point - self._origin[near])
        shares = np.concatenate([shares, 1.0 - shares.sum(axis=1, keepdims=True)], axis=1)
        inside = shares.min(axis=1) >= -_SLACK
        if not inside.any():
            return None
        values = self._values[self._corners[near[inside]]]
        found: FloatArray = np.einsum("nc,ncv->nv", shares[inside], values).mean(axis=0)
        return found


# Profiles that are tables of measurements, with interpolation between them.
#
# `MeasuredPlacements`  step times per placement and local batch, and the course of training (Pollux's data)
# `MeasuredCounts`      iterations per second per global batch and number of GPUs (ElasticFlow's data)


_MOST_NODES = 16
"""Placements on more nodes than this were not measured; they count as fast as on this many."""


def smallest_rotation(shape: Shape) -> Shape:
    """One form for all rotations of a placement: measurements contain the ring, but not where it starts."""
    if len(shape) < 2:
        return shape
    return min(shape[i:] + shape[:i] for i in range(len(shape)))


class MeasuredPlacements(Profile):
    """Times measured on given placements; others are interpolated in nodes, GPUs and local batch.

    A placement outside the range of the measurements is answered by the throughput model, fitted to the whole
    table.
    """

    def __init__(
        self,
        name: str,
        gpu_type: str,
        limits: BatchLimits,
        epochs: Epochs,
        model_bytes: float,
        placements: Mapping[Shape, FloatArray],
        scalability: FloatArray,
        *,
        max_gpus: int | None = None,
        pinned_batch: int | None = None,
    ) -> None:
        """Rows of (local batch, step, sync) and of (nodes, GPUs, local batch, step, sync); times in s."""
        super().__init__(
            name, (gpu_type,), limits, epochs, model_bytes, max_gpus=max_gpus, pinned_batch=pinned_batch
        )
        self._placements = {shape: rows[np.argsort(rows[:, 0])] for shape, rows in placements.items()}
        self._scalability = scalability
        self._between: dict[tuple[int, int, int], tuple[float, float]] = {}

    def _measure(self, shape: Shape, local_batch: int, gpu_type: str) -> tuple[float, float]:
        rows = self._placements.get(smallest_rotation(shape))
        if rows is not None and rows[0, 0] <= local_batch <= rows[-1, 0]:
            step_s = np.interp(local_batch, rows[:, 0], rows[:, 1])
            return float(step_s), float(np.interp(local_batch, rows[:, 0], rows[:, 2]))
        return self._interpolate(min(len(shape), _MOST_NODES), sum(shape), local_batch)

    def _interpolate(self, nodes: int, gpus: int, local_batch: int) -> tuple[float, float]:
        key = (nodes, gpus, local_batch)
        times = self._between.get(key)
        if times is None:
            found = self._interpolator(*key)
            if found is None:
                grad_s, step_s = step_times(self._model, nodes, gpus, local_batch)
                found = np.array([step_s, step_s - grad_s])
            times = self._between[key] = float(found[0]), float(found[1])
        return times

    @cached_property
    def table(self) -> FloatArray:
        """All measurements as (nodes, GPUs, local batch, step, sync); placements of equal counts averaged."""
        groups: dict[tuple[float, ...], list[FloatArray]] = {}
        for shape, rows in self._placements.items():
            for row in rows:
                groups.setdefault((len(shape), sum(shape), row[0]), []).append(row[1:])
        means = [(*key, *np.mean(times, axis=0)) for key, times in sorted(groups.items())]
        return np.concatenate([np.array(means), self._scalability])

    @cached_property
    def _interpolator(self) -> Linear3D:
        return Linear3D(self.table[:, :3], self.table[:, 3:])

    @cached_property
    def _model(self) -> ThroughputParams:
        nodes, gpus, local, step_s, sync_s = self.table.T
        return fit_throughput(nodes, gpus, local, step_s - sync_s, step_s)


class MeasuredCounts(Profile):
    """Iterations per second by global batch and GPU count; how the GPUs are spread makes no difference.

    Rates are interpolated linearly between measured GPU counts. A rate is 0 if the job could not run on one
    of the two neighbouring counts; beyond the last count, the rate is the last one measured.
    """

    def __init__(
        self,
        name: str,
        tables: Mapping[str, tuple[FloatArray, Mapping[int, FloatArray]]],
        model_bytes: float,
        *,
        startup_s: float | None = None,
    ) -> None:
        """For each GPU type the GPU counts and, per global batch, the rates there (0: cannot run)."""
        batches = sorted({batch for _, rows in tables.values() for batch in rows})
        limits = BatchLimits(batches[0], batches[-1], 1, batches[-1])
        super().__init__(name, tuple(tables), limits, None, model_bytes, startup_s=startup_s)
        self._tables = tables

    @property
    def trains(self) -> bool:
        """Never: only rates at given batch sizes were measured."""
        return False

    @property
    def batches(self) -> tuple[int, ...]:
        """The global batch sizes that were measured, on any type."""
        return tuple(sorted({batch for _, rows in self._tables.values() for batch in rows}))

    def _measure(self, shape: Shape, local_batch: int, gpu_type: str) -> tuple[float, float]:
        raise InputError(
            f"profile '{self.name}' holds rates at fixed batch sizes and no step times; a policy that adapts"
            " batch sizes needs profiles with placements.csv, or the ones that ship",
            field="profiles",
        )

    def _rate(self, shape: Shape, batch_size: int, gpu_type: str) -> float:
        return float(self._rates_at(np.array([sum(shape)], dtype=np.float64), batch_size, gpu_type)[0])

    def _curve(self, batch_size: int, max_gpus: int, gpus_per_node: int, gpu_type: str) -> FloatArray:
        return self._rates_at(np.arange(max_gpus + 1, dtype=np.float64), batch_size, gpu_type)

    def _rates_at(self, gpus: FloatArray, batch_size: int, gpu_type: str) -> FloatArray:
        counts, rows = self._tables[self.resolve(gpu_type)]
        rates = rows.get(batch_size)
        if rates is None:
            return np.zeros(len(gpus))
        high = np.searchsorted(counts, gpus)  # the first measured count of at least `gpus`
        last = len(counts) - 1
        exact = counts[np.minimum(high, last)] == gpus
        low = np.where(exact, high, high - 1)
        runs = (low >= 0) & (rates[np.clip(low, 0, last)] > 0) & (rates[np.clip(high, 0, last)] > 0)
        return np.where(runs, np.interp(gpus, counts, rates), 0.0)


# Reading the published profile formats. Every refusal names the file, the line and the field.


ANY = ANY_GPU
_COUNTS_PREFIX = "throughputs_"
_COUNTS_HEADER = "global_batch_size"

_PARAMETERS = {
    "bert": 110e6,
    "cifar10": 11.2e6,
    "deepspeech2": 45e6,
    "gpt2": 124e6,
    "imagenet": 25.6e6,
    "inception3": 27.2e6,
    "ncf": 3.7e6,
    "resnet50": 25.6e6,
    "resnet50_cifar10": 23.5e6,
    "vgg16": 138.4e6,
    "yolov3": 61.9e6,
}
"""Published parameter counts of the models in the public data, which does not state them."""

_UNKNOWN_PARAMETERS = 25e6

_MAX_LOCAL = {"yolov3": 8}
"""Largest local batch in the published simulations, where it is below the largest one measured."""

_ONE_GPU = {"ncf": 32768}
"""Models that the published simulations kept on one GPU at this batch size."""


def model_bytes(name: str) -> float:
    """Size of a model's parameters in single precision."""
    return 4.0 * _PARAMETERS.get(name, _UNKNOWN_PARAMETERS)


def find(path: Path) -> list[Profile] | None:
    """The profiles in a directory, None if it holds none of the formats known."""
    if (path / "placements.csv").exists():
        return [read_placements(path)]
    children = sorted(path.iterdir())
    apps = [child for child in children if (child / "placements.csv").exists()]
    if apps:
        return [read_placements(app) for app in apps]
    kinds = [c for c in children if c.is_dir() and c.name.startswith(_COUNTS_PREFIX)]
    if kinds:
        return read_counts({c.name.removeprefix(_COUNTS_PREFIX): sorted(c.glob("*.csv")) for c in kinds})
    files = [child for child in children if child.suffix == ".csv" and _first_column(child) == _COUNTS_HEADER]
    if files:
        kind = path.name.removeprefix(_COUNTS_PREFIX) if path.name.startswith(_COUNTS_PREFIX) else ANY
        return read_counts({kind: files})
    return None


def read_placements(folder: Path) -> MeasuredPlacements:
    """One model in Pollux's format: measured on T4 GPUs, 4 to a node."""
    placements = _placements(folder / "placements.csv")
    scalability = _columns(
        folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    )
    validation: dict[int, FloatArray] = {}
    for path in folder.glob("validation-*.csv"):
        batch = path.stem.removeprefix("validation-")
        if not batch.isdigit():
            raise InputError(f"{path}: the name must be validation-<batch size>.csv", field="profiles")
        validation[int(batch)] = _columns(path, ("progress", "iteration", "grad_sqr", "grad_var"))
    if not validation:
        raise InputError(f"{folder}: no validation-<batch size>.csv beside placements.csv", field="profiles")
    batches = sorted(validation)
    length = min(len(rows) for rows in validation.values())
    course = np.array([validation[batch][:length] for batch in batches])
    locals_ = [rows[:, 0] for rows in placements.values()]
    name = folder.name
    return MeasuredPlacements(
        name,
        "T4",
        BatchLimits(
            batches[0],
            batches[-1],
            int(min(map(min, locals_))),
            _MAX_LOCAL.get(name, int(max(map(max, locals_)))),
        ),
        # Batch sizes differ in the progress an epoch needs; the published simulations use the smallest.
        Epochs(course[:, :, 0].min(axis=0), batches, course[:, :, 1], course[:, :, 2], course[:, :, 3]),
        model_bytes(name),
        placements,
        scalability,
        max_gpus=1 if name in _ONE_GPU else None,
        pinned_batch=_ONE_GPU.get(name),
    )


def read_counts(files: Mapping[str, Sequence[Path]]) -> list[Profile]:
    """Models in ElasticFlow's format, from the CSV files of each GPU type."""
    tables: dict[str, dict[str, tuple[FloatArray, dict[int, FloatArray]]]] = {}
    for kind in sorted(files):
        for path in files[kind]:
            tables.setdefault(path.stem, {})[kind] = _counts(path)
    return [MeasuredCounts(name, tables[name], model_bytes(name)) for name in sorted(tables)]


def _counts(path: Path) -> tuple[FloatArray, dict[int, FloatArray]]:
    rows = _rows(path)
    _, header = next(rows)
    if header[0] != _COUNTS_HEADER or len(header) < 2:
        raise InputError(f"{path}: the header must be {_COUNTS_HEADER} and GPU counts, got {header}")
    counts = np.array([_number(path, 1, "header", text) for text in header[1:]])
    if np.any(np.diff(counts, prepend=0) <= 0):
        raise InputError(
            f"{path}: the GPU counts of the header must ascend, got {header[1:]}", field="header"
        )
    rates: dict[int, FloatArray] = {}
    for line, row in rows:
        batch = int(_number(path, line, _COUNTS_HEADER, row[0], least=1))
        values = [_number(path, line, name, text or "0") for name, text in zip(header[1:], row[1:])]
        values += [0.0] * (len(counts) - len(values))
        rates[batch] = np.nan_to_num(np.array(values[: len(counts)]))
    if not rates:
        raise InputError(f"{path}: no rows after the header")
    return counts, rates


def _placements(path: Path) -> dict[Shape, FloatArray]:
    columns = ("placement", "local_bsz", "step_time", "sync_time")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for line, texts in _select(path, columns):
        if not texts[0].isdigit() or "0" in texts[0]:
            raise InputError(
                f"{path}:{line}: placement must be a digit per node, its GPUs, such as 12, got '{texts[0]}'",
                field="placement",
            )
        numbers = tuple(_number(path, line, name, text) for name, text in zip(columns[1:], texts[1:]))
        rows.setdefault(texts[0], []).append(numbers)
    return {tuple(map(int, text)): np.array(times) for text, times in rows.items()}


def _columns(path: Path, columns: tuple[str, ...]) -> FloatArray:
    """The named columns of a CSV file as numbers."""
    selected = _select(path, columns)
    return np.array(
        [[_number(path, line, name, text) for name, text in zip(columns, row)] for line, row in selected]
    )


def _select(path: Path, columns: tuple[str, ...]) -> list[tuple[int, list[str]]]:
    rows = _rows(path)
    _, header = next(rows)
    missing = [name for name in columns if name not in header]
    if missing:
        raise InputError(
            f"{path}: column '{missing[0]}' is missing from the header {header}", field=missing[0]
        )
    at = [header.index(name) for name in columns]
    out = []
    for line, row in rows:
        if len(row) != len(header):
            raise InputError(f"{path}:{line}: {len(row)} fields where the header has {len(header)}")
        out.append((line, [row[i] for i in at]))
    if not out:
        raise InputError(f"{path}: no rows after the header")
    return out


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with their line numbers, the header first, without empty lines."""
    try:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            empty = True
            for row in reader:
                if row:
                    empty = False
                    yield reader.line_num, row
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", field="profiles") from error
    if empty:
        raise InputError(f"{path} is empty", field="profiles")


def _number(path: Path, line: int, name: str, text: str, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -math.inf
    if value < least:
        raise InputError(
            f"{path}:{line}: {name} must be a number of at least {least:g}, got '{text}'", field=name
        )
    return value


def _first_column(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().split(",")[0].strip()


__all__ = [
    "Epochs",
    "MeasuredCounts",
    "MeasuredPlacements",
    "ModelProfile",
    "Profile",
    "ProfileSet",
    "Training",
]

SHIPPED = Path(__file__).with_name("default_profiles.json")
VERSION = 1
"""Version of the JSON form."""


class ProfileSet:
    """Profiles by name."""

    def __init__(self, profiles: Iterable[Profile], source: str = "given") -> None:
        self.source = source
        """Where they come from, for messages and reports."""
        self._profiles = {profile.name: profile for profile in profiles}
        self._aliases = {
            alias: profile
            for profile in self._profiles.values()
            if isinstance(profile, ModelProfile)
            for alias in profile.aliases
        }

    def __len__(self) -> int:
        return len(self._profiles)

    def __iter__(self) -> Iterator[Profile]:
        return iter(self._profiles.values())

    def __contains__(self, model: object) -> bool:
        return model in self._profiles or model in self._aliases

    @property
    def names(self) -> list[str]:
        """The names of the profiles, aliases left out."""
        return list(self._profiles)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """All GPU types that any of them was measured on."""
        return tuple(dict.fromkeys(kind for profile in self for kind in profile.gpu_types))

    def get(self, model: str) -> Profile:
        """The profile of a model, by its name or an alias."""
        profile = self._profiles.get(model) or self._aliases.get(model)
        if profile is None:
            known = [*self._profiles, *self._aliases]
            raise InputError(
                f"no performance profile for model '{model}' in {self.source}."
                f"{nearest(model, known)} Known: {', '.join(sorted(self._profiles))}",
                field="model",
            )
        return profile

    @classmethod
    def load(cls, path: Path | None = None) -> ProfileSet:
        """Load the profiles at a path, whatever their format; those that ship with swell for None."""
        if path is None:
            return cls(_read_json(SHIPPED), "the profiles that ship with swell")
        if not path.exists():
            raise InputError(f"profiles '{path}' do not exist", field="profiles")
        if path.is_file():
            if path.suffix == ".json":
                return cls(_read_json(path), str(path))
            return cls(read_counts({ANY: [path]}), str(path))
        found = find(path)
        if found is None:
            raise InputError(
                f"profiles '{path}': no directories with placements.csv, no throughputs_<GPU type>/,"
                " no CSV files that start with global_batch_size",
                field="profiles",
            )
        return cls(found, str(path))

    def save(self, path: Path) -> None:
        """Write the profiles in our JSON form, which only profiles that are models have."""
        models = [profile for profile in self if isinstance(profile, ModelProfile)]
        if len(models) != len(self):
            raise InputError("only profiles that are models can be written; fit the measured ones first")
        content = {"version": VERSION, "profiles": [profile.to_json() for profile in models]}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _read_json(path: Path) -> list[ModelProfile]:
    try:
        content: Any = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise InputError(
                f"{path}: version {content['version']!r}, this swell reads {VERSION}", field="version"
            )
        return [ModelProfile.from_json(raw) for raw in content["profiles"]]
    except InputError as error:
        raise InputError(f"{path}: {error}", field=error.field) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a file of profiles: {error}", field="profiles") from error
