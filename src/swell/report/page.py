"""A report: one HTML file with everything in it, without scripts, that opens from disk and can be mailed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from swell.report import svg
from swell.report.runs import Run, alike
from swell.report.svg import LANES_SHARE, RIGHT, figure, swim_lanes

# A run's lanes as a picture that moves without a script: uncovered from the left, with sentences below.


CAPTION = 30
STILL = 0.12
"""The share of the time in which the whole picture stands before it begins again."""


def moving(run: Run, lasts_s: float = 16.0) -> str:
    """The lanes of a run with few jobs, in motion; browsers set to less motion show the whole picture."""
    drawn = figure(swim_lanes(run))
    head, style, body = drawn.partition("</style>")
    found = re.search(r'viewBox="0 0 (\S+) (\S+)" width="\S+" height="\S+"', head)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    left = 104.0  # as swim_lanes leaves for names
    across = width - left - RIGHT
    head = head.replace(found[0], f'viewBox="0 0 {width:g} {height + CAPTION:g}"', 1)
    begin, captions = 0.0, sentences(run)
    rules = [
        f"@keyframes go{{0%{{transform:none}}{100 * (1 - STILL):g}%,to"
        f"{{transform:translateX({across:g}px)}}}}",
        f".go{{animation:go {lasts_s:g}s linear infinite}}",
        ".told{opacity:0;font-size:13px}@media (prefers-reduced-motion:reduce){.go,.told{display:none}}",
    ]
    texts = []
    for number, (share, words) in enumerate(captions):
        begin = 100 * share * (1 - STILL)
        end = 100 * (captions[number + 1][0] * (1 - STILL) if number + 1 < len(captions) else 1.0)
        if end - begin < 0.5:
            continue
        rules.append(
            f"@keyframes t{number}{{0%,{begin:.2f}%{{opacity:0}}{begin + 0.01:.2f}%,{end:.2f}%{{opacity:1}}"
            f"{end + 0.01:.2f}%,to{{opacity:{0 if end < 99.9 else 1}}}}}"
            f".t{number}{{animation:t{number} {lasts_s:g}s step-end infinite}}"
        )
        texts.append(f'<text class="told t{number}" x="{left:g}" y="{height + 18:g}">{escape(words)}</text>')
    bottom = height - 20  # the times stay
    cover = (
        f'<g class="go"><rect x="{left:g}" y="0" width="{across + RIGHT:g}" height="{bottom:g}" fill="#fff"/>'
        f'<rect x="{left:g}" y="0" width="1.5" height="{bottom:g}" fill="#b3261e"/></g>'
    )
    body = body.removesuffix("</svg>").replace(f'height="{height:g}"', f'height="{height + CAPTION:g}"', 1)
    return f"{head}{''.join(rules)}{style}{body}{cover}{''.join(texts)}</svg>"


def sentences(run: Run) -> list[tuple[float, str]]:
    """Sentences on what happened to the jobs, each with its share of the run's time."""
    began_s, ended_s = run.span[0], run.nearly_over(LANES_SHARE)
    found: list[tuple[float, str]] = []
    for job in run.jobs:
        before = 0
        for moment_s, gpus in job.changes:
            over = gpus == 0 and job.ended_s is not None and moment_s >= job.ended_s
            found.append((moment_s, f"{job.name} {_change(before, gpus, over)}"))
            before = gpus
    return [((at - began_s) / (ended_s - began_s), words) for at, words in sorted(found) if at <= ended_s]


def _change(before: int, after: int, over: bool) -> str:
    if over:
        return "is done"
    if not before:
        return f"starts on {after} GPU{'s' if after > 1 else ''}"
    if not after:
        return "makes room for others"
    return f"{'swells' if after > before else 'ebbs'} from {before} to {after} GPUs, and trains on"


# Charts as pixels, for papers and slides that take no SVG.
#
# resvg draws them with a font of its own extra: no browser, no display and no font of the machine is needed.


