"""The steps that another system's script made, and what a change of its workers cost."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One step as its worker wrote it."""

    pid: int
    world: int
    step: int
    at_s: float


class Change(NamedTuple):
    """What one change of the workers cost."""

    pause_s: float
    """The longest gap between two steps, minus a normal step."""
    request_s: float
    """From the request (or the kill) to the first step of the new membership."""
    repeated: int
    """Steps that were made again, because training went on from a checkpoint."""


class Failed(Exception):
    """The other system did not do what was waited for; the message says what happened instead."""


def read(path: Path) -> list[Row]:
    """The complete rows of a file; none if the file is not there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    fields = [line.split() for line in lines if line.endswith("\n")]
    return [Row(int(pid), int(world), int(step), float(at_s)) for pid, world, step, at_s in fields]


def change(rows: list[Row], asked_s: float, world: int, *, restart: bool) -> Change | None:
    """The cost of a change that was asked for at `asked_s`, or None while training has not gone on yet.

    The change is over with the first step of `world` workers. `restart`: such a step counts only if a new
    process made it.
    """
    before = [row for row in rows if row.at_s <= asked_s]
    after = rows[len(before) :]
    fresh = (i for i, r in enumerate(after) if r.world == world and not (restart and r.pid == before[-1].pid))
    at = next(fresh, None)
    if at is None or len(before) < 2:
        return None
    normal_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(before[-20:]))
    longest = max(pairwise([before[-1], *after[: at + 1]]), key=lambda pair: pair[1].at_s - pair[0].at_s)
    return Change(
        pause_s=longest[1].at_s - longest[0].at_s - normal_s,
        request_s=after[at].at_s - asked_s,
        repeated=max(0, longest[0].step + 1 - longest[1].step),
    )


def summary(found: list[Change | Failed]) -> dict[str, Any]:
    """Medians over the rounds in which training went on, and what happened in the others."""
    changes = [one for one in found if isinstance(one, Change)]
    out: dict[str, Any] = {
        "rounds": len(found),
        "failed": [str(one) for one in found if isinstance(one, Failed)],
    }
    if changes:
        out["median_s"] = round(statistics.median(one.pause_s for one in changes), 3)
        out["largest_s"] = round(max(one.pause_s for one in changes), 3)
        out["request_s"] = round(statistics.median(one.request_s for one in changes), 3)
        out["steps_repeated"] = statistics.median(one.repeated for one in changes)
    return out
