"""An engine for load tests only: its jobs take time and slots, and nothing else.

No processes and no disk: a job 'runs' for a given number of seconds, whatever its workers, and ends. Stopped
and started again it goes on where it was, as a real one does. One thread tells the control plane when the
next one has ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swell.domain import Cluster, InputError, Placement
from swell.engines.base import Launch, Observed, Report, RunState


@dataclass(slots=True)
class _Run:
    placement: Placement
    left_s: float
    since_s: float


class NullEngine:
    """Pretends to run jobs on a cluster."""

    name = "null"

    def __init__(
        self,
        cluster: Cluster,
        *,
        duration_s: float = 1.0,
        tick_s: float = 0.02,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if duration_s < 0:
            raise InputError(f"duration_s must be at least 0, got {duration_s!r}", field="duration_s")
        self.duration_s = duration_s
        self._tick_s = tick_s
        self._clock = clock
        self._cluster = cluster
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._reports: deque[Report] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.most_used = 0
        """Most slots that were ever in use at once."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to tell when jobs end."""
        self._closing.clear()
        self._thread = threading.Thread(target=self._watch, args=(wake,), name="null-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop telling."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def cluster(self) -> Cluster:
        """The cluster that it was given, with the nodes that were set down."""
        return self._cluster

    def set_node(self, name: str, *, up: bool) -> None:
        """Pretend that a node left or came back."""
        nodes = tuple(replace(n, up=up) if n.name == name else n for n in self._cluster.nodes)
        self._cluster = Cluster(nodes)

    def check(self, launch: Launch) -> None:
        """Anything can be pretended to run."""

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Start, resize or stop a job."""
        now_s = self._clock()
        with self._lock:
            run = self._runs.get(launch.job_id)
            if run is None:
                if not placement:
                    return
                run = self._runs[launch.job_id] = _Run((), self.duration_s, now_s)
                report = Report(
                    job_id=launch.job_id,
                    time_s=now_s,
                    kind="progress",
                    data={"done": 0.0, "of": 100.0, "batch_size": 1},
                )
                self._reports.append(report)
            if run.placement:
                run.left_s -= now_s - run.since_s
            run.placement, run.since_s = placement, now_s
            self.most_used = max(self.most_used, sum(len(one.placement) for one in self._runs.values()))

    def end(self, job_id: str) -> None:
        """Forget a job."""
        with self._lock:
            self._runs.pop(job_id, None)

    def observe(self) -> dict[str, Observed]:
        """Every job that is not forgotten."""
        now_s = self._clock()
        with self._lock:
            return {
                job_id: Observed(job_id=job_id, state=_state(run, now_s), placement=run.placement)
                for job_id, run in self._runs.items()
            }

    def reports(self) -> Iterator[Report]:
        """A first word of each job."""
        while self._reports:
            yield self._reports.popleft()

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """One line."""
        part = f"{job_id} pretends to train\n".encode()[offset : offset + limit]
        return part, offset + len(part)

    def _watch(self, wake: Callable[[], None]) -> None:
        while not self._closing.wait(self._tick_s):
            now_s = self._clock()
            with self._lock:
                ended = any(_state(run, now_s) is RunState.FINISHED for run in self._runs.values())
            if ended:
                wake()


def _state(run: _Run, now_s: float) -> RunState:
    if not run.placement:
        return RunState.STOPPED
    return RunState.FINISHED if now_s - run.since_s >= run.left_s else RunState.RUNNING
