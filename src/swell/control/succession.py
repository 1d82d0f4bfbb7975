"""Leading and stepping down, as the lease comes and goes.

    succession = Succession(candidate, lead, changed)
    succession.start()

`lead` brings a control plane up under a tenure and returns a function that brings it down again. Everything
of a former leadership (records in memory, connections, threads) is dropped, and the next one begins from
the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from swell.control.lease import Candidate, Tenure
from swell.domain import SwellError
from swell.engines.parts import Part

log = logging.getLogger(__name__)

StepDown = Callable[[], None]


class Succession:
    """Follows a candidate in a thread of its own."""

    def __init__(
        self,
        candidate: Candidate,
        lead: Callable[[Tenure], StepDown],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called whenever another control plane leads, or none does."""
        self.part = Part("succession", self._run)
        self._candidate = candidate
        self._lead = lead
        self._changed = changed
        self._led: Tenure | None = None
        self._step_down: StepDown | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to stand for the lead."""
        self._candidate.start()
        self.part.start()

    def stop(self) -> None:
        """Hand the lead over at once, and step down."""
        self.part.stopping.set()
        # Nothing can be written, decided or said to a job from here on, so the rest need not be waited for.
        self._candidate.withdrawn = True
        self._candidate.give_up()
        self.part.stop(60.0)
        with self._lock:
            self._leave()
        self._candidate.stop()

    def _run(self) -> None:
        while not self.part.stopping.is_set():
            self.part.beat()
            self._candidate.part.look()
            if self._candidate.changed.wait(1.0):
                self._candidate.changed.clear()
                self._changed()
            self.part.beat(busy=True)
            with self._lock:
                self.follow()

    def follow(self) -> None:
        """Step down if the lease was lost, and lead if it was won."""
        tenure = self._candidate.tenure
        if self._led is not None and self._led is not tenure:
            self._leave()
        if tenure is None or self._led is tenure or self.part.stopping.is_set():
            return
        try:
            self._step_down, self._led = self._lead(tenure), tenure
        except Exception as error:
            if not isinstance(error, SwellError):
                log.exception("this control plane could not take the lead")
            log.error("this control plane could not take the lead, and leaves it to others: %s", error)
            self._candidate.give_up(f"it could not take the lead: {error}")

    def _leave(self) -> None:
        step_down, self._step_down, self._led = self._step_down, None, None
        if step_down is not None:
            try:
                step_down()
            except Exception:
                log.exception("stepping down failed; nothing can be written under the old number")
