"""The interface of an engine, which has the workers of jobs run: as processes of this machine, or on Ray.

The control plane says what should run (`apply`) and asks what does run (`observe`). An engine keeps no state
that matters in memory: all it needs to find its jobs again after the control plane was killed is on disk or
in the cluster. Jobs go on while no control plane runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from swell.domain import Cluster, JobRequest, Placement
from swell.engines.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that an engine needs to start a job's workers, now or after a restart."""

    job_id: str
    request: JobRequest
    job_dir: Path
    """The job's own directory: logs, checkpoints, the coordinator's state. Survives all restarts."""
    max_workers: int = 1
    """Most workers that the job can ever get: what its request says, else all slots of the cluster."""
    owner: str = ""
    """The user who submitted the job."""

    @property
    def workdir(self) -> Path:
        """Where the script runs."""
        return Path(self.request.workdir)


class RunState(StrEnum):
    """What an engine sees of a job."""

    STARTING = "starting"
    """The job has processes, but has committed no step yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The job was asked to stop, and is saving its state."""
    STOPPED = "stopped"
    """The job saved its state and stopped; it can be started again."""
    FINISHED = "finished"
    """The script ended with exit code 0."""
    FAILED = "failed"
    """The script ended with another exit code; the engine does not start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job as the engine finds it."""

    job_id: str
    state: RunState
    placement: Placement = ()
    """Slots that have workers of the job at this moment, workers that start or leave included."""
    target: Placement = ()
    """Slots on which `apply` last asked for workers."""
    exit_code: int | None = None
    reason: str = ""
    """For a failed job: why, in a line a person can act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Something that a job reported about itself, as it came in (docs/reference/wire-protocol.md)."""

    job_id: str
    time_s: float
    kind: str
    """'progress', 'timing', 'noise', 'started', 'resized', 'worker_lost', 'noticed', 'slow' (the worker on
    a slot is slower than the job's others), 'unstartable' (no worker could be started on a slot),
    'confined' or 'checkpoint'."""
    data: Mapping[str, Any]


def drain(reports: deque[EngineReport]) -> Iterator[EngineReport]:
    """Take reports off one by one, each only when the next is asked for.

    So a report that its reader could not note (the disk was full, say) is there again the next time.
    """
    while reports:
        report = reports[0]
        yield report
        if reports and reports[0] is report:  # a full queue drops its oldest
            reports.popleft()


Held = Mapping[str, Placement]
"""By job: slots."""
NOTHING_HELD: Held = MappingProxyType({})


class Engine(Protocol):
    """Starts, resizes and ends the workers of jobs. Every call is idempotent and returns quickly."""

    name: str

    def start(self, wake: Callable[[], None], held: Held = NOTHING_HELD) -> None:
        """Find the jobs that already run; from then on call `wake`, from any thread, on every change.

        `held`: the slots of jobs that ran before, as the event log shows them.
        """

    def close(self) -> None:
        """Stop watching. Jobs go on."""

    def cluster(self) -> Cluster:
        """The present nodes and slots; a lost node is still listed, and is not up."""

    def check(self, launch: Launch) -> None:
        """Raise InputError for a job that could never run here; called before a job is accepted."""

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Have the job's workers on exactly these slots: start it, resize it, or, without slots, stop it."""

    def reserve(self, slots: frozenset[int]) -> None:
        """Note which slots services hold. A job all of whose workers are on them has to leave within a bound:
        if it cannot move to its other slots in time, it saves its state and is started there."""

    def end(self, job_id: str) -> None:
        """End a job for good and clean up its processes. Its directory stays."""

    def observe(self) -> dict[str, Observed]:
        """Every job the engine knows of, as it is now."""

    def parts(self) -> Sequence[Part]:
        """The engine's threads, watched in case one of them ends."""

    def reports(self) -> Iterator[EngineReport]:
        """What jobs reported since the last call. Never blocks. See `drain` for a reader that fails."""

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """The job's combined log from an offset, and the offset to go on from."""

    def story(self, job_id: str, job_dir: Path) -> list[str]:
        """The last transitions of the job's state machines, a line for each; may wait for a second."""
