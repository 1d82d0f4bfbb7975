"""The control plane's loop: a thread that takes a turn when something happened, when a decision is due, and
at an interval. Everything that happened since the last turn is handled in one turn.

A turn that fails changes nothing and is tried again; `trouble` says what was wrong until a turn succeeds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from swell.domain import SwellError
from swell.engines.parts import Part

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""How long the loop waits once it is woken, so that a burst of events becomes one turn."""
MOST_GATHER_S = 0.5
"""The longest such wait. With many jobs a turn is long; the loop then waits three times as long as the last
turn took, because requests cannot be answered during a turn."""
RETRY_S = 1.0
BEAT_S = 1.0
"""A waiting loop gives a sign of life this often."""


class Loop:
    """Takes turns in a thread of its own."""

    def __init__(
        self,
        turn: Callable[[], None],
        wait_s: Callable[[], float],
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """`turn` does the work; `wait_s` says how long to wait for the next one if nothing happens; `hurried`
        whether somebody waits for what the next turn does, so that no more than GATHER_S is waited."""
        self.trouble = ""
        """Why the last turn failed (the store is full, say); empty if it succeeded."""
        self.part = Part("control", self._run)
        self._turn = turn
        self._wait_s = wait_s
        self._hurried = hurried
        self._awake = threading.Event()

    def start(self) -> None:
        """Begin, with a turn at once."""
        self.part.start()
        self.wake()

    def stop(self) -> None:
        """End after the present turn."""
        self.part.stopping.set()
        self.wake()
        self.part.stop(30.0)

    def wake(self) -> None:
        """Have a turn taken soon, because something happened."""
        self._awake.set()

    def _run(self) -> None:
        stopping, turn_s = self.part.stopping, 0.0
        while not stopping.is_set():
            if self._wait():
                stopping.wait(GATHER_S if self._hurried() else min(max(GATHER_S, 3 * turn_s), MOST_GATHER_S))
            self._awake.clear()
            if stopping.is_set():
                return
            began_s = time.perf_counter()
            self.part.beat(busy=True)
            try:
                self._turn()
                self.trouble = ""
            except SwellError as error:
                # The store may be full or the database away: nothing was changed, so try again.
                self.trouble = str(error)
                self._retry()
            except Exception as error:
                # A bug in swell. Jobs go on training, but people must see that nothing is decided.
                log.exception("a turn of the control plane failed")
                self.trouble = f"internal error: {error!r}; see the server's log"
                self._retry()
            self.part.beat()
            turn_s = time.perf_counter() - began_s

    def _wait(self) -> bool:
        """Wait until a turn is due; True if it is because something happened."""
        until_s = time.monotonic() + self._wait_s()
        while not self.part.stopping.is_set():
            self.part.beat()
            left_s = until_s - time.monotonic()
            if self._awake.wait(timeout=min(max(left_s, 0.0), BEAT_S)):
                return True
            if left_s <= BEAT_S:
                return False
        return False

    def _retry(self) -> None:
        self.part.beat()
        self.part.stopping.wait(RETRY_S)
        self._awake.set()
