"""A job's page on the live screen: facts, curves on one time axis, resizes with their pauses, output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Footer, RichLog, Static

from swell.cli._common import bar, one_line
from swell.cli._events import line as event_line
from swell.cli._terminal import clean
from swell.cli._top import draw
from swell.cli._when import say_duration, say_moment
from swell.domain import SwellError

if TYPE_CHECKING:
    from swell.api.client import AsyncClient
    from swell.api.schemas import JobView, SeriesView
    from swell.cli._top.live import LiveCluster

Points = list[tuple[float, float]]
PLOT = 6
_EVERY_S = 1.0
_NAMED = (
    ("Loss", "loss", False),
    ("Batch size", "batch_size", True),
    ("Learning rate", "lr", False),
    ("Statistical efficiency", "efficiency", False),
    ("Gradient noise scale", "noise_scale", False),
)


def curves(series: SeriesView, until_s: float) -> list[tuple[str, Points, bool]]:
    """The curves of a job that have something to show: title, points, and whether it goes in steps."""
    changes = [one for one in series.changes if one["kind"] in ("allocated", "resized", "preempted")]
    gpus = [(float(one["time_s"]), float(len(one.get("gpus") or ()))) for one in changes]
    if gpus:
        gpus.append((until_s, gpus[-1][1]))
    columns = {name: series.curves.get(key) for name, key, _ in _NAMED}
    stepped = {name: steps for name, _, steps in _NAMED}
    found: list[tuple[str, Points, bool]] = [
        ("GPUs", gpus, True),
        ("Loss", _points(series, columns["Loss"]), False),
    ]
    found += [(clean(name), _points(series, column), False) for name, column in series.metrics.items()][:4]
    found.append(("Goodput (it/s)", _speeds(_points(series, series.curves.get("done"))), False))
    found += [(name, _points(series, columns[name]), stepped[name]) for name, _, _ in _NAMED[1:]]
    return [one for one in found if one[1]]


def _points(series: SeriesView, column: Any) -> Points:
    return [(t, float(v)) for t, v in zip(series.time_s, column or ()) if v is not None]


def _speeds(done: Points, over: int = 3) -> Points:
    """Progress per second, each over a few reports."""
    pairs = [(done[max(i - over, 0)], done[i]) for i in range(1, len(done))]
    return [(b[0], max(b[1] - a[1], 0.0) / (b[0] - a[0])) for a, b in pairs if b[0] > a[0]]


def _by_workers(told: dict[str, Any]) -> str:
    """The fitted speed at some numbers of workers, and what was measured."""
    curve = told.get("curve") or []
    model = [f"{draw.number(rate)} on {n}" for n, rate in enumerate(curve) if n and n & (n - 1) == 0]
    measured = [f"{draw.number(one['rate'])} on {one['workers']}" for one in told.get("measured") or ()]
    parts = [("model", model), ("measured", measured)]
    return "; ".join(f"{name} {', '.join(points)}" for name, points in parts if points)


class JobScreen(Screen[None]):
    """One job, live."""

    CSS = """
    #facts { height: auto; padding: 0 1; background: $panel; }
    #curves { grid-size: 3; grid-rows: 8; height: auto; padding: 0 1; }
    #curves.narrow { grid-size: 1; }
    #below { height: 16; }
    #changes { width: 1fr; padding: 0 1; }
    #output { width: 1fr; border-left: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("p", "pause", "Pause or resume"),
        Binding("c", "cancel", "Cancel"),
    ]

    def __init__(self, client: AsyncClient, live: LiveCluster, job_id: str) -> None:
        super().__init__()
        self._client, self._live, self._job_id = client, live, job_id
        self._drawn = -1
        self._plots: list[Static] = []

    def compose(self) -> ComposeResult:
        yield Static(id="facts", markup=False)
        with VerticalScroll():
            yield Grid(id="curves")
            with Horizontal(id="below"):
                yield Static(id="changes", markup=False)
                yield RichLog(id="output", max_lines=2000, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Grid).set_class(self.app.size.width < 110, "narrow")
        self.set_interval(_EVERY_S, self._read_if_changed)
        self.run_worker(self._follow_output())
        self.run_worker(self._read_if_changed())

    @property
    def job(self) -> JobView | None:
        """The job, if it is still known."""
        return self._live.jobs.get(self._job_id)

    async def _read_if_changed(self) -> None:
        """Read curves and reasons again if there was an event of this job, else move the clock on."""
        if (job := self.job) is None:
            return
        seen = self._live.events[self._job_id]
        if seen == self._drawn:
            return
        try:
            series, told = await self._client.series(job), await self._client.explain(job)
        except SwellError as error:
            self.query_one("#facts", Static).update(Text(clean(str(error)), "red"))
            return
        self._drawn = seen
        self._draw_facts(job, told)
        await self._draw_curves(job, series)
        self._draw_changes(series)

    def _draw_facts(self, job: JobView, told: dict[str, Any]) -> None:
        said, look = self._live.outlook(job, time.time())
        rate = self._live.rate(job)
        most = "any" if job.request.max_workers is None else str(job.request.max_workers)
        words = clean(" ".join([job.request.script, *job.request.args]))
        each = f", {say_duration(job.pause_s / job.resizes)} each" if job.resizes else ""
        text = Text.assemble(
            (clean(job.name), "bold"),
            f"  {job.phase.value}   {clean(job.owner)}   {words}\n",
            f"{len(job.wanted)} GPUs ({job.request.min_workers} to {most})   {bar(job.done, job.of)}   ",
            "" if rate is None else f"{draw.number(rate)} it/s   ",
            (said, {"good": "green", "bad": "red"}.get(look, "")),
            f"   {job.resizes} resizes{each}\n",
            ("" if told.get("why") == job.phase.value else clean(one_line(str(told.get("why")), 200)), "dim"),
        )
        if speeds := _by_workers(told):
            text.append(f"\niterations a second: {speeds}", "dim")
        self.query_one("#facts", Static).update(text)

    async def _draw_curves(self, job: JobView, series: SeriesView) -> None:
        until_s = job.ended_s or time.time()
        found = curves(series, until_s)
        grid = self.query_one(Grid)
        while len(self._plots) < len(found):
            self._plots.append(Static())
            await grid.mount(self._plots[-1])
        across = 1 if grid.has_class("narrow") else 3
        columns = max((self.app.size.width - 4) // across - 12, 20)
        window = draw.Window(job.started_s or job.submitted_s, until_s, columns)
        marks = [
            one["time_s"] for one in series.changes if one["kind"] in ("resized", "preempted", "worker_lost")
        ]
        for index, (title, points, stepped) in enumerate(found):
            colour = draw.COLOURS[index % len(draw.COLOURS)]
            zero = title not in ("Loss",)
            lines = draw.plot(points, window, PLOT, stepped=stepped, zero=zero, marks=marks, colour=colour)
            head = Text.assemble((title, "bold"), (f"  {draw.number(points[-1][1])}", "dim"))
            self._plots[index].update(Text("\n").join([head, *lines]))

    def _draw_changes(self, series: SeriesView) -> None:
        lines = [Text("What happened to it", "bold")]
        for one in reversed(series.changes[-14:]):
            data = {key: value for key, value in one.items() if key not in ("time_s", "kind")}
            lines.append(Text(event_line(one["time_s"], one["kind"], "", data).replace(" " * 25, " ")))
        if len(lines) == 1:
            lines.append(Text("nothing yet", "dim"))
        self.query_one("#changes", Static).update(Text("\n").join(lines))

    async def _follow_output(self) -> None:
        log, rest = self.query_one(RichLog), ""
        try:
            async for text in self._client.logs(self._job_id, follow=True):
                *lines, rest = (rest + text).split("\n")
                for line in lines[-2000:]:
                    log.write(Text(clean(line.rstrip("\r"))))
        except SwellError as error:
            log.write(Text(clean(str(error)), "red"))
        if rest:
            log.write(Text(clean(rest)))

    # -- what people can do to it ------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause the job, or let it go on."""
        job = self.job
        if job is None or job.over:
            return
        if job.phase.value == "paused":
            self.run_worker(self._do(self._client.resume(job)))
        else:
            question = f"Pause {clean(job.name)}? It gives its slots back until it is resumed."
            self._ask(question, "Pause", lambda: self._client.pause(job))

    def action_cancel(self) -> None:
        """End the job."""
        job = self.job
        if job is not None and not job.over:
            self._ask(
                f"Cancel {clean(job.name)}? It ends for good.",
                "Cancel the job",
                lambda: self._client.cancel(job),
            )

    def _ask(self, question: str, verb: str, call: Any) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._do(call()))

        self.app.push_screen(Confirm(question, verb), answered)

    async def _do(self, call: Any) -> None:
        try:
            job = await call
            self._live.jobs[job.job_id] = job
            self._live.events[job.job_id] += 1
            self.notify(f"{clean(job.name)} is {job.phase.value} since {say_moment(time.time())}.")
        except SwellError as error:
            self.notify(clean(str(error)), severity="error", markup=False)


class Confirm(ModalScreen[bool]):
    """Asks before something that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "answer(False)", "Back"),
        Binding("y", "answer(True)", "Yes"),
    ]

    def __init__(self, question: str, verb: str) -> None:
        super().__init__()
        self._question, self._verb = question, verb

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Static("y: yes   Escape: back\n", markup=False)
            with Horizontal():
                yield Button("Back", id="no")
                yield Button(self._verb, id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """Close with an answer."""
        self.dismiss(yes)
