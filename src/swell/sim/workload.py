"""The jobs of a simulation with their profiles, and how fast each of them is on every number of GPUs.

A true curve says how fast a job is if it is packed on as few nodes as possible, and without neighbours where
GPUs are several slots each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swell.domain import Cluster, FloatArray, InputError, IntArray, JobSpec
from swell.perf.curves import Curves, in_steps
from swell.perf.profile import Profile
from swell.perf.profiles import ProfileSet
from swell.sim.sharing import alone_speeds

_WIDEST_CURVE = 512
"""Curves are not computed beyond this many GPUs unless a job asks for more: rates fall long before that."""


class Workload(NamedTuple):
    """The jobs of a run, in order of submission."""

    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    """Each job's profile."""
    curves: Curves
    """The true curves on the most frequent GPU type, and on each type where types are told apart."""
    row: IntArray
    """For each job the row of its curve, which several jobs may have."""

    @classmethod
    def of(
        cls, jobs: Sequence[JobSpec], profiles: ProfileSet, cluster: Cluster, types: Sequence[str]
    ) -> Workload:
        """The workload of these jobs on a cluster whose GPU `types` are told apart."""
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
