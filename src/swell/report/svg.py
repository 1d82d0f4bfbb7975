"""Charts as SVG text. Names that come from outside are escaped; a chart needs no script and no network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from swell.report.lanes import apart
from swell.report.runs import Run

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a63d2", "#a3a33a")
"""Told apart with any kind of colour vision, after Okabe and Ito."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3")
STYLE = (
    "text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:var(--ink,#17222c)}"
    ".q{fill:var(--quiet,#56646f)}.r{stroke:var(--rule,#e3e8ec);stroke-width:1}"
    ".c{stroke:var(--ink,#17222c);stroke-width:1.2;stroke-dasharray:4 3;fill:none}.m{fill:#b3261e}"
    ".n{fill:#fff;font-weight:600;text-anchor:middle}.f{fill:var(--faint,#eef1f4)}.l{fill:none;stroke-width:1.8;stroke-linejoin:round}"
)
WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
_SIZE = 'viewBox="0 0 {0} {1}" width="{0}" height="{1}"'
LANES_MOST = 100
LANES_HEIGHT = 400.0
LANES_SHARE = 0.98
"""Lanes are shown until this share of the jobs has ended: the last of a trace may run for very long."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    label: str
    x: Sequence[float]
    y: Sequence[float]


def seconds(value: float) -> str:
    """A duration in the largest unit that fits."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


_STEPS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000, 864000)
_ROUND = (1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 86400.0, 864000.0, 8640000.0)


def time_ticks(low: float, high: float, log: bool) -> list[float]:
    """Round durations between two others."""
    if log:
        return [value for value in _ROUND if low <= value <= high]
    step = next((s for s in _STEPS if (high - low) / s <= 7), 10 * _STEPS[-1])
    return [float(step * i) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>"


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    step = 10 ** math.floor(math.log10((high - low) / 4 or 1))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= 5)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def lines(
    title: str,
    drawn: Sequence[ChartLine],
    *,
    label_x: Callable[[float], str],
    label_y: Callable[[float], str],
    log: bool = False,
    top: float | None = None,
) -> str:
    """Lines over a common axis."""
    xs = [x for line in drawn for x in line.x if not log or x > 0]
    if not xs:
        return _svg(title, WIDTH, HEIGHT, ['<text class="q" x="56" y="60">nothing to show</text>'])
    low, high = min(xs), max(xs)
    high = high if high > low else low + 1.0
    most = top if top is not None else max((y for line in drawn for y in line.y), default=1.0) or 1.0

    def x_at(x: float) -> float:
        share = (x - low) / (high - low)
        if log:
            share = math.log(max(x, low) / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    ticks = time_ticks if label_x is seconds else _ticks
    parts = [_axes(x_at, y_at, ticks(low, high, log), _ticks(0, most, False), label_x, label_y)]
    for index, line in enumerate(drawn):
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(line.x, line.y) if not log or x > 0)
        dash = f' stroke-dasharray="{DASHES[index % 8]}"' if DASHES[index % 8] else ""
        parts.append(
            f'<polyline class="l" stroke="{COLOURS[index % 8]}"{dash} points="{points}">'
            f"<title>{escape(line.label)}</title></polyline>"
        )
    return _svg(title, WIDTH, HEIGHT, parts)


def _axes(
    x_at: Callable[[float], float],
    y_at: Callable[[float], float],
    xs: Sequence[float],
    ys: Sequence[float],
    label_x: Callable[[float], str],
    label_y: Callable[[float], str],
) -> str:
    parts = []
    for x in xs:
        at = x_at(x)
        parts.append(f'<line class="r" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="q" x="{at:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{label_x(x)}</text>'
        )
    for y in ys:
        at = y_at(y)
        parts.append(f'<line class="r" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="q" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label_y(y)}</text>')
    return "".join(parts)


def bars(title: str, values: Sequence[tuple[str, float | None]], form: Callable[[float], str]) -> str:
    """One horizontal bar for each label."""
    row, left = 26, 150
    most = max((value for _, value in values if value is not None), default=0.0) or 1.0
    parts = []
    for index, (label, value) in enumerate(values):
        y = index * row + 4
        parts.append(
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(_short(label, 22))}</text>'
        )
        length = 0.0 if value is None else value / most * (WIDTH - left - 70)
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 8}" rx="3"'
            f' fill="{COLOURS[index % 8]}"/>'
        )
        text = "-" if value is None else form(value)
        parts.append(f'<text class="q" x="{left + length + 6:.1f}" y="{y + 14}">{text}</text>')
    return _svg(title, WIDTH, len(values) * row + 8, parts)


