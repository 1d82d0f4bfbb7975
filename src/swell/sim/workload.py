"""The jobs of a simulation with their profiles, and how fast each of them is on every number of GPUs.

A true curve is how fast a job is if it is packed on as few nodes as possible, and without neighbours where
GPUs are several slots each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swell.domain import Cluster, FloatArray, InputError, IntArray, JobSpec, Placement
from swell.perf.curves import Curves, in_steps
from swell.perf.profiles import Profile, ProfileSet
from swell.perf.sharing import CONTENTION, OnGpu, alone_speed, speeds_on_gpu

# Jobs that share GPUs in the simulator: who is on which GPU, and how fast each job is beside its neighbours.
#
# `swell.perf.sharing` has how fast jobs on one GPU are. A job with several workers is as fast as its slowest
# worker. When a job comes to a GPU or leaves it, the speeds of its neighbours change from that moment on.


class SharedGpus:
    """The jobs on each GPU of a cluster whose GPUs are several slots each.

    Invariants, true between any two calls:
    - `_workers[gpu]` has the jobs that have slots of this GPU, with the number of these slots;
    - `_here[gpu]` has the same jobs, with the speed of their workers there.
    """

    def __init__(self, cluster: Cluster, fills: Sequence[float], contention: float = CONTENTION) -> None:
        """`fills`: by job, which part of a GPU's time a worker of the job uses alone."""
        self._gpu_of = cluster.real_gpu_of_slot
        self._fills, self._contention = fills, contention
        gpus = range(sum(node.real_gpus for node in cluster.nodes))
        self._workers: list[dict[int, int]] = [{} for _ in gpus]
        self._here: list[dict[int, float]] = [{} for _ in gpus]
        self._gpus: dict[int, dict[int, int]] = {}
        """By job that holds slots: its GPUs, with the number of its workers on each."""
        self._speed: dict[int, float] = {}
        self._known: dict[tuple[OnGpu, ...], list[float]] = {}

    def speed(self, job: int) -> float:
        """How fast a job is beside its neighbours, relative to workers that are alone on their GPUs."""
        return self._speed.get(job, 1.0)

    def place(self, placements: Iterable[tuple[int, Placement]]) -> list[int]:
        """Enter the slots that jobs have from now on; returns the jobs whose speed changed, in order."""
        touched: set[int] = set()
        for job, placement in placements:
            before = self._gpus.pop(job, {})
            for gpu in before:
                del self._workers[gpu][job]
            after: dict[int, int] = {}
            for slot in placement:
                gpu = self._gpu_of[slot]
                after[gpu] = after.get(gpu, 0) + 1
            for gpu, workers in after.items():
                self._workers[gpu][job] = workers
            if after:
                self._gpus[job] = after
            else:
                self._speed.pop(job, None)
            touched |= before.keys() | after.keys()
        for gpu in touched:
            self._here[gpu] = self._speeds(self._workers[gpu])
        changed = []
        for job in sorted({job for gpu in touched for job in self._workers[gpu]}):
            speed = min(self._here[gpu][job] for gpu in self._gpus[job])
            if speed != self._speed.get(job):
                self._speed[job] = speed
                changed.append(job)
        return changed

    def _speeds(self, workers: dict[int, int]) -> dict[int, float]:
        """The speed of each job's workers on a GPU where these jobs have these numbers of workers."""
        if not workers:
            return {}
        together = sorted((OnGpu(self._fills[job], count), job) for job, count in workers.items())
        key = tuple(one for one, _ in together)
        speeds = self._known.get(key)
        if speeds is None:
            speeds = self._known[key] = speeds_on_gpu(key, self._contention)
        return {job: speed for (_, job), speed in zip(together, speeds, strict=True)}


def alone_speeds(fill: float, most: int, slots_per_node: int, per_gpu: int) -> FloatArray:
    """How fast a job is on 0 to `most` slots if no other job is there, relative to as many whole GPUs.

    The slots are packed on as few nodes as possible, and there on different GPUs first: from some number of
    slots on the job's own workers share GPUs.
    """
    here = np.minimum(np.arange(most + 1), slots_per_node)
    on_one_gpu = -(-here // -(-slots_per_node // per_gpu))
    return np.array([alone_speed(OnGpu(fill, max(int(count), 1))) for count in on_one_gpu])


_WIDEST_CURVE = 512
"""Curves are not computed beyond this many GPUs unless a job requests more: rates fall long before that."""


class Workload(NamedTuple):
    """The jobs of a run, in order of submission."""

    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    """Each job's profile."""
    curves: Curves
    """The true curves on the most frequent GPU type, and on each type where types are distinguished."""
    row: IntArray
    """For each job the row of its curve, which several jobs may have."""

    @classmethod
    def of(
        cls, jobs: Sequence[JobSpec], profiles: ProfileSet, cluster: Cluster, types: Sequence[str]
    ) -> Workload:
        """The workload of these jobs on a cluster whose GPU `types` are distinguished."""
        profile_of = [profiles.get(job.model) for job in jobs]
        main = max(cluster.gpu_types, key=lambda kind: _gpus_of_type(cluster, kind))
        width = {kind: widest_node(cluster, kind) for kind in dict.fromkeys((main, *types))}
        if not types:
            width[main] = cluster.gpus_per_node
        most = min(cluster.capacity, max(_WIDEST_CURVE, *(job.gpus for job in jobs)))
        known: dict[tuple[str, int, int, float], int] = {}
        rates: dict[str, list[FloatArray]] = {kind: [] for kind in width}
        row = np.zeros(len(jobs), dtype=np.int64)
        for i, (job, profile) in enumerate(zip(jobs, profile_of, strict=True)):
            fill = job.fill if cluster.per_gpu > 1 else 1.0
            key = (job.model, job.batch_size, job.gpus_per_replica, fill)
            if key not in known:
                known[key] = len(rates[main])
                for kind, curve in _curves_of(job, profile, width, most, cluster.per_gpu).items():
                    rates[kind].append(curve)
            row[i] = known[key]
        by_type = {kind: Curves(np.array(rates[kind])) for kind in types}
        return cls(jobs, profile_of, Curves(np.array(rates[main]), by_type), row)


def _curves_of(
    job: JobSpec, profile: Profile, width: Mapping[str, int], most: int, per_gpu: int
) -> dict[str, FloatArray]:
    """A job's curve on each GPU type of `width`, which has the GPUs of the type's largest node."""
    found = {
        kind: in_steps(profile.curve(job.batch_size, most, gpus, profile.resolve(kind)), job.gpus_per_replica)
        for kind, gpus in width.items()
    }
    if per_gpu > 1:
        found = {
            kind: curve * alone_speeds(job.fill, most, width[kind], per_gpu) for kind, curve in found.items()
        }
    if not any(np.any(curve > 0) for curve in found.values()):
        raise InputError(
            f"job '{job.job_id}': profile '{job.model}' cannot run at batch_size {job.batch_size}"
            f" on any number of GPUs up to {most}; give another batch_size",
            field="batch_size",
        )
    return found


def _gpus_of_type(cluster: Cluster, kind: str) -> int:
    return sum(node.gpus for node in cluster.nodes if node.gpu_type == kind)


def widest_node(cluster: Cluster, kind: str) -> int:
    """The GPUs of the largest node of a type."""
    return max(node.gpus for node in cluster.nodes if node.gpu_type == kind)
