"""torchft: replicas that agree on their membership before each step, so that the others survive a death.

Replicas agree at the lighthouse. How long it waits for a replica that was in the last step and has not
asked for the next one is its join timeout, and a dead replica counts as alive for 5 s. torchft's README
starts it with 10 s. The figures are taken with 0.1 s, and `readme_settings` has a death with 10 s.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.anchors import packages
from benchmarks.runtime.anchors.rows import Change, Failed, summary
from benchmarks.runtime.anchors.trial import Trial, attempt

SHORTEST_MS, README_MS = 100, 10_000
"""Join timeouts of the lighthouse."""


def measure(rounds: int = 3) -> dict[str, Any]:
    """Joins, deaths, a step against DDP's, and one death with the settings of torchft's README."""
    try:
        library = packages.folder()
    except packages.Unavailable as reason:
        return {"skipped": str(reason)}
    found = [_join_and_death(library, SHORTEST_MS) for _ in range(rounds)]
    by_readme = _join_and_death(library, README_MS)
    return {
        "death": summary([death for _, death in found if death is not None]),
        "join": summary([join for join, _ in found]),
        "step": _steps(library),
        "readme_settings": {"death": summary([by_readme[1]] if by_readme[1] is not None else [])},
    }


def _join_and_death(library: Path, join_timeout_ms: int) -> tuple[Change | Failed, Change | Failed | None]:
    """A third replica joins two and is killed; without the join there is no death to measure."""
    with Trial(library) as trial:
        join = attempt(lambda: _join(trial, join_timeout_ms))
        return join, None if isinstance(join, Failed) else attempt(lambda: _death(trial))


def _lighthouse(trial: Trial, join_timeout_ms: int) -> None:
    name = "benchmarks.runtime.anchors.torchft_lighthouse"
    trial.start("-m", name, JOIN_TIMEOUT_MS=str(join_timeout_ms))
    address = trial.folder / "address"
    trial.wait(lambda: address.exists() or None, "lighthouse")
    trial.env["LIGHTHOUSE"] = address.read_text()


def _replica(trial: Trial, index: int, script: str = "torchft_script") -> None:
    trial.start("-m", f"benchmarks.runtime.anchors.{script}", REPLICA=f"replica{index}")


def _join(trial: Trial, join_timeout_ms: int) -> Change:
    _lighthouse(trial, join_timeout_ms)
    for index in range(2):
        _replica(trial, index)
    trial.settled("replica0", 2)
    asked_s = time.monotonic()
    _replica(trial, 2)
    return trial.change("replica0", asked_s, 3, restart=False)


def _death(trial: Trial) -> Change:
    trial.settled("replica0", 3)
    killed_s = time.monotonic()
    trial.processes[-1].kill()
    return trial.change("replica0", killed_s, 2, restart=False)


def _steps(library: Path) -> dict[str, Any]:
    """Median step of torchft and of DDP, and the median of the ratios of blocks that follow each other."""
    with Trial(library) as trial:
        try:
            _lighthouse(trial, SHORTEST_MS)
            for index in range(2):
                _replica(trial, index, "torchft_steps")
            path = trial.folder / "times.json"
            trial.wait(lambda: path.exists() or None, "times of steps")
        except Failed as failed:
            return {"failed": [str(failed)]}
        times = json.loads(path.read_text())
    blocks = list(zip(times["theirs"], times["ddp"]))[1:]  # the first one warms up
    medians = [(statistics.median(theirs), statistics.median(ddp)) for theirs, ddp in blocks]
    return {
        "theirs_ms": round(statistics.median(theirs for theirs, _ in medians) * 1e3, 2),
        "ddp_ms": round(statistics.median(ddp for _, ddp in medians) * 1e3, 2),
        "ratio": round(statistics.median(theirs / ddp for theirs, ddp in medians), 4),
    }