def swim_lanes(run: Run) -> str:
    """A lane for each job, as thick as it has GPUs, under the cluster's use; of many jobs only some."""
    began_s, ended_s = run.span[0], run.nearly_over(LANES_SHARE)
    span_s = max(ended_s - began_s, 1e-9)
    jobs = [job for job in run.jobs if job.changes]
    step = max(1, math.ceil(len(jobs) / LANES_MOST))
    shown = jobs[::step]
    row = min(26.0, LANES_HEIGHT / max(len(shown), 1))
    river, gap, width = 90.0, 10.0, 1080.0
    height = river + gap + row * len(shown) + 24
    left = LEFT if row < 10 else 104  # with room for names

    def x_at(moment: float) -> float:
        return left + (moment - began_s) / span_s * (width - left - RIGHT)

    parts = [_river(run, ended_s, x_at, river, width, left)]
    most = max((gpus for job in shown for _, gpus in job.changes), default=1)
    paths: dict[int, list[str]] = {}
    numbers: list[str] = []
    chosen = apart({job.job_id: (job.changes[0][0], job.ended_s or ended_s) for job in shown}, len(COLOURS))
    for index, job in enumerate(shown):
        middle = river + gap + (index + 0.5) * row
        for begin_s, end_s, gpus in job.held(ended_s):
            if begin_s >= ended_s:
                continue
            end_s = min(end_s, ended_s)
            # Of many jobs even the smallest must be seen; of few it is the difference that matters.
            thick = (0.3 + 0.7 * math.sqrt(gpus / most) if row < 10 else gpus / most) * (row - 0.5)
            x, wide = x_at(begin_s), max(x_at(end_s) - x_at(begin_s), 0.4)
            paths.setdefault(chosen[job.job_id], []).append(
                f"M{x:.1f} {middle - thick / 2:.1f}h{wide:.1f}v{thick:.1f}h-{wide:.1f}z"
            )
            if row >= 14 and wide > 16 and thick > 11:
                at = x + wide / 2
                numbers.append(f'<text class="n" x="{at:.1f}" y="{middle + 4:.1f}">{gpus}</text>')
        if row >= 10:
            name = escape(_short(job.name, 14))
            parts.append(
                f'<text class="q" x="{left - 6}" y="{middle + 4:.1f}" text-anchor="end">{name}</text>'
            )
    parts += [
        f'<path fill="{COLOURS[colour]}" d="{"".join(path)}"/>' for colour, path in sorted(paths.items())
    ]
    parts += numbers
    for moment, kind, subject in run.lanes.marks:
        if kind != "node_joined" and began_s <= moment <= ended_s:
            at = x_at(moment)
            parts.append(
                f'<path class="m" d="M{at - 4:.1f} 0h8l-4 7zM{at:.1f} 0h.7v{height - 24:.0f}h-.7z">'
                f"<title>{escape(kind.replace('_', ' '))}: {escape(subject)}</title></path>"
            )
    for x in time_ticks(0.0, span_s, False):
        text, at = seconds(x) if x else "0", x_at(began_s + x)
        parts.append(f'<text class="q" x="{at:.1f}" y="{height - 6:.0f}" text-anchor="middle">{text}</text>')
    thinned = f", every {step}th of them" if step > 1 else ""
    return _svg(f"{run.label}: GPUs of {len(jobs)} jobs over time{thinned}", width, height, parts)


def _river(
    run: Run, until_s: float, x_at: Callable[[float], float], height: float, width: float, left: float
) -> str:
    times, used = run.used(until_s)
    there = run.capacity_at(times)
    known = [value for value in there.tolist() if math.isfinite(value)]
    most = max([*known, float(used.max(initial=0.0))]) or 1.0
    points = [(x_at(t), height - u / most * (height - 14)) for t, u in zip(times.tolist(), used.tolist())]
    area = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    first, last = points[0][0], points[-1][0]
    parts = [
        f'<rect class="f" x="{left}" y="14" width="{width - left - RIGHT}" height="{height - 14}"/>',
        f'<polygon fill="#56b4e9" points="{first:.1f},{height} {area} {last:.1f},{height}"/>',
        f'<text class="q" x="{left - 6}" y="18" text-anchor="end">{most:g}</text>',
        f'<text class="q" x="{left - 6}" y="{height}" text-anchor="end">0</text>',
    ]
    if known:
        tops = [(x, height - c / most * (height - 14)) for (x, _), c in zip(points, there.tolist())]
        steps = [f"M{tops[0][0]:.1f} {tops[0][1]:.1f}"]
        steps += [f"H{x:.1f}V{y:.1f}" for (_, before), (x, y) in pairwise(tops) if y != before]
        parts.append(f'<path class="c" d="{"".join(steps)}H{last:.1f}"/>')
    return "".join(parts)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def figure(drawn: str, labels: Sequence[str] = ()) -> str:
    """A chart for a paper: on white, with a legend, and in CSS that drawing programs understand too."""
    head, style, body = drawn.partition("</style>")
    width, height = (float(size) for size in head.split('viewBox="0 0 ')[1].split('"')[0].split())
    across = max(1, int(width) // 170)
    legend = []
    for index, label in enumerate(labels):
        x, y = LEFT + index % across * 170, height + 8 + index // across * 18
        dash = f' stroke-dasharray="{DASHES[index % 8]}"' if DASHES[index % 8] else ""
        legend.append(f'<path class="l" stroke="{COLOURS[index % 8]}"{dash} d="M{x} {y:g}h24"/>')
        legend.append(f'<text x="{x + 30}" y="{y + 4:g}">{escape(_short(label, 22))}</text>')
    tall = height + (18 * -(-len(labels) // across) + 8 if labels else 0)
    head = head.replace(f'viewBox="0 0 {width:g} {height:g}"', _SIZE.format(f"{width:g}", f"{tall:g}"), 1)
    head = re.sub(r"var\(--\w+,(#\w+)\)", r"\1", head).replace("font:11px ", "font-size:11px;font-family:")
    sheet = f'<rect width="{width:g}" height="{tall:g}" fill="#fff"/>'
    return f"{head}{style}{sheet}{body.removesuffix('</svg>')}{''.join(legend)}</svg>"
