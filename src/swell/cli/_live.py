"""What the live screen knows of a cluster: read once over the API, then kept up to date by the event stream.

Progress comes with the events. A job with any other event is read again, all such jobs of one second
together; so are the nodes. After a lost connection the stream goes on from the last number that was seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swell.api.refusals import Forbidden, NotAuthenticated, Unreachable
from swell.cli._common import say_duration, say_moment
from swell.control.errors import NotFound
from swell.domain import SwellError
from swell.report.lanes import Lane

if TYPE_CHECKING:
    from swell.api.client import AsyncClient
    from swell.api.schemas import EventView, JobView, NodeView


HISTORY_S = 6 * 3600.0
PAST_EVENTS = 500
"""Events before now that are read too: the speed of jobs is known at once, and what happened is shown."""
ENDED_JOBS = 50
_POINTS = 6
_REFRESH_S = 1.0
_SLOW_S = 15.0
_ENDS = {"finished": "finished", "failed": "failed", "cancelled": "cancelled", "rejected": "refused"}
_CHANGES = ("allocated", "resized", "preempted")


@dataclass(slots=True)
class LiveCluster:
    """The cluster as far as it is known now."""

    policy: str = ""
    nodes: list[NodeView] = field(default_factory=list)
    jobs: dict[str, JobView] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    capacity: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    recent: deque[EventView] = field(default_factory=lambda: deque(maxlen=PAST_EVENTS))
    """The last events that are not progress."""
    connected: bool = False
    seen: int = 0
    """Number of the last event that was taken in."""
    stale: set[str] = field(default_factory=set)
    """Jobs to read again."""
    events: Counter[str] = field(default_factory=Counter)
    """How many events of each job have been taken in."""
    _read_at: int = 0
    """Number of the event up to which jobs and lanes were read; older events change neither."""
    _points: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        return sum(node.gpus - node.held for node in self.nodes if node.up)

    @property
    def used(self) -> int:
        """Slots in use."""
        return sum(node.used for node in self.nodes)

    def begins_at(self, seq: int) -> None:
        """Jobs and lanes have been read as of event `seq`: the stream begins a little earlier."""
        self._read_at = seq
        self.seen = max(seq - PAST_EVENTS, 0)

    def apply(self, event: EventView) -> None:
        """Take in one event. One from before the reading only tells speeds and what happened."""
        self.seen = max(self.seen, event.seq)
        past = event.seq <= self._read_at
        if event.kind != "progress":
            self.recent.append(event)
        if event.job_id is not None:
            self.events[event.job_id] += 1
            self._speed(event.job_id, event)
            if not past:
                self._change(event.job_id, event)
        elif event.node is not None and event.kind != "node_slow" and not past:
            up = event.kind == "node_joined"
            self.marks.append((event.time_s, event.kind, event.node))
            self.nodes = [
                node.model_copy(update={"up": up}) if node.name == event.node else node for node in self.nodes
            ]
            self.capacity.append((event.time_s, sum(node.gpus for node in self.nodes if node.up)))

    def _speed(self, job_id: str, event: EventView) -> None:
        if event.kind == "progress":
            points = self._points.setdefault(job_id, deque(maxlen=_POINTS))
            points.append((event.time_s, float(event.data.get("done") or 0.0)))
        elif event.kind in _CHANGES or event.kind in _ENDS:
            self._points.pop(job_id, None)

    def _change(self, job_id: str, event: EventView) -> None:
        job, data = self.jobs.get(job_id), event.data
        if event.kind == "progress":
            if job is not None:
                known = {name: data[name] for name in ("done", "of", "batch_size") if data.get(name)}
                self.jobs[job_id] = job.model_copy(update=known)
            return
        self.stale.add(job_id)
        if event.kind == "worker_lost":
            self.marks.append((event.time_s, event.kind, job_id))
        if event.kind in _CHANGES:
            name = job.name if job is not None else job_id
            lane = self.lanes.setdefault(job_id, Lane(job_id, name))
            lane.changes.append((event.time_s, len(data.get("gpus") or ())))
        elif event.kind in _ENDS and job_id in self.lanes:
            self.lanes[job_id].changes.append((event.time_s, 0))
            self.lanes[job_id].ended_s = event.time_s

    def forget(self, before_s: float) -> None:
        """Drop what ended before a moment: the screen may be open for weeks."""
        self.lanes = {key: lane for key, lane in self.lanes.items() if (lane.ended_s or before_s) >= before_s}
        old = [key for key, job in self.jobs.items() if job.over and (job.ended_s or 0.0) < before_s]
        for job_id in old[ENDED_JOBS:]:
            del self.jobs[job_id]
        self.marks = [mark for mark in self.marks if mark[0] >= before_s]
        while len(self.capacity) > 1 and self.capacity[1][0] < before_s:
            self.capacity.pop(0)

    def rate(self, job: JobView) -> float | None:
        """Iterations per second from the last reports on the present slots; None if unknown."""
        points = self._points.get(job.job_id)
        if not points or len(points) < 2 or job.phase.value != "running":
            return None
        (began_s, before), (ended_s, after) = points[0], points[-1]
        return max(after - before, 0.0) / (ended_s - began_s) if ended_s > began_s else None

    def predicted_s(self, job: JobView, now_s: float) -> float | None:
        """When the job will be done, by the server's estimate or at its present speed; None if unknown."""
        finish_s = job.promise.estimate.finish_s
        if finish_s is not None and finish_s > now_s:
            return finish_s
        rate = self.rate(job)
        return (
            now_s + (job.of - job.done) / rate if rate and job.of is not None and job.of > job.done else None
        )

    def outlook(self, job: JobView, now_s: float) -> tuple[str, str]:
        """Promise against prediction in words, and whether that is 'good', 'bad' or neither ('')."""
        promise, deadline_s = job.promise, job.promise.guaranteed_s or job.request.deadline_s
        if job.phase.value == "refused":
            earliest_s = promise.earliest_deadline_s
            return ("refused" if earliest_s is None else f"would need until {say_moment(earliest_s)}"), "bad"
        if job.ended_s is not None:
            if deadline_s is None or job.phase.value != "finished":
                return f"{say_duration(now_s - job.ended_s)} ago", ""
            early_s = deadline_s - job.ended_s
            said = (
                f"kept, {say_duration(early_s)} early" if early_s >= 0 else f"{say_duration(-early_s)} late"
            )
            return said, "good" if early_s >= 0 else "bad"
        if promise.pending:
            return "being profiled", ""
        finish_s = self.predicted_s(job, now_s)
        if deadline_s is None:
            return ("no estimate yet" if finish_s is None else f"about {say_moment(finish_s)}"), ""
        word = "promised" if promise.guaranteed_s is not None else "deadline"
        if finish_s is None:
            return f"{word} {say_moment(deadline_s)}", ""
        spare_s = deadline_s - finish_s
        if spare_s >= 0:
            return f"{word} {say_moment(deadline_s)}, {say_duration(spare_s)} to spare", "good"
        return f"{word} {say_moment(deadline_s)}, {say_duration(-spare_s)} late at this speed", "bad"

    def why(self, job: JobView) -> str:
        """Why the job waits, runs as it does or has failed: one line."""
        if job.phase.value == "queued" and not job.reason:
            return f"{self.used} of {self.slots} slots are in use, as policy '{self.policy}' decides"
        return (job.reason.strip().splitlines() or [""])[-1]

    def ordered(self, *, ended: bool = True, text: str = "") -> list[JobView]:
        """Jobs as the queue shows them: running, queued, paused, then those that ended, newest first."""
        rank = {"running": 0, "queued": 1, "paused": 2}
        text = text.lower()
        found = [
            job
            for job in self.jobs.values()
            if (ended or not job.over) and text in f"{job.name} {job.owner} {job.job_id}".lower()
        ]
        return sorted(
            found,
            key=lambda job: (
                rank.get(job.phase.value, 3),
                -(job.ended_s or 0.0) if job.over else job.submitted_s,
            ),
        )


