"""How many workers a job may have and should have."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from swell.train.agent.errors import Refused
from swell.train.agent.slots import place

SHUT_S = 300.0
"""A slot on which no worker could be started is tried again after this long, or when the job is resized."""
CUT_OFF_S = 10.0
"""The same if the slot's node did not reach the job or does not answer: a link may soon be healed."""


@dataclass(slots=True)
class Scale:
    """A job's bounds and its target. Invariant: the target is within the bounds."""

    minimum: int
    maximum: int
    target: int
    slots: tuple[int, ...] | None = None
    """The slots of the workers, one for each; None for a job without slots."""
    confined: str = ""
    """Why the job may have fewer workers than it was started with, or ''."""
    shut: dict[int, float] = field(default_factory=dict)
    """Slots on which no worker could be started, and when each is tried again."""

    def resize(self, target: int, slots: list[int] | None, *, over: bool) -> None:
        """Set the target, and its slots if the job has slots; Refused if that is not possible.

        `over`: the job has ended.
        """
        if not self.minimum <= target <= self.maximum:
            why = self.confined or f"it was started with --workers {self.minimum}:{self.maximum}"
            raise Refused(f"workers: got {target}, this job allows {self.minimum} to {self.maximum} ({why})")
        if over:
            raise Refused("the job is over and cannot be resized; start it again to go on")
        self.slots = place(target, slots, self.slots)
        self.target = target
        self.shut.clear()

    def shut_out(self, slot: int | None, cause: str, now_s: float) -> None:
        """Start no worker on this slot for a while."""
        if slot is not None:
            self.shut[slot] = now_s + (CUT_OFF_S if cause in ("link", "silent") else SHUT_S)

    def open(self, now_s: float) -> tuple[int, ...] | None:
        """The slots on which workers can be started now; None for a job without slots."""
        if self.slots is None:
            return None
        return tuple(slot for slot in self.slots if now_s >= self.shut.get(slot, now_s))

    def to_json(self) -> dict[str, Any]:
        """What outlives the coordinator; shut slots are simply tried again."""
        return {name: value for name, value in asdict(self).items() if name != "shut"}

    def confine(self, most: int, reason: str) -> bool:
        """Lower the maximum to `most`; True if the target is now too high."""
        self.maximum = max(self.minimum, min(most, self.maximum))
        self.confined = reason
        return self.target > self.maximum
