"""The platform's clock: Unix time that neither jumps nor goes back.

Deadlines and events are in Unix time, and so is everything the control plane compares with them. The system's
clock may be set while swell runs, by hand or by NTP. This clock follows the system's, but it never runs
faster or slower than by a fifth. So an hour that appears from nowhere refuses no job that is being profiled,
and an hour that disappears stalls no policy. Time for which the machine was suspended has passed, and counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLEW = 0.2
"""By how much of the time that passes the clock may be faster or slower while it catches up."""


def elapsed_s() -> float:
    """Seconds since some moment, those while the machine was suspended included; never goes back."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)


class SteadyClock:
    """Unix time from a monotonic clock, which follows the wall clock slowly."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = elapsed_s
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._lock = threading.Lock()
        self._at_s, self._now_s = monotonic(), wall()

    def __call__(self) -> float:
        """The present moment, in Unix seconds."""
        with self._lock:
            at_s, wall_s = self._monotonic(), self._wall()
            passed_s = max(at_s - self._at_s, 0.0)
            behind_s = wall_s - (self._now_s + passed_s)
            most_s = SLEW * passed_s
            self._now_s += passed_s + min(max(behind_s, -most_s), most_s)
            self._at_s = at_s
            return self._now_s


now_s = SteadyClock()
"""The clock of this process."""
