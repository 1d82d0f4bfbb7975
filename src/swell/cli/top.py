"""`swell top`: the cluster, live."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from swell.cli._common import (
    DURATION,
    active_jobs,
    add_row,
    bar,
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    role_for,
    say_duration,
    say_moment,
)

if TYPE_CHECKING:
    from rich.console import Console, Group

    from swell.api.client import Client
    from swell.api.schemas import JobView, NodeView


MORE = "For lanes, curves and keys: pip install 'swell[top]'"


@click.command(epilog="\b\nExample:\n  swell top --once\n")
@click.option("--once", is_flag=True, help="Show the cluster once and return, for scripts.")
@click.option("--plain", is_flag=True, help="Only tables that are printed again and again, without keys.")
@click.option(
    "--every",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Time between updates of plain tables, at least 0.2s.",
)
@json_option
@home_option
def top(once: bool, plain: bool, every: float, as_json: bool, home: str | None) -> None:
    """Watch lanes, queue and nodes live; Enter shows a job's curves, ? the keys, q ends it.

    Shows the jobs of all users if the administrator's token can be read, else your own. Without textual, or
    where the output is no terminal, plain tables are shown instead, until Ctrl-C.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if once or as_json:
        _once(home, as_json, console)
    elif not plain and console.is_terminal and find_spec("textual") is not None:
        _screen(home)
    else:
        _tables(home, every, console, hint=console.is_terminal and not plain)


def _screen(home: str | None) -> None:
    import asyncio

    from swell.api.client import AsyncClient
    from swell.cli._top import watch

    async def show() -> None:
        # Lost connections are the screen's own business: it says so and tries again.
        async with AsyncClient(home=home, role=role_for(home, prefer_admin=True), retry_s=0.0) as client:
            await watch(client)

    asyncio.run(show())


def _once(home: str | None, as_json: bool, console: Console) -> None:

    with connect(home, prefer_admin=True) as client:
        watcher = Watcher(client)
        watcher.look()
        time.sleep(1.0)  # the speed is computed from two looks
        view = watcher.look()
    if as_json:
        print_json(view.to_json())
        return
    console.width = max(console.width, 140) if not console.is_terminal else console.width
    console.print(draw(view))


def _tables(home: str | None, every: float, console: Console, *, hint: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def drawn(view: View) -> Group:
        return Group(draw(view), Text(MORE, "dim")) if hint else draw(view)

    with connect(home, prefer_admin=True) as client:
        watcher = Watcher(client)
        screen = Live(drawn(watcher.look()), console=console, screen=console.is_terminal, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), screen as live:
            while True:
                time.sleep(max(every, 0.2))
                live.update(drawn(watcher.look()), refresh=True)


# The cluster at a glance: nodes with their slots, jobs with their workers and their speed.


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
