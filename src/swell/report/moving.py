"""A run's lanes as a picture that moves without a script: uncovered from the left, told in words below."""

from __future__ import annotations

import re
from html import escape

from swell.report.runs import Run
from swell.report.svg import LANES_SHARE, RIGHT, figure, swim_lanes

CAPTION = 30
STILL = 0.12
"""The share of the time in which the whole picture stands before it begins again."""


def moving(run: Run, lasts_s: float = 16.0) -> str:
    """The lanes of a run with few jobs, in motion; whoever wants no motion sees the whole picture."""
    drawn = figure(swim_lanes(run))
    head, style, body = drawn.partition("</style>")
    found = re.search(r'viewBox="0 0 (\S+) (\S+)" width="\S+" height="\S+"', head)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    left = 104.0  # as swim_lanes leaves for names
    across = width - left - RIGHT
    head = head.replace(found[0], f'viewBox="0 0 {width:g} {height + CAPTION:g}"', 1)
    begin, told = 0.0, said(run)
    rules = [
        f"@keyframes go{{0%{{transform:none}}{100 * (1 - STILL):g}%,to"
        f"{{transform:translateX({across:g}px)}}}}",
        f".go{{animation:go {lasts_s:g}s linear infinite}}",
        ".told{opacity:0;font-size:13px}@media (prefers-reduced-motion:reduce){.go,.told{display:none}}",
    ]
    texts = []
    for number, (share, words) in enumerate(told):
        begin = 100 * share * (1 - STILL)
        end = 100 * (told[number + 1][0] * (1 - STILL) if number + 1 < len(told) else 1.0)
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


def said(run: Run) -> list[tuple[float, str]]:
    """What happened to the jobs in words, each with its share of the run's time."""
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
