"""How a job comes to its end: the same for both kinds of membership (`membership`, `restarts`)."""

from __future__ import annotations

from dataclasses import dataclass

from swell.train.agent.generations import Finish

MAX_FRUITLESS_DEATHS = 5
"""The job fails after this many workers have died in a row without a step in between."""

STOPPED = "stopped"
"""Reason of a job that was asked to save its state and end."""
FINISHED = "training is over"
"""Reason of a job whose script has run to its end."""


@dataclass(slots=True)
class Ending:
    """Whether the job goes on. A job that is being stopped may finish meanwhile; it is over once, for ever.

    running --(asked to save and end)-----> stopping --> over (stopped)
       |  \\--(the leader has run its script)--> finished --> over (training is over)
       \\--(too many fruitless deaths, a failed script, a request)--> over
    """

    stopping: bool = False
    """True once the job was asked to save its state and end."""
    finished: bool = False
    """True once the leader has run its whole script."""
    fruitless: int = 0
    """Deaths since the job last made progress."""
    result: Finish | None = None
    """How the job ended; None while it is not over."""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.result is not None

    def finish(self, code: int, reason: str) -> list[Finish]:
        """The job is over with this result; nothing if it was over before."""
        if self.result is not None:
            return []
        self.result = Finish(code, reason)
        return [self.result]
