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
        wanted, told = len(job.wanted), len(job.told)
        if wanted <= told:
            return job.wanted
        room = max(self._room(job), told)
        if room < wanted:
            room = room if now_s - job.wanted_s > HANDOVER_S else told
        return job.wanted[:room]

    def _room(self, job: SupervisedJob) -> int:
        """Slots that nobody else has a worker on, or was promised one."""
        with self._lock:
            others = sum(other.in_use for other in self._jobs.values() if other is not job)
        return self._cluster.capacity - others

    def _resize(self, granted: Placement) -> Message:
        return {"type": "resize", "workers": len(granted)}

    def _connected(self, job: SupervisedJob) -> None:
        job.told = tuple(range(job.target))

    def _order_extras(self, job: SupervisedJob, granted: Placement) -> dict[str, Any]:
        """A file for each GPU, to be locked by whoever uses it; none on CPU slots."""
        folder = self._home / "devices"
        if self._gpus:
            folder.mkdir(exist_ok=True, mode=0o700)
        return {"devices": [str(folder / str(i)) for i in range(self._gpus)]}
