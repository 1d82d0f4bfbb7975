"""What a program says about itself in lines of its output, and the report that swell makes of it.

    swell: progress=0.4 of=1.0 loss=0.31 lr=0.1 accuracy=0.93
    swell: progress=40%
    swell: saved=1200

`progress` and `of` are in any unit: steps, epochs, a share of the whole. Words that are not known are
metrics. A line that makes no sense is output like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

PREFIX = "swell: "
MOST_CHARACTERS = 2000
UNITS = 4096
"""The batch that is assumed of a program for its model of speed: it is divided among the workers."""
LEAST_S = 0.2
"""Speed is measured over at least this long, because output is read a few times a second."""


def said(line: str) -> dict[str, Any] | None:
    """The figures in a line of output; None if it is no line of this kind."""
    if not line.startswith(PREFIX) or len(line) > MOST_CHARACTERS:
        return None
    found: dict[str, float] = {}
    for word in line.removeprefix(PREFIX).split():
        name, equals, text = word.partition("=")
        if not equals or not name:
            return None
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            return None
        if name == "progress" and text.endswith("%"):
            found["of"] = 100.0
        found[name] = value
    figures = {name: value for name, value in found.items() if math.isfinite(value)}
    out: dict[str, Any] = {}
    for name, key in (("progress", "done"), ("of", "of"), ("loss", "loss"), ("lr", "lr")):
        if name in figures:
            out[key] = figures.pop(name)
    for name in ("epoch", "saved"):
        if name in figures:
            out[name] = int(figures.pop(name))
    if figures:
        out["metrics"] = figures
    return out or None


@dataclass(slots=True)
class Pace:
    """How fast a program is with its present workers: seconds per unit of progress."""

    generation: int = -1
    first: tuple[float, float] | None = None
    """Time and progress of the generation's first report: what came before includes the start."""

    def report(self, figures: dict[str, Any], generation: int, workers: int, now_s: float) -> dict[str, Any]:
        """The report of rank 0, as a worker that imports swell would send it."""
        out = figures | {"rank": 0, "world": workers, "workers": workers, "generation": generation}
        done = float(figures["done"])
        if generation != self.generation or self.first is None or done < self.first[1]:
            self.generation, self.first = generation, (now_s, done)
            return out
        seconds, made = now_s - self.first[0], done - self.first[1]
        if made > 0 and seconds >= LEAST_S:
            limits = {"init_batch": UNITS, "max_batch": UNITS, "min_local": 1, "max_local": UNITS}
            out |= {"step_s": seconds / made, "local_batch": -(-UNITS // workers), "limits": limits}
        return out