class Feed:
    """Reads a cluster over the API, and follows it."""

    def __init__(self, client: AsyncClient, live: LiveCluster) -> None:
        self.client = client
        self.live = live
        self._slow_at_s = 0.0

    async def read(self) -> None:
        """Read everything once."""
        live, client = self.live, self.client
        lanes = await client.lanes(since_s=time.time() - HISTORY_S)
        live.begins_at(lanes.last_seq)
        live.lanes = {
            job_id: Lane(job_id, lane.name, changes=list(lane.changes), ended_s=lane.ended_s)
            for job_id, lane in lanes.jobs.items()
        }
        live.capacity, live.marks = list(lanes.capacity), list(lanes.marks)
        live.nodes, live.policy = await client.nodes(), await client.policy()
        await self._read_active()
        for job in await client.jobs(limit=ENDED_JOBS):
            live.jobs.setdefault(job.job_id, job)
        live.connected = True

    async def follow(self, changed: Callable[[], None]) -> None:
        """Take in events for ever; `changed` is called after each and when the connection comes or goes."""
        wait_s = 0.25
        while True:
            try:
                async for event in self.client.events(since=self.live.seen):
                    wait_s = 0.25
                    self.live.connected = True
                    self.live.apply(event)
                    changed()
            except (Forbidden, NotAuthenticated):
                raise
            except SwellError:
                self.live.connected = False
                changed()
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, 8.0)

    async def keep_fresh(self, changed: Callable[[], None]) -> None:
        """Read again what events have changed, once a second at most, and the nodes now and then."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                if await self.refresh():
                    self.live.connected = True
                    changed()
            except Unreachable:
                self.live.connected = False
                changed()
            except SwellError:
                continue  # the next turn tries again

    async def refresh(self) -> bool:
        """Read again what is stale; False if nothing was."""
        live, slow = self.live, time.monotonic() >= self._slow_at_s
        if not live.stale and not slow and live.connected:
            return False
        ids, live.stale = live.stale, set()
        try:
            live.nodes = await self.client.nodes()
            if slow:
                live.policy = await self.client.policy()
                self._slow_at_s = time.monotonic() + _SLOW_S
                live.forget(time.time() - HISTORY_S)
            if len(ids) > 8:
                ids -= await self._read_active()
            for job_id in list(ids):
                try:
                    live.jobs[job_id] = await self.client.job(job_id)
                except NotFound:
                    live.jobs.pop(job_id, None)
                ids.discard(job_id)
        finally:
            live.stale |= ids
        return True

    async def _read_active(self) -> set[str]:
        active = [
            job for phase in ("running", "queued", "paused") for job in await self.client.jobs(phase=phase)
        ]
        self.live.jobs.update({job.job_id: job for job in active})
        return {job.job_id for job in active}
