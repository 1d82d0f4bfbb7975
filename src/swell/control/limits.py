"""Limits for each user, so that one of them cannot use up the platform for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swell.control.errors import TooMany
from swell.control.model import JobRecord
from swell.policies.by_user import UserLimits

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """What one user may have at a time; None for no limit."""

    jobs: int | None = None
    """Jobs that are queued, running or paused."""
    submissions_per_minute: int | None = None
    run_s: float | None = None
    """The longest that a job may run, whatever its request says."""
    running: int | None = None
    """Jobs that run at a time; the others wait (`swell.policies.by_user`)."""
    slots: int | None = None
    """Slots of all running jobs together (`swell.policies.by_user`)."""

    @property
    def of_policy(self) -> UserLimits:
        """The limits that the policy obeys, in the simulator and live."""
        return UserLimits(slots=self.slots, running=self.running)


NO_LIMITS = OwnerLimits()


def left_by(promised: Sequence[JobRecord], limits: OwnerLimits, capacity: int) -> int:
    """The slots that a user's promised jobs leave of the user's limits."""
    if limits.running is not None and len(promised) >= limits.running:
        return 0
    slots = capacity if limits.slots is None else limits.slots
    return max(slots - sum(len(record.wanted) for record in promised), 0)


class Gate:
    """Refuses submissions beyond the limits."""

    def __init__(self, limits: OwnerLimits) -> None:
        self.limits = limits
        self._recent: dict[str, deque[float]] = {}
        """By user: when the submissions of the last minute came."""

    def submission(self, owner: str, active: int, now_s: float) -> None:
        """Count a submission of a user who has `active` jobs; raises TooMany if it is one too many."""
        if self.limits.jobs is not None and active >= self.limits.jobs:
            raise TooMany(
                f"{owner} has {active} jobs that are not over, and may have {self.limits.jobs}:"
                " wait for one to end, or cancel one"
            )
        most = self.limits.submissions_per_minute
        if most is None:
            return
        recent = self._recent.setdefault(owner, deque())
        while recent and now_s - recent[0] >= MINUTE_S:
            recent.popleft()
        if len(recent) >= most:
            wait_s = MINUTE_S - (now_s - recent[0])
            raise TooMany(f"{owner} may submit {most} jobs a minute: try again in {wait_s:.0f} s")
        recent.append(now_s)
        if len(self._recent) > 10_000:
            self._recent = {user: times for user, times in self._recent.items() if times}
