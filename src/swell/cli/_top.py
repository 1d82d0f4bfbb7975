"""The live screen of `swell top`: how lanes and curves are drawn, a job's page, and the screen itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, DataTable, Footer, Input, RichLog, Static

from swell.cli._common import bar, clean, one_line, say_duration, say_moment, subject
from swell.cli._common import line as event_line
from swell.cli._live import Feed, LiveCluster
from swell.domain import SwellError
from swell.report.lanes import Lane, apart

if TYPE_CHECKING:
    from swell.api.client import AsyncClient
    from swell.api.schemas import JobView, NodeView, SeriesView


COLOURS = ("#3d9bd6", "#e69f00", "#26b98a", "#cc79a7", "#7fc8f0", "#e0702d", "#a585e0", "#bdbd4c")
"""Told apart with any kind of colour vision, after Okabe and Ito; light enough for a dark terminal."""
MARK = "#7a8794"
_BARS = " ▁▂▃▄▅▆▇█"
_STEPS_S = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character, by column and row of its eight dots."""


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time over so many columns."""

    from_s: float
    to_s: float
    columns: int

    @property
    def cell_s(self) -> float:
        """Seconds of one column."""
        return max(self.to_s - self.from_s, 1e-9) / max(self.columns, 1)

    def column(self, moment_s: float) -> int:
        """The column of a moment; may be outside."""
        return math.floor((moment_s - self.from_s) / self.cell_s + 1e-6)

    def cells(self, lane: Lane) -> list[int]:
        """A lane's GPUs in each column, as of the column's end."""
        out = [0] * self.columns
        for begin_s, end_s, gpus in lane.held(lane.ended_s or self.to_s):
            first, last = max(self.column(begin_s), 0), min(self.column(end_s), self.columns)
            last = max(last, min(first + 1, self.columns))  # even the shortest stretch is seen
            for column in range(first, last):
                out[column] = gpus
        return out


def colours(lanes: Mapping[str, Lane], to_s: float) -> dict[str, str]:
    """A colour for each job; jobs at the same time differ."""
    spans = {
        job_id: (lane.changes[0][0], lane.ended_s or to_s) for job_id, lane in lanes.items() if lane.changes
    }
    return {job_id: COLOURS[number] for job_id, number in apart(spans, len(COLOURS)).items()}


def fitting(lanes: Iterable[Lane], now_s: float, columns: int, span_s: float | None) -> Window:
    """The window to show: the given span, or what holds the jobs of the last hour."""
    if span_s is None:
        recent = [
            lane.changes[0][0] for lane in lanes if lane.changes and (lane.ended_s or now_s) > now_s - 3600
        ]
        span_s = min(max(now_s - min(recent, default=now_s) + 5.0, 60.0), 6 * 3600.0)
    return Window(now_s - span_s, now_s, columns)


def river(
    lanes: Iterable[Lane],
    capacity: Sequence[tuple[float, int]],
    slots: int,
    marks: Iterable[tuple[float, str, str]],
    paint: Mapping[str, str],
    window: Window,
    height: int,
) -> list[Text]:
    """All jobs on top of each other, `height` lines; dots where there are slots but no job, red: losses."""
    halves = 2 * height
    there = [
        _capacity_at(capacity, slots, window.from_s + (c + 1) * window.cell_s) for c in range(window.columns)
    ]
    most = max([slots, 1, *there])
    stacks: list[list[str | None]] = [[] for _ in range(window.columns)]
    sums = [0] * window.columns
    for lane in lanes:
        for column, gpus in enumerate(window.cells(lane)):
            sums[column] += gpus
            level = min(round(sums[column] / most * halves), halves)
            stack = stacks[column]
            stack.extend([paint.get(lane.job_id)] * (level - len(stack)))
    lost = {window.column(time_s) for time_s, kind, _ in marks if kind != "node_joined"}
    lines = []
    for row in range(height):
        cells = []
        for column in range(window.columns):
            upper, lower = halves - 1 - 2 * row, halves - 2 - 2 * row
            stack, roof = stacks[column], round(there[column] / most * halves)
            top = stack[upper] if upper < len(stack) else None
            low = stack[lower] if lower < len(stack) else None
            if row == 0 and column in lost:
                cells.append(("▼", "bold red"))
            elif top is not None and low is not None:
                cells.append(("█", top) if top == low else ("▀", f"{top} on {low}"))
            elif low is not None:
                cells.append(("▄", low))
            else:
                cells.append(("·" if lower < roof else " ", "dim"))
        lines.append(_joined(cells))
    return lines


def _joined(cells: Iterable[tuple[str, str]]) -> Text:
    """Characters with their styles; neighbours of one style together, because every piece costs time."""
    pieces = (
        ("".join(character for character, _ in run), style) for style, run in groupby(cells, itemgetter(1))
    )
    return Text.assemble(*pieces)


def _capacity_at(capacity: Sequence[tuple[float, int]], slots: int, moment_s: float) -> int:
    known = slots if not capacity else capacity[0][1]
    for at_s, gpus in capacity:
        if at_s <= moment_s:
            known = gpus
    return known


def lane_line(lane: Lane, colour: str, window: Window, most: int) -> Text:
    """One job's lane: the higher its bars, the more GPUs; the number stands where it changes."""
    cells = window.cells(lane)
    line, column = Text(), 0
    while column < len(cells):
        gpus, end = cells[column], column
        while end < len(cells) and cells[end] == gpus:
            end += 1
        wide = end - column
        if gpus == 0:
            line.append(" " * wide)
        else:
            said = str(gpus) if wide > len(str(gpus)) + 1 else ""
            # By the square root, so that one GPU is still seen beside a hundred.
            height = max(1, round(8 * math.sqrt(gpus / max(most, 1))))
            line.append(said, f"bold {colour}").append(_BARS[min(height, 8)] * (wide - len(said)), colour)
        column = end
    return line


