"""Which trials go on, wait or are given up: successive halving (Jamieson and Talwalkar, AISTATS 2016).

All trials train up to the first rung, `warmup` epochs, and wait there. When the last has arrived, the best
third goes on to the next rung, three times as far; and so on, until one is left, which trains to its end. A
trial that waits has saved its state and holds no slot.

A pure function of what the trials have reported: a driver that is started again comes to the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

FACTOR = 3


class Verdict(Enum):
    """What becomes of a trial now."""

    GO = "go"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a trial has come."""

    number: int
    curve: Mapping[int, float] = field(default_factory=dict)
    """The metric by epoch."""
    ended: bool = False
    failed: bool = False

    def at(self, rung: int) -> float | None:
        """The metric when the trial came to a rung; None if it is not there yet."""
        reached = [epoch for epoch in self.curve if epoch >= rung]
        return self.curve[min(reached)] if reached else None


def verdicts(trials: Sequence[Standing], total: int, warmup: int, *, maximize: bool) -> dict[int, Verdict]:
    """What becomes of each trial that has not ended; `total` trials there will be in all."""
    found = {trial.number: Verdict.GO for trial in trials if not trial.ended}
    group, rung = list(trials), warmup
    missing = total - len(trials)
    while len(group) + missing > 1:
        waiting = [trial for trial in group if trial.ended or trial.at(rung) is not None]
        if missing or len(waiting) < len(group):
            found |= {trial.number: Verdict.WAIT for trial in waiting if not trial.ended}
            break
        able = [trial for trial in group if not trial.failed and trial.curve]
        able.sort(key=lambda trial: _score(trial, rung, maximize), reverse=True)
        kept = able[: -(-len(group) // FACTOR)]
        dropped = [trial for trial in group if trial not in kept and not trial.ended]
        found |= {trial.number: Verdict.GIVE_UP for trial in dropped}
        group, rung = kept, rung * FACTOR
    return found


def _score(trial: Standing, rung: int, maximize: bool) -> float:
    value = trial.at(rung)
    if value is None:  # it ended before this rung
        value = trial.curve[max(trial.curve)]
    return value if maximize else -value
