"""The lease: which of several control planes on one store leads.

    candidate = LeaseCandidate(table, LeaseHolder(name="a", url="https://a:7373", host="a"))
    candidate.start()
    candidate.tenure        the right to lead, or None while another control plane leads

A control plane that leads has a *fencing number*, higher than that of every leader before it, and renews
its lease every second. A standby takes the lease over once it has run out, which it does when the leader
died, was frozen or was cut off from the store; a leader that ends in good order releases it.

Nothing rests on clocks that agree. Every transaction of a leader checks the fencing number inside the
database (`control/postgres.py`), so nothing is written under a lease that was lost. When a lease runs out
is decided by the database's clock alone. What is not written, such as telling a job to grow, is done only
while `Tenure.valid`, which a leader measures from the moment before it asked, so that its own tenure always
ends before the database gives the lease to another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swell.control.errors import StoreUnavailable
from swell.domain import SwellError
from swell.engines.parts import Part, elapsed_s

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""A lease that is not renewed for this long may be taken over."""
RENEW_S = 1.0
"""Seconds between two renewals."""
LOOK_S = 0.3
"""Seconds between two looks of a standby."""
MARGIN_S = 0.5
"""By how much a leader's tenure ends before its lease runs out in the database."""
REST_S = 5.0
"""How long a control plane that took the lease and could not come up leaves it to others."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A control plane, as the others see it."""

    name: str
    url: str
    host: str
    """The machine it runs on."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The control plane that leads at the moment."""

    number: int
    """Its fencing number."""
    holder: LeaseHolder


class LeaseTable(Protocol):
    """Where the lease is kept. Raises StoreUnavailable if that cannot be reached."""

    def take(self, holder: LeaseHolder) -> int | None:
        """Take the lease if it is free or has run out; returns the new fencing number, or None."""

    def renew(self, number: int) -> bool:
        """Renew the lease of this number; False if another control plane has taken it over."""

    def release(self, number: int) -> None:
        """Give the lease of this number back; nothing can be written under the number from then on."""

    def leader(self) -> Leader | None:
        """Who leads; None if nobody has a lease that has not run out."""

    def close(self) -> None:
        """Close the connection."""


class Tenure:
    """The right of this process to lead, under one fencing number."""

    def __init__(self, number: int, asked_s: float, clock: Callable[[], float] = elapsed_s) -> None:
        """`asked_s`: the moment, by `clock`, before the lease was asked for."""
        self.number = number
        self._clock = clock
        self._until_s = asked_s + LEASE_S - MARGIN_S
        self.over = False
        """Whether the lease is lost or released for good."""

    @property
    def valid(self) -> bool:
        """Whether no other control plane can lead now. May become true again unless the tenure is over."""
        return not self.over and self._clock() < self._until_s

    def renewed(self, asked_s: float) -> None:
        """Note that the lease was renewed, as asked for at `asked_s`."""
        self._until_s = asked_s + LEASE_S - MARGIN_S


class LeaseCandidate:
    """Takes the lease when it can, and renews it; a thread calls `step`."""

    def __init__(
        self,
        table: LeaseTable,
        holder: LeaseHolder,
        *,
        clock: Callable[[], float] = elapsed_s,
        once: bool = False,
    ) -> None:
        """`once`: after a lost lease do not try to get it again."""
        self.holder = holder
        self.tenure: Tenure | None = None
        self.leader: Leader | None = None
        """Who led when this standby looked last; None while this control plane leads."""
        self.trouble = ""
        """Why the lease cannot be looked at, or why this control plane could not lead; empty if all is
        well."""
        self.withdrawn = False
        """Set once this control plane is about to end: it does not take the lease any more."""
        self.part = Part("lease", self._run)
        self.changed = threading.Event()
        """Set whenever `tenure` or `leader` has changed."""
        self._table = table
        self._clock = clock
        self._once = once
        self._rest_until_s = float("-inf")
        self._lock = threading.Lock()

    def step(self) -> None:
        """Take the lease or renew it, or look who has it."""
        with self._lock:
            try:
                if self.tenure is not None:
                    self._renew(self.tenure)
                elif self._clock() >= self._rest_until_s and not self.withdrawn:
                    self._stand()
                else:
                    self._see(self._table.leader())
                    return  # the trouble that this control plane rests from is still to be seen
                self.trouble = ""
            except StoreUnavailable as error:
                # The leader may still be the one that was seen last; if not, it will say so itself.
                self.trouble = str(error)

    def _renew(self, tenure: Tenure) -> None:
        if tenure.over:
            return
        asked_s = self._clock()
        if self._table.renew(tenure.number):
            tenure.renewed(asked_s)
            return
        log.warning("another control plane has taken the lead over from number %d", tenure.number)
        tenure.over = True
        if not self._once:
            self.tenure = None
            self._see(self._table.leader())
        self.changed.set()

    def _stand(self) -> None:
        asked_s = self._clock()
        number = self._table.take(self.holder)
        if number is None:
            self._see(self._table.leader())
            return
        self.tenure, self.leader = Tenure(number, asked_s, self._clock), None
        self.changed.set()

    def _see(self, leader: Leader | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self.changed.set()

    def give_up(self, why: str = "") -> None:
        """Release the lease. With a reason: because this control plane cannot lead; it rests for a while."""
        with self._lock:
            tenure, self.tenure = self.tenure, None
            if why:
                self.trouble, self._rest_until_s = why, self._clock() + REST_S
            if tenure is not None and not tenure.over:
                tenure.over = True
                try:
                    self._table.release(tenure.number)
                except StoreUnavailable as error:
                    log.warning("the lease could not be released, it runs out instead: %s", error)
            self.changed.set()

    def win(self, patience_s: float) -> Tenure | None:
        """Try for so long to get the lease."""
        give_up_s = time.monotonic() + patience_s
        while True:
            self.step()
            if self.tenure is not None or time.monotonic() > give_up_s:
                return self.tenure
            time.sleep(0.1)

    def start(self) -> None:
        """Step in a thread from now on."""
        self.part.start()

    def stop(self) -> None:
        self.part.stop(10.0)
        self.give_up()
        self._table.close()

    def _run(self) -> None:
        while not self.part.stopping.is_set():
            self.part.beat(busy=True)  # the store may be slow
            self.step()
            self.part.beat()
            self.part.stopping.wait(LOOK_S if self.tenure is None else RENEW_S)


# Leading and stepping down, as the lease comes and goes.
#
#     succession = Succession(candidate, lead, changed)
#     succession.start()
#
# `lead` brings a control plane up under a tenure and returns a function that brings it down again. Everything
# of a former leadership (records in memory, connections, threads) is dropped, and the next one begins from
# the store.


StepDown = Callable[[], None]


class Succession:
    """Follows a candidate in a thread of its own."""

    def __init__(
        self,
        candidate: LeaseCandidate,
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
