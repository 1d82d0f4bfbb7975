"""The control plane: the calls behind the HTTP API and the commands.

    plane.jobs.submit(request, owner)      plane.nodes.drain("node-0")
    plane.reservations.make(asked, by)     plane.teams.states()

Its conductor keeps the cluster in order, and its loop gives the conductor a turn when one is needed. Calls
and turns share one lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swell.control.book import Book, Recall, Subscriber
from swell.control.conductor import Conductor
from swell.control.desks import Access, JobDesk, NodeDesk, ReservationDesk, TeamDesk
from swell.control.errors import NotLeading, StoreUnavailable
from swell.control.limits import NO_LIMITS, OwnerLimits
from swell.control.renting import Renting
from swell.control.reservations import YIELD_POLL_S
from swell.control.retention import Keep, Retained, Retention
from swell.control.scheduler import Scheduler
from swell.control.store import Store
from swell.domain import Event, EventKind, SwellError
from swell.engines import Engine
from swell.engines.parts import Part, now_s
from swell.policies import DEFAULT, make_policy

# The control plane's loop: a thread that takes a turn when something happened, when a decision is due, and
# at an interval. Everything that happened since the last turn is handled in one turn.
#
# A turn that fails changes nothing and is tried again; `trouble` says what was wrong until a turn succeeds.


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


KEEP = Keep()
FIRST_HOUSEKEEPING_S = 60.0
HOUSEKEEPING_S = 3600.0
"""Seconds between two looks for what need not be kept any more."""


class ControlPlane:
    """Runs the platform, and has a desk for each thing that people ask about. Methods are thread-safe."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        home: Path,
        policy: str = DEFAULT,
        interval_s: float = 5.0,
        round_s: float | None = None,
        clock: Callable[[], float] = now_s,
        recall: Recall | None = None,
        limits: OwnerLimits = NO_LIMITS,
        keep: Keep = KEEP,
        end_unknown: bool = False,
        renting: Renting | None = None,
    ) -> None:
        """`interval_s`: seconds between two turns if nothing happens. `round_s`: the length of the policy's
        rounds, in place of its own. `recall`: returns what is known of a job before it runs, in place of the
        store's history. `keep`: what is kept of jobs that are over. `end_unknown`: end jobs that run here and
        that the store does not know. `renting`: nodes that are rented as the queue is worth them."""
        self.store = store
        self.engine = engine
        self.home = home
        self.clock = clock
        self._default_policy = policy
        self._interval_s = interval_s
        self._round_s = round_s
        self._conductor = Conductor(Book(store, recall), engine, home)
        self._conductor.end_unknown, self._conductor.limits = end_unknown, limits
        self._conductor.renting = renting
        self._loop = Loop(self.turn, self._wait_s, lambda: self._conductor.reservations.waiting)
        self._watchdog = Part("watchdog", self._watch)
        self._retention = Retention(store, home, keep)
        self._housekeeper = Part("housekeeper", self._keep_house)
        access = Access(self._conductor, clock, self._loop.wake)
        self._lock = access.lock
        self.jobs = JobDesk(access, limits, lambda: self.trouble)
        self.nodes = NodeDesk(access)
        self.reservations = ReservationDesk(access)
        self.teams = TeamDesk(access)

    def come_up(self) -> None:
        """Read the store and find the jobs that run, without the loop: the caller takes the turns."""
        held = {r.job_id: r.held for r in self.store.jobs(over=False, limit=1_000_000) if r.held}
        self.engine.start(self.wake, held)
        with self._lock:
            policy = self.store.setting("policy") or self._default_policy
            self._conductor.come_up(policy, self._round_s, self.clock())

    def start(self) -> None:
        """Come up and begin to take turns."""
        self.come_up()
        self._loop.start()
        self._watchdog.start()
        self._housekeeper.start()

    def stop(self) -> None:
        """Stop listening and deciding. Jobs go on."""
        self._watchdog.stop(5.0)
        self._housekeeper.stop(30.0)
        self._loop.stop()
        self.engine.close()

    def wake(self) -> None:
        """Have a turn taken soon, because something happened."""
        self._loop.wake()

    def turn(self) -> None:
        """One turn: listen, reconcile, decide if a decision is due."""
        with self._lock:
            if not self.store.leads:
                raise NotLeading()
            self._conductor.turn(self.clock())

    @property
    def trouble(self) -> str:
        """Why the last turn failed, or which part of the platform does not work; empty if all is well."""
        return self._loop.trouble or "; ".join(self.health().values())

    def health(self) -> dict[str, str]:
        """By name, the parts that do not do their work, and why. A thread that has ended is started again."""
        found = {part.name: part.look() for part in self._parts()}
        return {name: text for name, text in found.items() if text}

    def _parts(self) -> list[Part]:
        return [self._loop.part, self._watchdog, self._housekeeper, *self.engine.parts()]

    def _watch(self) -> None:
        """Look after the other threads, so that one that has ended works again although nobody asks."""
        while not self._watchdog.stopping.wait(1.0):
            self._watchdog.beat()
            self.health()

    def _keep_house(self) -> None:
        """Delete from time to time what need not be kept any more."""
        next_s = time.monotonic() + FIRST_HOUSEKEEPING_S
        while not self._housekeeper.stopping.wait(1.0):
            self._housekeeper.beat()
            if time.monotonic() < next_s or not self.store.leads:
                continue
            self._housekeeper.beat(busy=True)
            with contextlib.suppress(StoreUnavailable):
                self._retention.run(self.clock(), beat=lambda: self._housekeeper.beat(busy=True))
            next_s = time.monotonic() + HOUSEKEEPING_S

    def collect(self, keep_s: float | None, keep_bytes: int | None, *, dry: bool) -> Retained:
        """Delete now what need not be kept, or say what (`dry`). None: as the platform was told to keep."""
        keep = self._retention.keep
        keep = replace(
            keep,
            for_s=keep.for_s if keep_s is None else keep_s,
            most_bytes=keep.most_bytes if keep_bytes is None else keep_bytes,
        )
        return self._retention.run(self.clock(), keep, dry=dry)

    @property
    def due_s(self) -> float:
        """When a turn is due if nothing happens before: for the policy or the autoscaler, or because reserved
        hours change."""
        calendar_s = self._conductor.reservations.next_change_s(self.clock())
        renting = self._conductor.renting
        look_s = math.inf if renting is None else renting.look_s
        return min(self._conductor.scheduler.rhythm.due_s, calendar_s, look_s)

    def _wait_s(self) -> float:
        most_s = YIELD_POLL_S if self._conductor.reservations.waiting else self._interval_s
        return min(most_s, max(self.due_s - self.clock(), 0.0))

    def policy(self) -> str:
        """The present policy, with its options, as it was given."""
        with self._lock:
            return self._conductor.scheduler.policy_text

    @property
    def failed_policy(self) -> Mapping[str, str] | None:
        """The policy of another package that failed and was replaced, and why; read without a lock."""
        scheduler: Scheduler | None = getattr(
            self._conductor, "scheduler", None
        )  # none before it has come up
        return None if scheduler is None else scheduler.failed_policy

    def set_policy(self, text: str) -> None:
        """Decide by another policy from now on, also after a restart."""
        make_policy(text)
        with self._lock:
            self.store.set_setting("policy", text)
            self._conductor.scheduler.set_policy(text, self.clock())
            self.wake()

    def events(
        self, since_seq: int = 0, job_id: str | None = None, limit: int = 1000
    ) -> list[tuple[int, Event]]:
        """Events with a number above `since_seq`, oldest first."""
        return self.store.events(since_seq, job_id=job_id, limit=limit)

    def changes(self, kinds: Sequence[EventKind], since_s: float, limit: int) -> list[Event]:
        """Events of some kinds from a moment on, oldest first; only the newest if there are over `limit`."""
        return self.store.changes(kinds, since_s, limit)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback`, which must not block, with every event on disk; call the result to stop that."""
        with self._lock:
            return self._conductor.book.subscribe(callback)

    def stats(self) -> Mapping[str, Any]:
        """Figures for monitoring."""
        with self._lock:
            parts = {part.name: float(not part.trouble) for part in self._parts()}
            return self._conductor.stats(self.trouble) | {"part_up": parts}
