"""Where the time of a reclaim goes, read from the log of the platform and from the histories of its jobs.

Four moments lie between the demand of a service and the answer that the slots are its own: the platform has
chosen the slots (`held`), the coordinator of the job that leaves last has its order (`resize` or `stop`), the
members of that job have agreed on a generation without the leavers (`generation`, or `finish` of a job that
stops), and the last leaver's process has ended (`exited`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swell.domain import Event, EventKind
from swell.train.agent.jobdir import JobDirectory

STAGES = ("chosen", "ordered", "switched", "ended", "noticed")
"""What was waited for: the choice of slots, the order, the switch, the end of processes, the answer."""
History = Sequence[Mapping[str, Any]]


def histories(home: Path) -> list[list[dict[str, Any]]]:
    """The history of each run of each job in the home of a platform."""
    return [JobDirectory(run).events() for run in sorted((home / "jobs").glob("*/runs/*"))]


def stages(
    events: Sequence[Event], runs: Sequence[History], asked_s: float, seen_s: float
) -> dict[str, float]:
    """Seconds of each stage of the reclaim between two moments; those that left no trace are 0."""
    moments = [asked_s, *_moments(events, runs, asked_s, seen_s), seen_s]
    for i in range(1, len(moments)):  # a stage that left no trace ends where it began
        moments[i] = max(moments[i], moments[i - 1])
    return {name: round(moments[i + 1] - moments[i], 3) for i, name in enumerate(STAGES)}


def _moments(events: Sequence[Event], runs: Sequence[History], asked_s: float, seen_s: float) -> list[float]:
    held_s = [e.time_s for e in events if e.kind is EventKind.HELD and asked_s <= e.time_s <= seen_s]
    chosen_s = min(held_s, default=asked_s)
    last: tuple[float, History] = (0.0, ())
    for run in runs:
        for one in run:
            if one["event"] == "exited" and chosen_s <= one["time_s"] <= seen_s:
                last = max(last, (float(one["time_s"]), run), key=lambda found: found[0])
    ended_s, run = last
    ordered_s = [float(e["time_s"]) for e in run if e["event"] in ("resize", "stop")]
    ordered_s = [at_s for at_s in ordered_s if chosen_s <= at_s <= ended_s]
    order_s = max(ordered_s, default=chosen_s)
    agreed_s = [float(e["time_s"]) for e in run if e["event"] in ("generation", "finish")]
    return [
        chosen_s,
        order_s,
        min((s for s in agreed_s if order_s <= s <= ended_s), default=order_s),
        ended_s,
    ]