ZOOM = 3.0
"""Pixels for each unit of a chart: 300 dots per inch if it is printed 13 cm wide."""


def pixels(drawn: str, *, system_fonts: bool = True) -> bytes:
    """A chart of `svg.figure` as a PNG. Fonts of the machine, if any, serve letters that Open Sans lacks."""
    from resvg_py import svg_to_bytes

    return bytes(
        svg_to_bytes(
            svg_string=drawn,
            zoom=ZOOM,
            sans_serif_family="Open Sans",
            font_files=_fonts(),
            skip_system_fonts=not system_fonts,
        )
    )


def _fonts() -> list[str]:
    """The font that the extra `png` installs. Without any font, resvg leaves texts out silently."""
    found = find_spec("ttf_opensans")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'ttf_opensans'", name="ttf_opensans")
    folder = Path(found.origin).parent / "ttf"
    return [str(folder / f"OpenSans-{weight}.ttf") for weight in ("Regular", "SemiBold")]


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A report runs nothing and loads nothing, whatever names the jobs in it have."""


def page(title: str, groups: Sequence[tuple[str, Sequence[Run]]]) -> str:
    """The report on groups of runs; the runs of one group had the same jobs."""
    style = files("swell.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "".join(_group(name, runs, single=len(groups) == 1) for name, runs in groups)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>Made by swell from event logs and nothing else.</p>{body}</body></html>\n"
    )


def grouped(runs: Sequence[Run]) -> list[tuple[str, Sequence[Run]]]:
    """Runs that had the same jobs side by side; a group's title is what the names have in common."""
    return [_named(group) for group in alike(runs)]


def _named(group: Sequence[Run]) -> tuple[str, Sequence[Run]]:
    names = [run.label.split(".") for run in group]
    common = 0
    while len(group) > 1 and all(
        len(name) > common + 1 and name[common] == names[0][common] for name in names
    ):
        common += 1
    title = names[0][common - 1] if common else group[0].label if len(group) == 1 else "runs"
    short = [Run(".".join(name[common:]), run.lanes) for name, run in zip(names, group)]
    return f"{title}: {len(group[0].jobs):,} jobs", short


_Figure = tuple[str, Callable[[Run], float | None], Callable[[float], str], int]
FIGURES: tuple[_Figure, ...] = (
    ("finished", lambda run: float(len(run.finished)), lambda v: f"{v:.0f}", 0),
    ("refused", lambda run: float(run.refused), lambda v: f"{v:.0f}", 0),
    ("average JCT", lambda run: _reduce(np.mean, run.jct_s), svg.seconds, -1),
    ("median JCT", lambda run: _reduce(np.median, run.jct_s), svg.seconds, -1),
    ("p99 JCT", lambda run: _reduce(lambda x: np.percentile(x, 99), run.jct_s), svg.seconds, -1),
    ("all done after", lambda run: run.span[1] - run.span[0], svg.seconds, -1),
    ("deadlines met", lambda run: _ratio(*run.deadlines), lambda v: f"{v:.3f}", 1),
    ("GPUs in use", lambda run: run.utilisation, svg.percent, 0),
    ("fairness", lambda run: run.fairness, lambda v: f"{v:.2f}", 1),
    ("resizes", lambda run: float(run.resizes), lambda v: f"{v:.0f}", 0),
)
"""Name, value, its text, and whether less (-1) or more (1) is better."""


