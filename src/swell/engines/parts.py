"""Parts of the platform that must not end: threads that are started again, and that say how they are.

    part = Part("engine", work)        work() calls part.beat() at least every few seconds
    part.start()
    part.trouble                       '' while all is well, else a line for people

If `work` raises, the error is logged and `work` is called again after a moment. If the thread itself has
ended, `look` starts another one. `trouble` is what `/healthz` and `swell_trouble` show.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

# The platform's clock: Unix time that neither jumps nor goes back.
#
# Deadlines and events are in Unix time, and so is everything the control plane compares with them. The
# system's clock may be set while swell runs, by hand or by NTP. This clock follows the system's, but it
# never runs faster or slower than by a fifth. So an hour that appears from nowhere refuses no job that is
# being profiled, and an hour that disappears stalls no policy. Time for which the machine was suspended has
# passed, and counts.


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


log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""How long a part that failed waits before it goes on; twice as long each time, up to `MOST_AGAIN_S`."""
MOST_AGAIN_S = 4.0
SILENT_S = 4.0
"""A part that has not given a sign of life for this long is in trouble."""
BUSY_S = 60.0
"""The same while it says that it is busy with one thing that may take long."""
SHOWN_S = 3.0
"""How long a failure is shown after the part goes on, so that nobody who looks misses it."""


class Part:
    """One thread that must not end."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """`work` runs until `stopping` is set. It must be able to begin again after it was interrupted."""
        self.name = name
        self.stopping = threading.Event()
        self.failures = 0
        """How often the part had to be started again."""
        self._work = work
        self._thread: threading.Thread | None = None
        self._beat_s = time.monotonic()
        self._patience_s = SILENT_S
        self._error = ""
        self._failed_s = float("-inf")
        self._lock = threading.Lock()

    def start(self) -> None:
        self.beat()
        with self._lock:
            self._thread = threading.Thread(target=self._run, name=f"swell-{self.name}", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Have `work` end, and wait for that."""
        self.stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def beat(self, *, busy: bool = False) -> None:
        """Give a sign of life; `busy`: the next one may take long."""
        self._beat_s, self._patience_s = time.monotonic(), BUSY_S if busy else SILENT_S

    @property
    def trouble(self) -> str:
        """Why this part does not do its work; empty if it does."""
        if self._thread is None or self.stopping.is_set():
            return ""
        now_s = time.monotonic()
        if not self._thread.is_alive():
            return f"the {self.name} thread has ended; it is being started again"
        if self._error and now_s - self._failed_s < SHOWN_S + MOST_AGAIN_S:
            return (
                f"the {self.name} thread failed ({self._error}) and was started again; see the server's log"
            )
        if now_s - self._beat_s > self._patience_s:
            return f"the {self.name} thread has not answered for {now_s - self._beat_s:.0f} s"
        return ""

    def look(self) -> str:
        """Start the thread again if it has ended; returns what the trouble was, empty if there is none."""
        found = self.trouble
        with self._lock:
            dead = self._thread is not None and not self._thread.is_alive() and not self.stopping.is_set()
        if dead:
            self._note("the thread ended")
            self.start()
        return found

    def _note(self, error: str) -> None:
        self.failures += 1
        self._error, self._failed_s = error, time.monotonic()

    def _run(self) -> None:
        again_s = AGAIN_S
        while not self.stopping.is_set():
            began_s = time.monotonic()
            try:
                self._work()
            except BaseException as error:
                self._note(repr(error)[:200])
                with contextlib.suppress(Exception):
                    log.exception("the %s thread failed and is started again", self.name)
            if time.monotonic() - began_s > 60.0:
                again_s = AGAIN_S
            self.stopping.wait(again_s)
            again_s = min(2 * again_s, MOST_AGAIN_S)
