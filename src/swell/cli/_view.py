"""The cluster at a glance: nodes with their slots, jobs with their workers and their speed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swell.cli._common import active_jobs, bar, new_table
from swell.cli._terminal import add_row
from swell.cli._when import say_duration, say_moment

if TYPE_CHECKING:
    from rich.console import Group

    from swell.api.client import Client
    from swell.api.schemas import JobView, NodeView

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_RATE_OVER_S = 5.0
_RECENT_S = 600.0
_MOST_ENDED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The cluster at one moment."""

    now_s: float
    policy: str
    nodes: list[NodeView]
    jobs: list[JobView]
    """Active jobs, then jobs that ended a short while ago."""
    rates: dict[str, float]
    """Committed steps per second, by job."""

    @property
    def slots(self) -> int:
        """Slots in service."""
        return sum(node.gpus - node.held for node in self.nodes if node.up)

    @property
    def used(self) -> int:
        """Slots in use."""
        return sum(node.used for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """The view as plain values."""
        return {
            "time_s": self.now_s,
            "policy": self.policy,
            "slots": self.slots,
            "used": self.used,
            "nodes": [node.model_dump(mode="json") for node in self.nodes],
            "jobs": [
                job.model_dump(mode="json") | {"steps_per_s": self.rates.get(job.job_id)} for job in self.jobs
            ],
        }


@dataclass(slots=True)
class Watcher:
    """Looks at the cluster repeatedly, and computes the speed of jobs from what it saw before."""

    client: Client
    _seen: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def look(self) -> View:
        """The cluster as it is now."""
        now_s = time.time()
        active = active_jobs(self.client)
        ended = [
            job
            for job in self.client.jobs(limit=_MOST_ENDED)
            if job.over and now_s - (job.ended_s or 0.0) < _RECENT_S
        ]
        return View(
            now_s=now_s,
            policy=self.client.policy(),
            nodes=self.client.nodes(),
            jobs=sorted(active, key=lambda job: job.submitted_s) + ended,
            rates={job.job_id: rate for job in active if (rate := self._rate(job, now_s)) is not None},
        )

    def _rate(self, job: JobView, now_s: float) -> float | None:
        seen = self._seen.setdefault(job.job_id, deque())
        seen.append((now_s, job.done))
        while len(seen) > 2 and now_s - seen[0][0] > _RATE_OVER_S:
            seen.popleft()
        (began_s, done), passed_s = seen[0], now_s - seen[0][0]
        return max(job.done - done, 0.0) / passed_s if passed_s > 0 and began_s < now_s else None


def draw(view: View) -> Group:
    """The view for a terminal."""
    from rich.console import Group
    from rich.text import Text

    colours = {
        job.job_id: _COLOURS[i % len(_COLOURS)]
        for i, job in enumerate(sorted(view.jobs, key=lambda job: job.submitted_s))
    }
    running = [job for job in view.jobs if job.phase.value == "running"]
    waiting = sum(job.phase.value == "queued" for job in view.jobs)
    head = Text.assemble(
        ("swell ", "bold"),
        f"{time.strftime('%H:%M:%S', time.localtime(view.now_s))}   policy {view.policy}   ",
        (f"{view.used} of {view.slots} slots in use", "bold"),
        f"   {len(running)} running, {waiting} waiting   "
        f"{sum(view.rates.get(job.job_id, 0.0) for job in running):.1f} steps/s",
    )
    nodes = new_table(["node", "slots", "state"])
    holder = {slot: job.job_id for job in view.jobs for slot in job.wanted}
    first = 0
    for node in view.nodes:
        cells = Text()
        for slot in range(first, first + node.gpus):
            cells.append("■ " if slot in holder else "· ", colours.get(holder.get(slot, ""), "dim"))
        first += node.gpus
        state = "draining" if node.draining else "up" if node.up else "down"
        add_row(nodes, node.name, cells, f"{state}, {node.held} held by others" if node.held else state)
    jobs = new_table(
        ["job", "phase", "workers", "progress", "steps/s", "finish", "resizes", "pause each"],
        right=["steps/s", "resizes", "pause each"],
    )
    for job in view.jobs:
        rate = view.rates.get(job.job_id)
        add_row(
            jobs,
            Text(job.job_id, colours[job.job_id]),
            job.phase.value,
            Text("█" * len(job.wanted) + f" {len(job.wanted)}", colours[job.job_id]),
            bar(job.done, job.of),
            "-" if rate is None or not job.wanted else f"{rate:.1f}",
            _finish(job, view.now_s),
            str(job.resizes),
            say_duration(job.pause_s / job.resizes) if job.resizes else "-",
        )
    empty = Text("No jobs yet: swell submit train.py", "dim")
    return Group(head, nodes, jobs if view.jobs else empty)


def _finish(job: JobView, now_s: float) -> str:
    if job.ended_s is not None:
        return f"{say_duration(now_s - job.ended_s)} ago"
    if job.promise.guaranteed_s is not None:
        return f"by {say_moment(job.promise.guaranteed_s)}"
    if job.promise.estimate.finish_s is not None:
        return f"~{say_moment(job.promise.estimate.finish_s)}"
    return "-"
