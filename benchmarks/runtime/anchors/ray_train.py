"""Ray Train's elastic mode: all workers start again from the last checkpoint after a death or a join."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks.runtime.anchors import packages
from benchmarks.runtime.anchors.rows import Change, Failed, summary
from benchmarks.runtime.anchors.trial import Trial, attempt


def measure() -> dict[str, Any]:
    """A join and a death of one job."""
    try:
        library = packages.folder()
    except packages.Unavailable as reason:
        return {"skipped": str(reason)}
    with Trial(library) as trial:
        join = attempt(lambda: _join(trial))
        deaths = [] if isinstance(join, Failed) else [attempt(lambda: _death(trial))]
    return {"death": summary(deaths), "join": summary([join])}


def _join(trial: Trial) -> Change:
    # Ray has a scratch folder of its own, so that it does not become the default Ray of this machine.
    env = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_TMPDIR": str(trial.folder)}
    trial.start("-m", "benchmarks.runtime.anchors.ray_script", **env)
    trial.settled("rank0", 2)
    asked_s = time.monotonic()
    (trial.folder / "grow").touch()
    return trial.change("rank0", asked_s, 3, restart=True)


def _death(trial: Trial) -> Change:
    trial.settled("rank0", 3)
    victim = trial.settled("rank1", 3).pid
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return trial.change("rank0", killed_s, 3, restart=True)
