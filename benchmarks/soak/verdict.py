"""What must hold after a soak, and the figures that are shown of it."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.platform.audit import most_slots_held
from swell.domain import Event, EventKind

ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED)
WARM_UP = 0.25
"""Part of the time in which one control plane was left alone that is not measured."""
MEMORY_MIB, MEMORY_PART = 16.0, 0.1
"""Growth of the control plane's memory that is allowed: the larger of both."""
DESCRIPTORS = 8
TROUBLE = re.compile(r"Traceback|internal error|thread failed")


@dataclass
class Verdict:
    """The figures, and what went wrong: empty lists if nothing did."""

    figures: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not any(self.wrong.values())

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"ok": self.ok, "wrong": self.wrong} | self.figures


def growth(seen: Sequence[tuple[float, int, float, int]], pid: int | None) -> dict[str, Any]:
    """How memory and descriptors of one control plane went, after its warm-up."""
    mine = [(at, mib, files) for at, found, mib, files in seen if found == pid]
    mine = mine[int(len(mine) * WARM_UP) :]
    if len(mine) < 10:
        return {}
    at, mib, files = (np.array(column, dtype=np.float64) for column in zip(*mine, strict=True))
    third = len(mine) // 3
    minutes = float(at[-1] - at[0]) / 60.0
    first, last = float(np.median(mib[:third])), float(np.median(mib[-third:]))
    return {
        "minutes": round(minutes, 2),
        "memory_mib": [round(first, 1), round(last, 1)],
        "memory_mib_per_minute": round(float(np.polyfit(at / 60.0, mib, 1)[0]), 2),
        "descriptors": [int(files[:third].min()), int(files[-third:].min())],
    }


def not_flat(grown: dict[str, Any]) -> list[str]:
    """What grew although it should not."""
    if not grown:
        return ["one control plane was never watched for long enough"]
    found = []
    (before, after), (few, many) = grown["memory_mib"], grown["descriptors"]
    if after - before > max(MEMORY_MIB, MEMORY_PART * before):
        found.append(f"memory went from {before} to {after} MiB in {grown['minutes']} minutes")
    if many - few > DESCRIPTORS:
        found.append(f"descriptors went from {few} to {many}")
    return found


def doubled(keys: dict[str, set[str]], stored: dict[str, tuple[str, str]]) -> list[str]:
    """Submissions that made two jobs: by their answers, or by the names in the store."""
    answers = [f"{key} was answered with {sorted(ids)}" for key, ids in keys.items() if len(ids) > 1]
    names = Counter(name for name, _ in stored.values())
    return answers + [f"{name} is in the store {count} times" for name, count in names.items() if count > 1]


def lost(keys: dict[str, set[str]], stored: dict[str, tuple[str, str]]) -> list[str]:
    """Jobs that were accepted and that the store does not know."""
    return [f"{key}: {job_id}" for key, ids in keys.items() for job_id in ids if job_id not in stored]


def log_problems(events: Sequence[Event], slots: int) -> list[str]:
    """What the event log says that cannot be: a slot in two hands, a job that began or ended twice."""
    found = []
    try:
        most_slots_held(events, slots)
    except AssertionError as error:
        found.append(str(error))
    for kinds, what in (((EventKind.SUBMITTED,), "was submitted"), (ENDS, "ended")):
        times = Counter(str(event.job_id) for event in events if event.kind in kinds)
        found += [f"{job_id} {what} {count} times" for job_id, count in times.items() if count > 1]
    return found


def complaints(log: Path) -> list[str]:
    """Lines of the control plane's log that tell of an error of its own."""
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if TROUBLE.search(line)][:20]


def answer_times(answers_ms: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of the answers to an honest person."""
    if not answers_ms:
        return {}
    return {
        "median_ms": round(statistics.median(answers_ms), 1),
        "p99_ms": round(float(np.percentile(answers_ms, 99)), 1),
        "count": len(answers_ms),
    }
