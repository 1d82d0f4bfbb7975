"""The order in which a script draws batches, computes gradients and steps.

Most scripts do each once in turn. Others accumulate the gradients of several batches for one step, or draw
batches ahead of the one that they compute.
"""

from __future__ import annotations

from swell.train.auto.passes import Pass


class Rhythm:
    """How many batches make a step of the script, and how many it has drawn ahead."""

    def __init__(self) -> None:
        self.pending = False
        """True if a backward pass has run since the last step."""
        self.backwards = 0
        """Backward passes since the script last called `optimizer.step()`, with those of its closure."""
        self.ahead = 0
        """How many batches the script has drawn ahead when its optimizer steps."""
        self.most_in_flight = 0
        """The most batches of one loader that were in flight after a backward pass."""

    def computed(self, passes: list[Pass]) -> None:
        """The gradients of a batch were computed, which came from these passes."""
        for here in passes:
            if len(here.flight) > self.most_in_flight:
                self.most_in_flight = len(here.flight)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self.pending = False
