"""When a policy is asked: at once, in rounds, or when it wanted to be woken. The same live and simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swell.policies import Policy

_LEAST_WAIT_S = 1e-3
"""A policy is not woken again in the same moment, whatever it asks: rounding may make it ask for that."""
_ROUNDING = 1e-9


@dataclass(slots=True)
class Rhythm:
    """The next moment at which the policy decides, kept as things happen."""

    policy: Policy
    interval_s: float | None = None
    """Length of the rounds, which begin at multiples of it; None or 0: decide whenever something happens."""
    due_s: float = math.inf
    """When the policy is to decide next; infinite while nothing calls for a decision."""

    def ask(self, now_s: float, *, urgent: bool = False) -> None:
        """Something happened: decide now, or at the next round unless it is `urgent` (GPUs were lost)."""
        at_s = now_s if urgent or not self.interval_s else self._round_from(now_s)
        self.due_s = min(self.due_s, at_s)

    def decided(self, now_s: float, wake_s: float) -> None:
        """The policy has decided and wants to be asked again at `wake_s` if nothing happens before."""
        if self.interval_s:
            if self.policy.changes_with_time:
                wake_s = now_s + self.interval_s
            elif wake_s < math.inf:
                wake_s = max(self._round_from(wake_s), self.interval_s, now_s + self.interval_s)
        self.due_s = max(wake_s, now_s + _LEAST_WAIT_S)

    def _round_from(self, at_s: float) -> float:
        """The first beginning of a round not before a moment."""
        assert self.interval_s
        return math.ceil(at_s / self.interval_s - _ROUNDING) * self.interval_s
