"""Where the public traces are, and one way to run a simulation for all benchmarks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "out"
"""Figures and plots are written here."""


def data_dir() -> Path:
    """The folder of public traces and profiles: $SWELL_DATA, or ../shared/data beside the checkout."""
    path = Path(os.environ.get("SWELL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        sys.exit(f"no traces at {path}: set SWELL_DATA to the folder with pollux/, elasticflow/ and philly/")
    return path


def run(
    trace: Path,
    policy: str,
    cluster: str,
    *,
    profiles: Path | None = None,
    interval_s: float | None = None,
    resize_cost: float = 0.0,
    cluster_id: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Simulate one trace under one policy; its record with the trace's name."""
    from swell.domain import Cluster
    from swell.perf.profiles import ProfileSet
    from swell.sim import simulate
    from swell.sim.traces import load_trace

    known = ProfileSet.load(profiles)
    loaded = load_trace(trace, known, seed=seed, cluster_id=cluster_id)
    result = simulate(
        loaded.jobs,
        known,
        Cluster.parse(cluster),
        policy,
        interval_s=interval_s,
        resize_cost=resize_cost,
        seed=seed,
    )
    name = trace.stem + (f"/{cluster_id}" if cluster_id else "")
    return {"trace": name} | result.record() | {"policy": policy}


def pick(record: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """Some fields of a record, in order."""
    return [record[name] for name in names]


def write_json(name: str, figures: Any) -> Path:
    """Keep figures under out/."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return path


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a plain table that can be pasted into a Markdown page."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(header)]
    print(f"\n{title}\n")
    for row in ([*header], ["-" * w for w in widths], *cells):
        print("| " + " | ".join(value.ljust(w) for value, w in zip(row, widths, strict=True)) + " |")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
    return str(value)