def axis(window: Window) -> Text:
    """Clock times under the columns."""
    step = next((s for s in _STEPS_S if s / window.cell_s >= 10), 86400)
    line = [" "] * window.columns
    shift = time.localtime(window.to_s).tm_gmtoff
    tick = math.ceil((window.from_s + shift) / step) * step - shift
    form = "%H:%M:%S" if step < 60 else "%H:%M"
    while tick < window.to_s:
        said, at = time.strftime(form, time.localtime(tick)), window.column(tick)
        if at + len(said) < window.columns:
            line[at : at + len(said)] = said
        tick += step
    return Text("".join(line), "dim")


def nodes_lines(
    nodes: Sequence[NodeView], jobs: Iterable[JobView], paint: Mapping[str, str], width: int
) -> list[Text]:
    """Every node with its slots coloured by job, as many to a line as fit."""
    holder = {slot: job.job_id for job in jobs if not job.over for slot in job.wanted}
    parts, first = [], 0
    for node in nodes:
        part = Text(
            clean(node.name), "bold red" if not node.up else "bold" if not node.draining else "italic"
        )
        part.append(
            " lost " if not node.up else " draining " if node.draining else " ", "red" if not node.up else ""
        )
        for slot in range(first, first + node.gpus):
            part.append("■" if slot in holder else "·", paint.get(holder.get(slot, ""), "dim"))
        first += node.gpus
        parts.append(part.append("   "))
    lines, line = [], Text()
    for part in parts:
        if line.cell_len and line.cell_len + part.cell_len > width:
            lines.append(line)
            line = Text()
        line.append_text(part)
    return [*lines, line] if line.cell_len else lines


