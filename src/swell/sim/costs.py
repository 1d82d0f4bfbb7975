"""What a change of allocation costs a job: a pause in which it makes no progress.

constant    the same for every job and every change (the Pollux authors' simulator: 30 s)
modelled    a fixed part for processes and connections, plus the job's state over the network
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swell.domain import InputError


class ResizeCost(Protocol):
    """Seconds of pause for a job that goes from `before` to `after` GPUs; it starts if `before` is 0.

    `startup_s`: how long the job's start takes, where that was measured.
    """

    def seconds(
        self, state_bytes: float, before: int, after: int, startup_s: float | None = None
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """Every change costs the same."""

    pause_s: float

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return self.pause_s


@dataclass(frozen=True, slots=True)
class ModelledCost:
    """A fixed part, plus sending the job's state once if a worker joins; shrinking sends nothing."""

    fixed_s: float = 0.5
    bytes_per_s: float = 1.25e9
    """10 Gbit/s."""
    start_s: float = 10.0
    """Added when a job starts: the start of its processes, and their imports."""

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        if before == 0:
            start_s = self.start_s if startup_s is None else startup_s
            return start_s + state_bytes / self.bytes_per_s
        return self.fixed_s + (state_bytes / self.bytes_per_s if after > before else 0.0)


def parse_cost(text: str) -> ResizeCost:
    """A cost from text: a number of seconds, or 'model'."""
    if text == "model":
        return ModelledCost()
    try:
        pause_s = float(text)
    except ValueError:
        pause_s = -1.0
    if not 0 <= pause_s < float("inf"):
        raise InputError(
            f"resize cost must be seconds of at least 0, or 'model', got '{text}'", field="resize-cost"
        )
    return ConstantCost(pause_s)
