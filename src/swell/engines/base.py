"""What an engine is: where workers live. Local processes, Ray, ... behind one small interface.

The control plane says what should run (`apply`) and asks what does (`observe`). An engine holds no state that
matters: whatever it needs to find its jobs again after the control plane was killed is on disk or in the
cluster it drives. Jobs live on while nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from swell.domain import Cluster, JobRequest, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that an engine needs to start a job's workers, now or after a restart."""

    job_id: str
    request: JobRequest
    job_dir: Path
    """The job's own directory: logs, checkpoints, the coordinator's state. Survives all restarts."""
    max_workers: int = 1
    """Most workers it can ever get: what its request says, else what the cluster has."""

    @property
    def workdir(self) -> Path:
        """Where the script runs."""
        return Path(self.request.workdir)


class RunState(StrEnum):
    """What an engine sees of a job."""

    STARTING = "starting"
    """Processes are there; no step has been committed yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Asked to leave; saving its state."""
    STOPPED = "stopped"
    """Left in good order; can be started again from its state."""
    FINISHED = "finished"
    """The script ended with exit code 0."""
    FAILED = "failed"
    """The script ended otherwise; not started again by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job as the engine finds it."""

    job_id: str
    state: RunState
    placement: Placement = ()
    """Slots on which it has workers at this moment, those that start or leave included."""
    target: Placement = ()
    """Slots on which it was last asked to have workers."""
    exit_code: int | None = None
    reason: str = ""
    """For a failed job: why, in a line a person can act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something a job said about itself, as it came over the wire (docs/wire-protocol.md)."""

    job_id: str
    time_s: float
    kind: str
    """'progress', 'timing', 'noise', 'started', 'resized', 'worker_lost' or 'checkpoint'."""
    data: Mapping[str, Any]


class Engine(Protocol):
    """Starts, resizes and ends the workers of jobs. Every call is idempotent and returns quickly."""

    name: str

    def start(self, wake: Callable[[], None]) -> None:
        """Come up and find the jobs that already run; call `wake`, from any thread, when anything changed."""

    def close(self) -> None:
        """Stop watching. Jobs go on."""

    def cluster(self) -> Cluster:
        """The nodes and slots there are now; a node that left is not up."""

    def check(self, launch: Launch) -> None:
        """Refuse (InputError) a job that could never run here; called before it is taken in."""

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots: start, resize, or (none) stop it in good order."""

    def end(self, job_id: str) -> None:
        """End a job for good and clean up its processes. Its directory stays."""

    def observe(self) -> dict[str, Observed]:
        """Every job the engine knows of, as it is now."""

    def reports(self) -> Iterator[Report]:
        """What jobs reported since the last call. Never blocks."""

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's combined log from an offset, and the offset to go on from."""