def number(value: float) -> str:
    """A number in few characters."""
    size = abs(value)
    if not math.isfinite(value):
        return "-"
    if size and (size < 1e-3 or size >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def plot(
    points: Sequence[tuple[float, float]],
    window: Window,
    height: int,
    *,
    stepped: bool = False,
    zero: bool = False,
    marks: Iterable[float] = (),
    colour: str = COLOURS[0],
) -> list[Text]:
    """A curve in braille over `height` lines, with its range at the left. `marks`: moments to show."""
    values = [value for _, value in points if math.isfinite(value)]
    if not values:
        return [Text("nothing reported yet", "dim")]
    low, high = (min(0.0, *values) if zero else min(values)), max(values)
    high = high if high > low else low + (abs(low) or 1.0)
    grid = _trace([p for p in points if math.isfinite(p[1])], window, height, low, high, stepped)
    stripes = {window.column(moment_s) for moment_s in marks}
    labels = {0: number(high), height - 1: number(low)}
    lines = []
    for row in range(height):
        cells = [(f"{labels.get(row, ''):>8} ", "dim")]
        for column, bits in enumerate(grid[row]):
            empty = ("│" if column in stripes else " ", MARK)
            cells.append((chr(0x2800 + bits), colour) if bits else empty)
        lines.append(_joined(cells))
    return lines


def _trace(
    points: Sequence[tuple[float, float]], window: Window, height: int, low: float, high: float, stepped: bool
) -> list[list[int]]:
    """The braille bits of each cell."""
    grid = [[0] * window.columns for _ in range(height)]
    wide, tall = 2 * window.columns, 4 * height
    before: tuple[int, int] | None = None
    for moment_s, value in points:
        x = min(max(round((moment_s - window.from_s) / window.cell_s * 2), 0), wide - 1)
        y = round((1.0 - (value - low) / (high - low)) * (tall - 1))
        corners = [(x, y)] if before is None else [(x, before[1]), (x, y)] if stepped else [(x, y)]
        for corner in corners:
            for dot_x, dot_y in _line(before or corner, corner):
                grid[dot_y // 4][dot_x // 2] |= _DOTS[dot_x % 2][dot_y % 4]
            before = corner
    return grid


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(steps + 1):
        yield (
            round(start[0] + (end[0] - start[0]) * i / steps),
            round(start[1] + (end[1] - start[1]) * i / steps),
        )


# A job's page on the live screen: facts, curves on one time axis, resizes with their pauses, output.


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
    model = [f"{number(rate)} on {n}" for n, rate in enumerate(curve) if n and n & (n - 1) == 0]
    measured = [f"{number(one['rate'])} on {one['workers']}" for one in told.get("measured") or ()]
    parts = [("model", model), ("measured", measured)]
    return "; ".join(f"{name} {', '.join(points)}" for name, points in parts if points)


class JobScreen(Screen[None]):
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
            "" if rate is None else f"{number(rate)} it/s   ",
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
        window = Window(job.started_s or job.submitted_s, until_s, columns)
        marks = [
            one["time_s"] for one in series.changes if one["kind"] in ("resized", "preempted", "worker_lost")
        ]
        for index, (title, points, stepped) in enumerate(found):
            colour = COLOURS[index % len(COLOURS)]
            zero = title not in ("Loss",)
            lines = plot(points, window, PLOT, stepped=stepped, zero=zero, marks=marks, colour=colour)
            head = Text.assemble((title, "bold"), (f"  {number(points[-1][1])}", "dim"))
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
        self.dismiss(yes)


# The live screen: lanes above, the queue below; a job's page, what happened, and help on keys.


RIVER = 6
NAME = 18
SPANS = (None, 300.0, 900.0, 3600.0, 6 * 3600.0)
"""Spans of time that the lanes show; None: what fits."""
LOOKS = {"good": "green", "bad": "red", "": ""}
PHASES = {"running": "▶", "queued": "…", "paused": "‖", "finished": "✓", "failed": "✗", "refused": "⊘"}
DRAW_S = 0.5


class LanesPanel(Static):
    """GPUs over time: all jobs on top of each other, then a lane for each, then the nodes."""

    DEFAULT_CSS = "LanesPanel { height: auto; max-height: 62%; padding: 0 1; }"

    def __init__(self, live: LiveCluster) -> None:
        super().__init__(markup=False)
        self.live = live
        self.span_s: float | None = None
        self.chosen = ""
        """The job that the cursor is on in the queue."""
        self.most_lanes = 8
        self.with_ended = True
        """Whether jobs that are over have lanes."""
        self._height = 0

    def draw(self) -> None:
        """Show what is known now."""
        lines = self._lines()
        # Laying the screen out again is what takes time.
        self.update(Text("\n").join(lines), layout=len(lines) != self._height)
        self._height = len(lines)

    def _lines(self) -> list[Text]:
        live, now_s = self.live, time.time()
        width = max(self.size.width - 2, 40)
        window = fitting(live.lanes.values(), now_s, width - NAME - 2, self.span_s)
        seen = [one for one in live.lanes.values() if one.changes and (one.ended_s or now_s) > window.from_s]
        lanes = sorted(seen, key=_running_first)
        paint = colours(live.lanes, now_s)
        lines = []
        roof = f"{live.slots} slots"
        for row, text in enumerate(river(lanes, live.capacity, live.slots, live.marks, paint, window, RIVER)):
            lines.append(Text.assemble((f"{roof if row == 0 else '':>{NAME}}  ", "dim")).append_text(text))
        lines.append(Text(" " * (NAME + 2)).append_text(axis(window)))
        lanes = [lane for lane in lanes if self.with_ended or lane.ended_s is None]
        shown = self._shown(lanes)
        most = max((gpus for lane in shown for _, gpus in lane.changes), default=1)
        for lane in shown:
            style = "bold reverse" if lane.job_id == self.chosen else ""
            name = clean(lane.name)
            name = name if len(name) <= NAME else name[: NAME - 1] + "…"
            line = Text.assemble((f"{name:>{NAME}}", style), "  ")
            lines.append(line.append_text(lane_line(lane, paint[lane.job_id], window, most)))
        if len(lanes) > len(shown):
            lines.append(Text(f"{'':>{NAME}}  and {len(lanes) - len(shown)} more jobs", "dim"))
        return lines + nodes_lines(live.nodes, live.jobs.values(), paint, width)

    def _shown(self, lanes: list[Lane]) -> list[Lane]:
        """As many of the lanes as there is room for, and that of the chosen job."""
        kept = {lane.job_id for lane in lanes[: self.most_lanes]} | {self.chosen}
        return [lane for lane in lanes if lane.job_id in kept]


def _running_first(lane: Lane) -> tuple[bool, float]:
    """Jobs that run in order of their start, then those that are over, the newest first."""
    return lane.ended_s is not None, lane.changes[0][0] if lane.ended_s is None else -lane.ended_s


class TopApp(App[None]):
    """The cluster, live, in a terminal."""

    TITLE = "swell top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    #find { display: none; height: 3; }
    #find.shown { display: block; }
    #queue { height: 1fr; min-height: 5; }
    ModalScreen { align: center middle; }
    .box { width: auto; max-width: 90%; height: auto; padding: 1 2; background: $surface;
        border: round $primary; }
    .box Static { width: auto; max-width: 74; }
    .box Horizontal { height: 3; width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Job", priority=False),
        Binding("slash", "find", "Find"),
        Binding("a", "ended", "Ended jobs"),
        Binding("e", "events", "Events"),
        Binding("plus,equals_sign", "span(-1)", "Zoom in"),
        Binding("minus", "span(1)", "Zoom out"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, client: AsyncClient, live: LiveCluster | None = None) -> None:
        super().__init__()
        self.client = client
        self.live = live or LiveCluster()
        self.feed = Feed(client, self.live)
        self.problem: SwellError | None = None
        """Why the screen ended, if not by a person: the token is no longer allowed."""
        self._text = ""
        self._with_ended = True
        self._dirty = True
        self._drawn_s = 0.0

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield LanesPanel(self.live)
        yield Input(placeholder="Part of a name, owner or id; Enter keeps it, Escape clears it", id="find")
        table: DataTable[Text] = DataTable(id="queue", cursor_type="row", zebra_stripes=True)
        yield table
        yield Footer()

    def on_mount(self) -> None:
        self.queue.add_columns("Job", "State", "GPUs", "Progress", "Goodput", "Promise and prediction", "Why")
        self.queue.focus()
        self.run_worker(self._follow(), group="feed")
        self.run_worker(self.feed.keep_fresh(self._changed), group="feed")
        self.set_interval(DRAW_S, self._draw_if_due)
        self.call_after_refresh(self.draw)

    @property
    def queue(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one("#queue", DataTable)

    async def _follow(self) -> None:
        try:
            await self.feed.follow(self._changed)
        except SwellError as error:
            self.problem = error
            self.exit()

    def _changed(self) -> None:
        self._dirty = True

    def _draw_if_due(self) -> None:
        """Draw if something changed, and once a second for the clock; not below another screen."""
        if len(self.screen_stack) == 1 and (self._dirty or time.monotonic() - self._drawn_s > 0.95):
            self.draw()

    # -- drawing -----------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Show what is known now."""
        main = self.screen_stack[0]
        if not main.query("#head"):  # the screen is still being built, or already taken down
            return
        self._dirty, self._drawn_s = False, time.monotonic()
        main.query_one("#head", Static).update(self._head())
        lanes = main.query_one(LanesPanel)
        lanes.most_lanes = max(self.size.height // 2 - RIVER - 4, 2)
        lanes.draw()
        self._draw_queue()

    def _head(self) -> Text:
        live, jobs = self.live, self.live.jobs.values()
        running = [job for job in jobs if job.phase.value == "running"]
        waiting = sum(job.phase.value == "queued" for job in jobs)
        rate = sum(live.rate(job) or 0.0 for job in running)
        head = Text.assemble(
            ("swell ", "bold"),
            ("● live " if live.connected else "○ reconnecting … ", "green" if live.connected else "red"),
            f"{time.strftime('%H:%M:%S')}   policy {clean(live.policy)}   ",
            (f"{live.used} of {live.slots} slots in use", "bold"),
            f"   {len(running)} running, {waiting} waiting",
        )
        return head.append(f"   {number(rate)} it/s") if rate else head

    def _draw_queue(self) -> None:
        table, now_s = self.queue, time.time()
        paint = colours(self.live.lanes, now_s)
        jobs = self.live.ordered(ended=self._with_ended, text=self._text)[:500]
        wanted = [job.job_id for job in jobs]
        if [row.value for row in table.rows] != wanted:
            at = self._at_cursor()
            table.clear()
            for job in jobs:
                table.add_row(*self._cells(job, now_s, paint), key=job.job_id)
            if at in wanted:
                table.move_cursor(row=wanted.index(at))
            return
        for index, job in enumerate(jobs):
            for column, cell in enumerate(self._cells(job, now_s, paint)):
                if table.get_cell_at((index, column)) != cell:  # type: ignore[arg-type]
                    table.update_cell_at((index, column), cell, update_width=True)  # type: ignore[arg-type]

    def _cells(self, job: JobView, now_s: float, paint: dict[str, str]) -> list[Text]:
        rate = self.live.rate(job)
        said, look = self.live.outlook(job, now_s)
        phase = job.phase.value
        return [
            Text.assemble(
                ("■ ", paint.get(job.job_id, "dim")), clean(job.name), (f" {clean(job.owner)}", "dim")
            ),
            Text(f"{PHASES.get(phase, '–')} {phase}", "red" if phase in ("failed", "refused") else ""),
            Text("" if job.over else str(len(job.wanted)), justify="right"),
            Text(bar(job.done, job.of) if phase != "finished" else bar(1.0, 1.0)),
            Text("-" if rate is None else f"{number(rate)} it/s", justify="right"),
            Text(said, LOOKS[look]),
            Text(clean(self.live.why(job)), "dim"),
        ]

    def _at_cursor(self) -> str | None:
        keys = [row.value for row in self.queue.rows]
        row = self.queue.cursor_row
        return keys[row] if 0 <= row < len(keys) else None

    # -- keys --------------------------------------------------------------------------------------------

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        lanes = self.screen_stack[0].query_one(LanesPanel)
        lanes.chosen = self._at_cursor() or ""
        lanes.draw()

    def on_data_table_row_selected(self, chosen: DataTable.RowSelected) -> None:
        if chosen.row_key.value is not None:
            self.push_screen(JobScreen(self.client, self.live, chosen.row_key.value))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the first screen are not offered on others."""
        return action not in ("open", "find", "ended", "span", "events") or len(self.screen_stack) == 1

    def action_find(self) -> None:
        """Ask for a part of a name."""
        find = self.query_one("#find", Input)
        find.add_class("shown")
        find.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._text = event.value
        self.draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self.query_one("#find", Input).set_class(bool(self._text), "shown")
        self.queue.focus()

    def on_key(self, event: Any) -> None:
        """Escape clears the filter."""
        if event.key == "escape" and isinstance(self.focused, Input):
            self.focused.value = ""
            self.focused.remove_class("shown")
            self.queue.focus()

    def action_ended(self) -> None:
        """Show or hide jobs that are over."""
        self._with_ended = not self._with_ended
        self.screen_stack[0].query_one(LanesPanel).with_ended = self._with_ended
        self.draw()

    def action_span(self, change: int) -> None:
        """Show a longer or a shorter time."""
        lanes = self.screen_stack[0].query_one(LanesPanel)
        at = SPANS.index(lanes.span_s) + change
        lanes.span_s = SPANS[at % len(SPANS)]
        shown = "what fits" if lanes.span_s is None else f"the last {say_duration(lanes.span_s)}"
        self.notify(f"Lanes show {shown}.", timeout=2)
        lanes.draw()

    def action_events(self) -> None:
        """Show what happened."""
        if not isinstance(self.screen, EventsScreen):
            self.push_screen(EventsScreen(self.live))

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())


class EventsScreen(Screen[None]):
    """What happened, newest last."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,e", "app.pop_screen", "Back")]

    def __init__(self, live: LiveCluster) -> None:
        super().__init__()
        self._live = live
        self._seen = 0

    def compose(self) -> ComposeResult:
        yield RichLog(max_lines=1000, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(DRAW_S, self._draw)
        self._draw()

    def _draw(self) -> None:
        log = self.query_one(RichLog)
        for event in [one for one in self._live.recent if one.seq > self._seen]:
            self._seen = event.seq
            about = subject(event.job_id, event.node, event.data)
            log.write(Text(event_line(event.time_s, event.kind, about, event.data)))


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "app.pop_screen", "Back")]
    KEYS = (
        ("↑ ↓", "choose a job in the queue; its lane is marked"),
        ("Enter", "the job's page: curves, resizes, output"),
        ("/", "find jobs by a part of their name, owner or id; Escape clears it"),
        ("a", "show or hide jobs that are over"),
        ("+ -", "show a shorter or longer time in the lanes"),
        ("e", "what happened: the events as they come"),
        ("Escape", "back"),
        ("q", "quit"),
        ("", ""),
        ("p  c", "on a job's page: pause or resume it, cancel it (both ask first)"),
        ("", ""),
        ("▀ ·", "above: slots in use, coloured by job, and free ones; ▼ a lost node or worker"),
        ("4▆▆", "a lane: the job's GPUs over time, the number where it changes"),
    )

    def compose(self) -> ComposeResult:
        text = Text.assemble(("Keys\n\n", "bold"))
        for key, does in self.KEYS:
            text.append(f"{key:<8}", "bold").append(f"{does}\n")
        with Vertical(classes="box"):
            yield Static(text)


async def watch(client: AsyncClient) -> None:
    """Show the cluster until a person has seen enough; what is wrong at first is raised before the screen."""
    app = TopApp(client)
    await app.feed.read()
    await app.run_async()
    if app.problem is not None:
        raise app.problem
