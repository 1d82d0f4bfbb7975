"""The local engine: real worker processes on this machine's GPUs, or on CPU slots where there are none.

Which slots a job has is the scheduler's affair; here only their number matters, since all are on one machine
(where there are GPUs, `supervisor` hands out one to each worker).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from swell.domain import Cluster, InputError, Placement
from swell.engines.base import Launch
from swell.engines.supervised import HANDOVER_S, SupervisedEngine
from swell.engines.supervised_job import SupervisedJob
from swell.train.wire import Message


def detect_gpus() -> int:
    """GPUs of this machine, as the driver lists them; 0 without one."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


class LocalEngine(SupervisedEngine):
    """Workers as processes of this machine."""

    name = "local"

    def __init__(self, home: Path, nodes: str | None = None, slots: int | None = None) -> None:
        """`nodes` such as '2x4' for virtual nodes; else one node of `slots`, the GPUs, or the cores."""
        if nodes is not None and slots is not None:
            raise InputError("give either nodes or slots, not both", field="nodes")
        if slots is not None and slots < 1:
            raise InputError(f"slots must be at least 1, got {slots}", field="slots")
        super().__init__(home)
        self._gpus = detect_gpus()
        count = slots or self._gpus or os.cpu_count() or 1
        self._cluster = Cluster.parse(nodes or f"1x{count}", "gpu" if self._gpus else "cpu")

    def cluster(self) -> Cluster:
        """The nodes, which never change here."""
        return self._cluster

    def check(self, launch: Launch) -> None:
        """Workers share this machine's Python: requirements of their own need an engine that can install."""
        if launch.request.pip:
            raise InputError(
                "pip: the local engine runs jobs with the packages that are installed here; install "
                f"{' '.join(launch.request.pip)} beside swell, or use 'swell up --engine ray'",
                field="pip",
            )

    def _grant(self, job: SupervisedJob, now_s: float) -> Placement:
        """As many slots as there is room for: the wanted ones first, then any that no other job has."""
        taken = self._taken(job)
        count, told = len(job.wanted), len(job.told)
        if count > told:
            room = max(self._cluster.capacity - len(taken), told)
            if room < count:
                count = room if now_s - job.wanted_s > HANDOVER_S else told
        free = (s for s in (*job.wanted, *job.told, *range(self._cluster.capacity)) if s not in taken)
        return tuple(sorted(list(dict.fromkeys(free))[:count]))

    def _taken(self, job: SupervisedJob) -> set[int]:
        """Slots that other jobs have a worker on, or were told to use."""
        with self._lock:
            return set().union(*(other.slots for other in self._jobs.values() if other is not job))

    def _assign_slots(self, job: SupervisedJob) -> None:
        """Which slot a worker has is a matter of the books here: members have those that the job was told."""
        held = [slot for slot in job.live.values() if slot is not None]
        taken = self._taken(job)
        free = (slot for slot in range(self._cluster.capacity) if slot not in taken)
        pool = iter(dict.fromkeys((*job.told, *held, *free)))
        for worker in sorted(job.live, key=lambda name: (name not in job.members, name)):
            job.live[worker] = next(pool, None)

    def _resize(self, granted: Placement) -> Message:
        return {"type": "resize", "workers": len(granted)}

    def _connected(self, job: SupervisedJob) -> None:
        known = job.wanted if len(job.wanted) >= job.target else tuple(range(job.target))
        job.told = known[: job.target]

    def _order_extras(self, job: SupervisedJob, granted: Placement) -> dict[str, Any]:
        """A file for each GPU, to be locked by whoever uses it; none on CPU slots."""
        folder = self._home / "devices"
        if self._gpus:
            folder.mkdir(exist_ok=True, mode=0o700)
        return {"devices": [str(folder / str(i)) for i in range(self._gpus)]}
