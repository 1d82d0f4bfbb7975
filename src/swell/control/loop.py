"""The control plane's loop: a thread that takes a turn when something happened, when a decision is due, and
at an interval. All that happened meanwhile becomes one turn.

A turn that fails changes nothing and is tried again; what was wrong is in `trouble` until a turn succeeds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from swell.domain import SwellError

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""A burst is given this long to arrive before it becomes one turn."""
MOST_GATHER_S = 0.5
"""With many jobs a turn takes a while; then people's requests get at least three times as long."""
RETRY_S = 1.0


class Loop:
    """Takes turns in a thread of its own."""

    def __init__(self, turn: Callable[[], None], wait_s: Callable[[], float]) -> None:
        """`turn` does the work; `wait_s` says how long to wait for the next one if nothing happens."""
        self.trouble = ""
        """What keeps the control plane from working, if anything does (the store is full, say)."""
        self._turn = turn
        self._wait_s = wait_s
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, with a turn at once."""
        self._thread = threading.Thread(target=self._run, name="swell-control", daemon=True)
        self._thread.start()
        self.wake()

    def stop(self) -> None:
        """End after the present turn."""
        self._stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def wake(self) -> None:
        """Something happened."""
        self._awake.set()

    def _run(self) -> None:
        turn_s = 0.0
        while not self._stopping.is_set():
            if self._awake.wait(timeout=self._wait_s()):
                self._stopping.wait(min(max(GATHER_S, 3 * turn_s), MOST_GATHER_S))
            self._awake.clear()
            if self._stopping.is_set():
                return
            began_s = time.perf_counter()
            try:
                self._turn()
                self.trouble = ""
            except SwellError as error:
                # The store may be full or the database away: nothing was changed, so try again.
                self.trouble = str(error)
                self._retry()
            except Exception as error:
                # A mistake of ours. Jobs train on; people must see that nothing is decided.
                log.exception("a turn of the control plane failed")
                self.trouble = f"internal error: {error!r}; see the server's log"
                self._retry()
            turn_s = time.perf_counter() - began_s

    def _retry(self) -> None:
        self._stopping.wait(RETRY_S)
        self._awake.set()
