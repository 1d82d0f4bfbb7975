"""How long a job's membership waits: before it starts workers, and for members that say nothing."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_S = 0.3
"""After a death no new worker is started for this long, so that the survivors recover undisturbed."""
SPARE_AFTER_S = 1.0
"""After a switch no spare is started for this long, so that the new generation trains undisturbed."""
AWAY_S = 1.0
"""No worker is started for this long after a slot was unreachable: the job may have lost it by then."""
FIRST_STEP = 6
"""How many times longer than `silent_after_s` a member may be silent before the first step is over."""
_SLEPT_S = 1.0
"""If the coordinator did not run for longer than this (a suspended machine, say), it heard no worker."""


@dataclass(slots=True)
class Quiet:
    """Until when no worker is started, because those that train come first."""

    calm_s: float = 0.0
    """Before this time no worker is started."""
    settled_s: float = 0.0
    """Before this time no spare is started."""

    def after_loss(self, now_s: float) -> None:
        """A member is lost: the survivors come first."""
        self.calm_s = max(self.calm_s, now_s + SETTLE_S)

    def after_lost_slot(self, now_s: float) -> None:
        """A slot cannot be reached: the job may be told to leave it."""
        self.calm_s = now_s + AWAY_S

    def after_switch(self, now_s: float) -> None:
        """A generation begins, and comes first."""
        self.settled_s = now_s + SPARE_AFTER_S


@dataclass(slots=True)
class Silence:
    """What tells a member that hangs from one that is only slow, or that nobody listened to."""

    founded_at: int | None = None
    """The step that a job without live state began at, until a later one is reported; None then."""
    stood_at: int = -1
    """The step that was last reported to stand still."""
    ticked_s: float | None = None
    """When the coordinator last looked who is silent."""

    def reached(self, step: int) -> None:
        """A member is at `step`."""
        if self.founded_at is not None and step > self.founded_at:
            self.founded_at = None

    def patience_s(self, silent_after_s: float) -> float:
        """How long a member may be silent; in the first step of a job, which nobody has rehearsed, longer."""
        return silent_after_s * (FIRST_STEP if self.founded_at is not None else 1)

    def stands_still(self, step: int) -> bool:
        """Note a step that stands still; False if that was known."""
        known, self.stood_at = step == self.stood_at, step
        return not known

    def slept_s(self, now_s: float) -> float:
        """For how long the coordinator itself did not run since the last call, 0 if it did."""
        gap_s = 0.0 if self.ticked_s is None else now_s - self.ticked_s
        self.ticked_s = now_s
        return gap_s if gap_s > _SLEPT_S else 0.0
