"""What a job says of itself with every beat: how far it is, and how long its steps take (docs/runtime.md)."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from swell.train.data import ElasticLoader

SMOOTHING = 0.02
"""Weight of a new step once many were seen: times are means over some fifty steps."""


class Pace:
    """Mean time of a step and of its exchange, for the workers and the batch of this moment."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.sync_s = 0.0
        self._of: tuple[int, ...] = ()
        self._steps = 0

    def add(self, configuration: tuple[int, ...], step_s: float, sync_s: float) -> bool:
        """Take a step in; False for the first of a configuration, which also paid for the change."""
        if configuration != self._of:
            self._of, self._steps = configuration, 0
            return False
        self._steps += 1
        weight = max(1.0 / self._steps, SMOOTHING)
        self.step_s += weight * (step_s - self.step_s)
        self.sync_s += weight * (sync_s - self.sync_s)
        return True

    @property
    def known(self) -> bool:
        """Whether there is a mean of this configuration."""
        return self._steps > 0


def memory_bytes(device: torch.device) -> int:
    """The most memory this worker ever held: of its device, or of the process where there is none."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timing(pace: Pace, loader: ElasticLoader, workers: int, nodes: int) -> dict[str, Any]:
    """How fast the job is as it runs now."""
    batch = loader.batch_size
    local = -(-batch // workers)
    micro = min(loader.micro_batch or local, local)
    accumulation = -(-local // micro) - 1
    out: dict[str, Any] = {
        "batch_size": batch,
        "workers": workers,
        "nodes": nodes,
        "local_batch": -(-local // (accumulation + 1)),
        "accumulation": accumulation,
    }
    if pace.known:
        out |= {"step_s": round(pace.step_s, 6), "sync_s": round(pace.sync_s, 6)}
    return out


def progress(loader: ElasticLoader, epochs: int | None, steps: int) -> dict[str, float | None]:
    """Optimizer steps so far and in all, for a job that keeps its batch."""
    of = None if epochs is None or loader.streaming else epochs * len(loader)
    return {"done": steps, "of": of}


def adaptive_progress(
    loader: ElasticLoader, epochs: int | None, epoch: int, tuned: int, worth: float | None
) -> dict[str, float | None]:
    """The same in steps at the tuned batch, which all count alike; without `worth`, by data seen."""
    per_epoch = len(loader.dataset) / tuned
    done = (epoch + loader.cursor / len(loader.dataset)) * per_epoch if worth is None else worth
    return {"done": done, "of": None if epochs is None else epochs * per_epoch}
