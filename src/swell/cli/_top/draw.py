"""Lanes and curves drawn with characters. Pure functions: numbers in, text out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.text import Text

from swell.cli._terminal import clean
from swell.report.lanes import Lane, apart

if TYPE_CHECKING:
    from swell.api.schemas import JobView, NodeView

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
