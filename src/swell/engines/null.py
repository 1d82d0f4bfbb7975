"""An engine without workers: its jobs take time and slots, and nothing else.

For load tests a job runs for a given number of seconds, whatever its slots. To compare the live platform with
the simulator, a job runs at a speed that depends on its slots, and pauses when they change. A job that was
stopped goes on where it was when it is started again, as a real one does. There are no processes and no
files. With a clock given by the caller there is no thread either: `next_end_s` says when a job ends next.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from swell.domain import Cluster, InputError, Placement
from swell.engines.base import NOTHING_HELD, EngineReport, Held, Launch, Observed, RunState, drain
from swell.engines.parts import Part


class Truth(Protocol):
    """How pretended jobs really run."""

    def work(self, job_id: str) -> float:
        """How much a job has to do."""

    def speed(self, job_id: str, placement: Placement) -> float:
        """Work per second on these slots."""

    def pause_s(self, job_id: str, before: int, after: int) -> float:
        """Seconds without progress when a job goes from `before` to `after` slots."""


Slowed = Callable[[str, Placement], Iterable[str]]
"""Called with a job's new slots, or () once it has ended; returns the jobs whose speed changes with that,
because they share a GPU with it."""


@dataclass(frozen=True, slots=True)
class SameDuration:
    """Every job takes the same time, whatever its slots, and changes cost nothing."""

    duration_s: float

    def work(self, job_id: str) -> float:
        return self.duration_s

    def speed(self, job_id: str, placement: Placement) -> float:
        """One second of work per second."""
        return 1.0

    def pause_s(self, job_id: str, before: int, after: int) -> float:
        """Nothing."""
        return 0.0


@dataclass(slots=True)
class _Run:
    """A job: `left` work as of `since_s`, at `speed` from `paused_until_s` on."""

    left: float
    placement: Placement = ()
    since_s: float = 0.0
    paused_until_s: float = -math.inf
    speed: float = 0.0

    def move(self, placement: Placement, now_s: float, speed: float, pause_s: float) -> None:
        if self.placement and now_s > self.since_s:
            self.left -= self.speed * max(now_s - max(self.since_s, self.paused_until_s), 0.0)
        self.since_s, self.placement, self.speed = now_s, placement, speed
        self.paused_until_s = max(self.paused_until_s, now_s + pause_s)

    @property
    def ends_s(self) -> float:
        if not self.placement or self.speed <= 0:
            return math.inf
        return max(self.since_s, self.paused_until_s) + self.left / self.speed

    def state(self, now_s: float) -> RunState:
        if not self.placement:
            return RunState.STOPPED
        return RunState.FINISHED if now_s >= self.ends_s else RunState.RUNNING


class NullEngine:
    """Pretends to run jobs on a cluster."""

    name = "null"

    def __init__(
        self,
        cluster: Cluster,
        *,
        duration_s: float = 1.0,
        tick_s: float = 0.02,
        truth: Truth | None = None,
        slowed: Slowed | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """With `clock` the caller decides how time passes, and `wake` is never called."""
        if duration_s < 0:
            raise InputError(f"duration_s must be at least 0, got {duration_s!r}", field="duration_s")
        self._truth: Truth = truth or SameDuration(duration_s)
        self._slowed = slowed
        self._tick_s = tick_s
        self._clock = clock or time.time
        self._watches = clock is None
        self._cluster = cluster
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._reports: deque[EngineReport] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.most_used = 0
        """Most slots that were ever in use at once."""

    def start(self, wake: Callable[[], None], held: Held = NOTHING_HELD) -> None:
        """Begin to call `wake` when jobs end."""
        if self._watches:
            self._closing.clear()
            self._thread = threading.Thread(target=self._watch, args=(wake,), name="null-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop calling `wake`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def cluster(self) -> Cluster:
        """The given cluster, with nodes up or down as `set_node` left them."""
        return self._cluster

    def set_node(self, name: str, *, up: bool) -> None:
        """Pretend that a node left or came back."""
        nodes = tuple(replace(n, up=up) if n.name == name else n for n in self._cluster.nodes)
        self._cluster = Cluster(nodes)

    def say(self, job_id: str, kind: str, data: Mapping[str, Any]) -> None:
        """Pretend that a job reported something."""
        self._reports.append(EngineReport(job_id=job_id, time_s=self._clock(), kind=kind, data=data))

    def check(self, launch: Launch) -> None:
        """Refuse nothing: this engine can pretend to run any job."""

    def apply(self, launch: Launch, placement: Placement) -> None:
        """Start, resize or stop a job."""
        now_s, job_id = self._clock(), launch.job_id
        with self._lock:
            run = self._runs.get(job_id)
            if run is None:
                if not placement:
                    return
                run = self._runs[job_id] = _Run(self._truth.work(job_id))
            before = run.placement
            if placement == before:
                return
            self._tell_neighbours(job_id, placement, now_s)
            speed = self._truth.speed(job_id, placement) if placement else 0.0
            pause_s = self._truth.pause_s(job_id, len(before), len(placement)) if placement else 0.0
            run.move(placement, now_s, speed, pause_s)
            if placement:
                kind = "resized" if before else "started"
                change = {"gpus": placement, "pause_s": pause_s, "until_s": run.paused_until_s}
                self._reports.append(EngineReport(job_id=job_id, time_s=now_s, kind=kind, data=change))
            if not before and isinstance(self._truth, SameDuration):
                progress = {"done": 0.0, "of": 100.0, "batch_size": 1}
                self._reports.append(
                    EngineReport(job_id=job_id, time_s=now_s, kind="progress", data=progress)
                )
            self.most_used = max(self.most_used, sum(len(one.placement) for one in self._runs.values()))

    def reserve(self, slots: frozenset[int]) -> None:
        """Jobs leave slots at once here, so it does not matter who wants them."""

    def end(self, job_id: str) -> None:
        with self._lock:
            if self._runs.pop(job_id, None) is not None:
                self._tell_neighbours(job_id, (), self._clock())

    def _tell_neighbours(self, job_id: str, placement: Placement, now_s: float) -> None:
        """Let the jobs on the same GPUs go on at the speed that they have from now on."""
        for other in () if self._slowed is None else self._slowed(job_id, placement):
            run = self._runs.get(other)
            if run is not None and other != job_id:
                run.move(run.placement, now_s, self._truth.speed(other, run.placement), 0.0)

    def observe(self) -> dict[str, Observed]:
        """Every job that was started and not ended."""
        now_s = self._clock()
        with self._lock:
            return {
                job_id: Observed(
                    job_id=job_id, state=run.state(now_s), placement=run.placement, target=run.placement
                )
                for job_id, run in self._runs.items()
            }

    def parts(self) -> list[Part]:
        """None: its thread only ends jobs that pretend to run."""
        return []

    def reports(self) -> Iterator[EngineReport]:
        """What jobs reported since the last call."""
        return drain(self._reports)

    def logs(self, job_id: str, job_dir: Path, *, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        part = f"{job_id} pretends to train\n".encode()[offset : offset + limit]
        return part, offset + len(part)

    def story(self, job_id: str, job_dir: Path) -> list[str]:
        return []

    def left(self) -> dict[str, float]:
        """By job that trains: how much work it has left now."""
        now_s = self._clock()
        with self._lock:
            return {
                job_id: run.left - run.speed * (now_s - max(run.since_s, run.paused_until_s))
                for job_id, run in self._runs.items()
                if run.placement and run.paused_until_s <= now_s
            }

    def next_step_s(self) -> float:
        """When the next job that is paused goes on; infinite if none is."""
        now_s = self._clock()
        with self._lock:
            coming = (run.paused_until_s for run in self._runs.values() if run.placement)
            return min((at_s for at_s in coming if at_s > now_s), default=math.inf)

    def next_end_s(self) -> float:
        """When the next job ends if nothing changes; infinite if none will."""
        with self._lock:
            return min((run.ends_s for run in self._runs.values()), default=math.inf)

    def _watch(self, wake: Callable[[], None]) -> None:
        while not self._closing.wait(self._tick_s):
            if self._reports or self.next_end_s() <= self._clock():
                wake()