def _reduce(how: Callable[[Any], Any], values: Any) -> float | None:
    return float(how(values)) if len(values) else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def charts(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """The charts of a group: title, SVG, and a sentence on how to read it."""
    shares = [(run.label, _ratio(*run.deadlines)) for run in runs]
    jct = [_distribution(run.label, run.jct_s) for run in runs]
    waits = [_distribution(run.label, run.waiting) for run in runs]
    use = []
    for run in runs:
        times, used = run.used()
        use.append(svg.ChartLine(run.label, (times - run.span[0]).tolist(), used.tolist()))
    counts = [(run.label, float(run.resizes)) for run in runs]
    found = [
        (
            "Completion times",
            svg.lines("Completion times", jct, label_x=svg.seconds, label_y=svg.percent, log=True, top=1.0),
            "Share of the finished jobs that took at most so long; further left is better.",
        ),
        (
            "GPUs in use over time",
            svg.lines("GPUs in use over time", use, label_x=svg.seconds, label_y=lambda v: f"{v:g}"),
            "Mean GPUs held by jobs, from the first submission on.",
        ),
        (
            "Waiting",
            svg.lines("Waiting", waits, label_x=svg.percent, label_y=svg.percent, top=1.0),
            "Share of the finished jobs that spent at most this share of their life without a GPU.",
        ),
        (
            "Resizes",
            svg.bars("Resizes", counts, lambda v: f"{v:.0f}"),
            "How often running jobs went to other GPUs; starts and preemptions are not counted.",
        ),
    ]
    if any(value is not None for _, value in shares):
        caption = (
            "Jobs that ended by their deadline, among all that had one; refused jobs count as missed, "
            "cancelled ones not at all."
        )
        found.insert(1, ("Deadlines met", svg.bars("Deadlines met", shares, lambda v: f"{v:.3f}"), caption))
    return found


def _distribution(label: str, values: Any) -> svg.ChartLine:
    """A cumulative distribution of at most 200 points."""
    count = len(values)
    keep = sorted({round(i * (count - 1) / 199) for i in range(200)}) if count > 200 else list(range(count))
    return svg.ChartLine(label, [float(values[i]) for i in keep], [(i + 1) / count for i in keep])


def _group(name: str, runs: Sequence[Run], *, single: bool) -> str:
    figures = "".join(
        f"<figure><h3>{escape(title)}</h3>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"
        for title, drawn, caption in charts(runs)
    )
    lanes = "".join(
        f"<figure><h3>{escape(run.label)}</h3>{svg.swim_lanes(run)}<figcaption>{_lanes_caption(run)}</figcaption></figure>"
        for run in runs
    )
    who = "Who had how many GPUs" if single else f"Who had how many GPUs: {escape(name)}"
    head = f'<h2>{escape(name)}</h2>{_table(runs)}<div class="two">{figures}</div>'
    return f"{head}<h2>{who}</h2>{lanes}"


def _lanes_caption(run: Run) -> str:
    until_s, ended_s = run.nearly_over(svg.LANES_SHARE), run.span[1]
    left = sum(bool(job.changes) and (job.ended_s or ended_s) > until_s for job in run.jobs)
    cut = f" Cut off: the last {svg.seconds(ended_s - until_s)}, when {left} jobs still ran." if left else ""
    jobs = sum(bool(job.changes) for job in run.jobs)
    some = f" One in {-(-jobs // svg.LANES_MOST)} of {jobs} jobs is shown." if jobs > svg.LANES_MOST else ""
    return (
        "Above: GPUs in use under what there is (dashed). Below: a lane for each job, thicker with more GPUs."
        f" Red: lost nodes and workers.{some}{cut}"
    )


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name, *_ in FIGURES)
    values = [[value(run) for _, value, _, _ in FIGURES] for run in runs]
    rows = []
    for index, run in enumerate(runs):
        cells = []
        for column, (_, _, say, better) in enumerate(FIGURES):
            own = values[index][column]
            known = [row[column] for row in values if row[column] is not None]
            best = better and len(known) > 1 and own == (max if better > 0 else min)(known, default=None)  # type: ignore[type-var]
            cells.append(f"<td{' class=best' if best else ''}>{'-' if own is None else say(own)}</td>")
        key = f'<span class="key" style="background:{svg.COLOURS[index % 8]}"></span>'
        rows.append(f'<tr><th scope="row">{key}{escape(run.label)}</th>{"".join(cells)}</tr>')
    return (
        f'<section class="wide"><table><thead><tr><th scope="col">run</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></section>"
    )
