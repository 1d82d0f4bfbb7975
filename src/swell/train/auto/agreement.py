"""The change of membership that the workers have agreed on, and when it can be made.

Membership changes when the script asks for its next batch and no gradient is pending, because then none of
its state is in the middle of a change; or after an optimizer's step, if the script draws batches ahead.
"""

from __future__ import annotations

from swell.train.auto.job import ScriptJob
from swell.train.auto.position import Position
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun
from swell.train.sync.mesh import Header

_LEAST_STEPS = 2
"""Where batches are drawn ahead, newcomers join after so many steps of a pass: they made one too."""


class Agreement:
    """The candidate that all workers agreed to switch to after the present step."""

    def __init__(self, run: ScriptRun, position: Position, rhythm: Rhythm) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self.number = 0
        """The candidate's number, or 0."""

    def may_change(self) -> bool:
        """Whether workers may come and go after this step."""
        ahead = self._rhythm.ahead
        if not ahead:
            return True
        here = self._position.main()
        if here is None:
            return True
        drawn = self._position.drawn if here.counted else here.index
        return ahead == len(here.flight) and drawn - ahead > _LEAST_STEPS

    def withdraw(self) -> None:
        """Let go of the candidate: the step for which it was agreed on goes on."""
        if self.number:
            self._run.link.release()
        self.number = 0

    def settle(self, offered: int, headers: list[Header]) -> None:
        """Agree on the candidate that this worker has `offered` if all others have offered it too."""
        candidates = {h["candidate"] for h in headers}
        self.number = candidates.pop() if len(candidates) == 1 else 0
        if offered and not self.number:
            self._run.link.release()

    def settle_alone(self, job: ScriptJob) -> None:
        """What several workers settle with their gradients, a single one does after its step."""
        self.withdraw()  # of the step of another optimizer on the same batch
        self.number = job.offer() if self.may_change() else 0

    def carry_out(self, job: ScriptJob) -> None:
        """Between two steps: save if it is time, and change membership if all agreed to."""
        rhythm, position = self._rhythm, self._position
        if rhythm.pending or (not rhythm.ahead and any(p.flight for p in position.active if p.training)):
            position.counts = position.counts or rhythm.pending
            self.withdraw()
            return
        agreed, self.number = self.number, 0
        try:
            job.boundary(agreed)
        except SystemExit:
            self._run.left = True
            raise
