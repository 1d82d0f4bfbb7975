"""Profiles that are tables of measurements, with interpolation between them.

`MeasuredPlacements`  step times per placement and local batch, and the course of training (Pollux's data)
`MeasuredCounts`      iterations per second per global batch and number of GPUs (ElasticFlow's data)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from swell.domain import FloatArray, InputError
from swell.perf._linear import Linear3D
from swell.perf.batch import BatchLimits
from swell.perf.epochs import Epochs
from swell.perf.profile import Profile, Shape
from swell.perf.throughput import ThroughputParams, fit_throughput, step_times

_MOST_NODES = 16
"""Placements on more nodes than this were not measured; they count as fast as on this many."""


def smallest_rotation(shape: Shape) -> Shape:
    """One form for all rotations of a placement: measurements know the ring, but not where it starts."""
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
