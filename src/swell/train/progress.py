"""How far a job is, and how far it is to go. All members hold the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from swell.train.reporting import SmoothedLoss


@dataclass(slots=True, kw_only=True)
class Progress:
    """The position of a job and the end that its script has set."""

    epoch: int = 0
    steps: int = 0
    """Committed optimizer steps."""
    loss: SmoothedLoss = field(default_factory=SmoothedLoss)
    epochs: int | None = None
    """How many epochs the script asked for (`job.epochs`)."""
    total_steps: int | None = None
    """How many steps the script asked for (`job.loop`)."""
    by: str = "data"
    """What an epoch is: a pass over the data ('data'), or as much progress as one at the tuned batch makes
    ('progress')."""
    until_loss: float | None = None
    """Training ends earlier once the job's loss is at most this."""

    @property
    def reached(self) -> bool:
        """Whether the target loss is reached; the same on every worker."""
        return self.until_loss is not None and self.loss.reached(self.until_loss)
