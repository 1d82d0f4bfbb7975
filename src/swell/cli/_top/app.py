"""The live screen: lanes above, the queue below; a job's page, what happened, and help on keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, RichLog, Static

from swell.cli._common import bar
from swell.cli._events import line as event_line
from swell.cli._events import subject
from swell.cli._terminal import clean
from swell.cli._top import draw
from swell.cli._top.job import JobScreen
from swell.cli._top.live import Feed, LiveCluster
from swell.cli._when import say_duration
from swell.domain import SwellError
from swell.report.lanes import Lane

if TYPE_CHECKING:
    from swell.api.client import AsyncClient
    from swell.api.schemas import JobView

RIVER = 6
NAME = 18
SPANS = (None, 300.0, 900.0, 3600.0, 6 * 3600.0)
"""Spans of time that the lanes show; None: what fits."""
LOOKS = {"good": "green", "bad": "red", "": ""}
PHASES = {"running": "▶", "queued": "…", "paused": "‖", "finished": "✓", "failed": "✗", "refused": "⊘"}
DRAW_S = 0.5


class Lanes(Static):
    """GPUs over time: all jobs on top of each other, then a lane for each, then the nodes."""

    DEFAULT_CSS = "Lanes { height: auto; max-height: 62%; padding: 0 1; }"

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
        window = draw.fitting(live.lanes.values(), now_s, width - NAME - 2, self.span_s)
        seen = [one for one in live.lanes.values() if one.changes and (one.ended_s or now_s) > window.from_s]
        lanes = sorted(seen, key=_running_first)
        paint = draw.colours(live.lanes, now_s)
        lines = []
        roof = f"{live.slots} slots"
        for row, text in enumerate(
            draw.river(lanes, live.capacity, live.slots, live.marks, paint, window, RIVER)
        ):
            lines.append(Text.assemble((f"{roof if row == 0 else '':>{NAME}}  ", "dim")).append_text(text))
        lines.append(Text(" " * (NAME + 2)).append_text(draw.axis(window)))
        lanes = [lane for lane in lanes if self.with_ended or lane.ended_s is None]
        shown = self._shown(lanes)
        most = max((gpus for lane in shown for _, gpus in lane.changes), default=1)
        for lane in shown:
            style = "bold reverse" if lane.job_id == self.chosen else ""
            name = clean(lane.name)
            name = name if len(name) <= NAME else name[: NAME - 1] + "…"
            line = Text.assemble((f"{name:>{NAME}}", style), "  ")
            lines.append(line.append_text(draw.lane_line(lane, paint[lane.job_id], window, most)))
        if len(lanes) > len(shown):
            lines.append(Text(f"{'':>{NAME}}  and {len(lanes) - len(shown)} more jobs", "dim"))
        return lines + draw.nodes_lines(live.nodes, live.jobs.values(), paint, width)

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
        yield Lanes(self.live)
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
        """The table of jobs."""
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
        lanes = main.query_one(Lanes)
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
        return head.append(f"   {draw.number(rate)} it/s") if rate else head

    def _draw_queue(self) -> None:
        table, now_s = self.queue, time.time()
        paint = draw.colours(self.live.lanes, now_s)
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
            Text("-" if rate is None else f"{draw.number(rate)} it/s", justify="right"),
            Text(said, LOOKS[look]),
            Text(clean(self.live.why(job)), "dim"),
        ]

    def _at_cursor(self) -> str | None:
        keys = [row.value for row in self.queue.rows]
        row = self.queue.cursor_row
        return keys[row] if 0 <= row < len(keys) else None

    # -- keys --------------------------------------------------------------------------------------------

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        lanes = self.screen_stack[0].query_one(Lanes)
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
        self.screen_stack[0].query_one(Lanes).with_ended = self._with_ended
        self.draw()

    def action_span(self, change: int) -> None:
        """Show a longer or a shorter time."""
        lanes = self.screen_stack[0].query_one(Lanes)
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
    """The keys."""

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
