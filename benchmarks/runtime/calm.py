"""Processor time that other programs took: figures in milliseconds mean nothing while those compete."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds since the machine and the measured processes started."""

    all_s: float
    busy_s: float
    own_s: float


def usage(root: int) -> Usage:
    """Of the whole machine, and of process `root`, its descendants and this process."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    own = sum(os.times()[:4]) + sum(_spent(pid) for pid in _family(root))
    return Usage(sum(fields) * _TICK_S, (sum(fields) - idle) * _TICK_S, own)


def taken_by_others(before: Usage, after: Usage) -> float:
    """The part of all processors that went to other programs between two looks."""
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others_s) / max(after.all_s - before.all_s, _TICK_S)


def _stat(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _family(root: int) -> list[str]:
    children: dict[str, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if stat := _stat(path.name):
            children.setdefault(stat[1], []).append(path.name)
    found, waiting = [], [str(root)]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _spent(pid: str) -> float:
    """Of a process and those children of it that are over."""
    stat = _stat(pid)
    return sum(int(field) for field in stat[11:15]) * _TICK_S if stat else 0.0
