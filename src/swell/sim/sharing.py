"""Jobs that share GPUs in the simulator: who is on which GPU, and how fast each job is beside its neighbours.

`swell.perf.sharing` says how fast jobs on one GPU are. A job with several workers is as fast as its slowest
worker. When a job comes to a GPU or leaves it, the speeds of its neighbours change from that moment on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from swell.domain import Cluster, FloatArray, Placement
from swell.perf.sharing import CONTENTION, OnGpu, alone_speed, speeds_on_gpu


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
        """The speed of each job's workers on a GPU where these jobs have so many workers."""
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
