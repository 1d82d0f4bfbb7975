"""How many workers a job may have and should have."""

from __future__ import annotations

from dataclasses import dataclass

from swell.train.agent.errors import Refused
from swell.train.agent.slots import place


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

    def confine(self, most: int, reason: str) -> bool:
        """Lower the maximum to `most`; True if the target is now too high."""
        self.maximum = max(self.minimum, min(most, self.maximum))
        self.confined = reason
        return self.target > self.maximum
