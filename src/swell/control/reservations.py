"""Reservations on a live cluster: the calendar in the store, the slots it holds, and when training left them.

The board chooses the slots, as in the simulator. What is ours here: a reservation is on disk before anybody
sees the answer, one that would break a promise is refused unless it is forced, and the log says when a
reservation got other slots (`held`) and when the last worker had left them (`yielded`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from swell.board import Held, held_events
from swell.control.book import Book
from swell.control.errors import Conflict, NotFound
from swell.control.scheduler import Scheduler
from swell.domain import NO_RESERVATIONS, Calendar, Cluster, Event, EventKind, InputError, Reservation
from swell.engines import Observed, RunState

log = logging.getLogger(__name__)

SETTING = "reservations"
YIELD_POLL_S = 0.2
"""How often to look whether workers have left, while a reservation waits for that and no engine says so."""
_GONE = (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True, slots=True)
class ReservationState:
    """A reservation as people see it."""

    reservation: Reservation
    active: bool
    """Whether its hours are now."""
    slots: tuple[int, ...]
    """The slots that it holds."""
    yielded: bool
    """Whether training has left all of them: the service can use them."""
    heard_s: float | None
    """When the demand of a followed service was last heard of; None if it was not since the start."""
    endangered: tuple[str, ...] = ()
    """Jobs whose promised finish this reservation puts in danger."""


class Reservations:
    """The calendar of a live cluster. Its caller holds the control plane's lock."""

    def __init__(self, book: Book) -> None:
        self.calendar: Calendar = NO_RESERVATIONS
        self._book = book
        self._scheduler: Scheduler
        self._held: Held = {}
        """What the log says that reservations hold."""
        self._asked_s: dict[str, float] = {}
        """By reservation: when more slots were asked for, until the board has chosen them."""
        self._yielding: dict[str, float] = {}
        """By reservation: since when it waits for workers to leave its slots."""
        self._grown: list[str] = []
        """Reservations that got more slots, until it is known which promises that puts in danger."""
        self._endangered: frozenset[str] = frozenset()
        """Jobs whose danger has been told."""
        self._heard_s: dict[str, float] = {}

    def come_up(self, scheduler: Scheduler, now_s: float) -> None:
        """Read the store. Call this once the jobs that run are on the board."""
        stored = json.loads(self._book.store.setting(SETTING) or "{}")
        self.calendar = Calendar(tuple(_read(one) for one in stored.get("reservations", ())))
        board = scheduler.board
        total = len(board.base.node_of_gpu)
        slots = {name: frozenset(gpus) for name, gpus in stored.get("slots", {}).items()}
        self._held = {name: gpus for name, gpus in slots.items() if not gpus or max(gpus) < total}
        self._scheduler = scheduler
        board.calendar, board.reserved = self.calendar, dict(self._held)
        board.set_cluster(board.base, now_s, "slots are reserved")

    def next_change_s(self, now_s: float) -> float:
        """When the calendar has to be followed next."""
        return self.calendar.next_change_s(now_s)

    @property
    def waiting(self) -> bool:
        """Whether slots still have to be chosen for reservations, or workers have to leave them."""
        return bool(self._yielding or self._asked_s)

    @property
    def slots(self) -> frozenset[int]:
        return frozenset().union(*self._held.values())

    def follow(self, now_s: float) -> None:
        """Give reservations the slots that they want now."""
        self._scheduler.reserve(self.calendar, now_s)
        now = self._scheduler.board.reserved
        if now == self._held:
            self._asked_s.clear()
            return
        grown = [name for name, gpus in now.items() if gpus - self._held.get(name, frozenset())]
        events = held_events(self._held, now, now_s)
        with self._book.store.transaction():
            self._write(self.calendar, now)
            self._book.write([], events)
        self._held = dict(now)
        for name in grown:
            self._yielding.setdefault(name, min(self._asked_s.get(name, now_s), now_s))
        self._asked_s.clear()
        self._grown += grown

    def dangers(self, now_s: float) -> list[tuple[str, str]]:
        """Jobs whose promised finish is in danger since reservations got more slots, and what to tell.

        Asked after the turn's decision is carried out, because the answer may take as long as that decision.
        """
        grown, self._grown = self._grown, []
        if not grown:
            return []
        danger = frozenset(self._scheduler.endangered(self.calendar, now_s))
        new, self._endangered = danger - self._endangered, danger
        text = f"its promised finish is in danger: slots are reserved for {', '.join(grown)}"
        return [(job_id, text) for job_id in sorted(new)]

    def note_yielded(self, observed: Iterable[Observed], now_s: float) -> None:
        """Log the reservations whose slots the last worker has left."""
        occupied = {slot for job in observed if job.state not in _GONE for slot in job.placement}
        for name, since_s in list(self._yielding.items()):
            slots = self._held.get(name, frozenset())
            if slots & occupied:
                continue
            data = {"reservation": name, "gpus": sorted(slots), "after_s": round(now_s - since_s, 4)}
            if slots:
                self._book.write([], [Event(now_s, EventKind.YIELDED, data=data)])
            del self._yielding[name]

    # -- what people ask ---------------------------------------------------------------------------------

    def make(self, asked: Reservation, now_s: float, *, by: str, force: bool) -> ReservationState:
        """Make a reservation, or change the one of this name."""
        scheduler = self._scheduler
        _check(asked, scheduler.board.base)
        calendar = self.calendar.having(asked)
        before = scheduler.endangered(self.calendar, now_s)
        endangered = sorted(set(scheduler.endangered(calendar, now_s)) - set(before))
        if endangered and not force:
            raise Conflict(
                f"reservation '{asked.name}' would break what was promised to {', '.join(endangered)};"
                " choose other hours or fewer GPUs, or use --force to reserve all the same"
            )
        data = {"reservation": asked.name} | _plain(asked) | {"by": by}
        self._change(calendar, Event(now_s, EventKind.RESERVED, data=data))
        self._endangered = self._endangered.union(endangered)
        return self._state(asked, now_s, tuple(endangered))

    def remove(self, name: str, now_s: float, *, by: str) -> ReservationState:
        """Remove a reservation; training may have its slots again."""
        found = self.get(name)
        event = Event(now_s, EventKind.UNRESERVED, data={"reservation": name, "by": by})
        self._change(self.calendar.without(name), event)
        return self._state(found, now_s)

    def demand(self, name: str, gpus: int, now_s: float) -> ReservationState:
        """Note how many slots the service that a reservation follows wants now."""
        found = self.get(name)
        if found.most is None:
            raise Conflict(f"reservation '{name}' follows no service: it was made without --most")
        self._heard_s[name] = now_s
        if gpus > found.gpus:
            self._asked_s[name] = now_s
        if gpus != found.gpus:
            found = replace(found, gpus=gpus)
            self._change(self.calendar.having(found))
        return self._state(found, now_s)

    def get(self, name: str) -> Reservation:
        found = self.calendar.get(name)
        if found is None:
            raise NotFound(f"there is no reservation '{name}'; 'swell reserve list' shows them")
        return found

    def states(self, now_s: float) -> list[ReservationState]:
        return [self._state(one, now_s) for one in self.calendar.reservations]

    def _state(self, one: Reservation, now_s: float, endangered: tuple[str, ...] = ()) -> ReservationState:
        slots = self._held.get(one.name, frozenset())
        wanted = bool(one.nodes) or len(slots) >= one.gpus
        yielded = bool(slots) and wanted and one.name not in self._yielding
        heard_s = self._heard_s.get(one.name)
        return ReservationState(one, one.active(now_s), tuple(sorted(slots)), yielded, heard_s, endangered)

    def _change(self, calendar: Calendar, *events: Event) -> None:
        with self._book.store.transaction():
            self._write(calendar, self._held)
            self._book.write([], events)
        # Promises know of it at once; the slots follow in the next turn.
        self.calendar = self._scheduler.board.calendar = calendar

    def _write(self, calendar: Calendar, held: Held) -> None:
        content = {
            "reservations": [_plain(one) for one in calendar.reservations],
            "slots": {name: sorted(gpus) for name, gpus in held.items()},
        }
        self._book.store.set_setting(SETTING, json.dumps(content))


def _check(asked: Reservation, cluster: Cluster) -> None:
    """Refuse what this cluster does not have."""
    names = [node.name for node in cluster.nodes]
    if unknown := [node for node in asked.nodes if node not in names]:
        raise InputError(f"nodes: there is no node '{unknown[0]}'; nodes: {', '.join(names)}", field="nodes")
    total, field = len(cluster.node_of_gpu), "gpus" if asked.most is None else "most"
    if max(asked.gpus, asked.most or 0) > total:
        raise InputError(
            f"{field} must be at most {total}, the slots of this cluster, got {asked.most or asked.gpus}",
            field=field,
        )


def _plain(one: Reservation) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if value not in (None, "", ())}


def _read(raw: dict[str, Any]) -> Reservation:
    known = {field.name: raw[field.name] for field in fields(Reservation) if field.name in raw}
    return Reservation(**known | {"nodes": tuple(known.get("nodes", ()))})
