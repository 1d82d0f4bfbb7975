"""Live events for many listeners at the price of one.

One task reads new events from the control plane and keeps the latest in a window. Of a listener only the
number of the last event it has seen is kept: it reads on from the window, or from the store if it is further
behind. So a slow listener costs no memory and misses nothing, and listeners that have seen the same number
and may see the same jobs share the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swell.api.schemas import EventView
from swell.control.errors import NotFound, StoreUnavailable, Unreadable
from swell.domain import Event, EventKind
from swell.engines.parts import BUSY_S, MOST_AGAIN_S

if TYPE_CHECKING:
    from swell.control.plane import ControlPlane

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""How long to wait after events could not be read; twice as long each time, up to `MOST_AGAIN_S`."""
_PAGE = 1000
_OWNERS = 20_000
_PIECE = 256
"""Most events of the window that are sent to a listener at a time."""
_GATHER_PER_LISTENER_S = 0.0003
"""Events are gathered for longer if many listen: a message to each of a thousand holds up all requests."""
_SHARED_BYTES = 8 << 20
"""Most bytes that are kept because several listeners need the same."""

Call = Callable[..., Awaitable[Any]]
"""Runs a blocking function in the server's pool of threads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event in the window, ready to be sent."""

    seq: int
    owner: str | None
    """The owner of the event's job; None for events of nodes, which all users may see."""
    job_id: str | None
    frame: bytes


class EventHub:
    """Follows the control plane's events and hands them to listeners."""

    def __init__(
        self,
        plane: ControlPlane,
        call: Call,
        *,
        window: int = 4096,
        gather_s: float = 0.05,
        beat_s: float = 15.0,
    ) -> None:
        self._plane = plane
        self._call = call
        self._window = window
        self._gather_s = gather_s
        self._beat_s = beat_s
        self._entries: list[Entry] = []
        self._floor = 0  # every event after this number, up to `last`, is in the window
        self.last = 0
        """Number of the newest event known here."""
        self.listeners = 0
        self._owners: dict[str, str] = {}
        self._shared: dict[tuple[int, str | None, str | None], tuple[bytes, int]] = {}
        self._shared_bytes = 0
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._error = ""
        """Why the last attempt to read events failed; empty if it did not."""
        self._since_s = math.inf
        """Since when events are being read; infinite if they are not."""
        self.closed = False

    # -- following the plane -----------------------------------------------------------------------------

    async def start(self, last_seq: int) -> None:
        """Follow the control plane's events after this number."""
        loop = self._loop = asyncio.get_running_loop()
        self.last = self._floor = last_seq

        def wake(*_: object) -> None:
            # The event loop may be closed already, because the control plane outlives the server.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

        self._unsubscribe = self._plane.subscribe(wake)
        self._wake.set()  # something may have happened before the subscription
        self._begin()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._follow())

    def look(self) -> str:
        """Begin to follow again if that has ended; returns what the trouble was, empty if there is none.

        Belongs to the event loop, as all else here.
        """
        if self._task is not None and self._task.done() and not self.closed:
            self._error = "it had ended"
            self._begin()
            self._wake.set()
        return self.trouble

    @property
    def trouble(self) -> str:
        """Why listeners get no new events; empty if they do."""
        silent_s = time.monotonic() - self._since_s
        if self.closed or (not self._error and silent_s < BUSY_S):
            return ""
        return self._error or f"the store has not answered for {silent_s:.0f} s"

    def poke(self) -> None:
        """Have all streams look whether they are still allowed. May be called from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End the streams of all listeners."""
        self.closed = True
        self._changed.set()

    async def stop(self) -> None:
        """Stop following events, and end all streams."""
        self.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        again_s = AGAIN_S
        while not self.closed:
            await self._wake.wait()
            self._wake.clear()
            self._since_s = time.monotonic()
            try:
                while fresh := await self._call(self._read, self.last):
                    self._add(fresh)
                    self._since_s = time.monotonic()
                self._error, again_s = "", AGAIN_S
            except Exception as error:
                if not isinstance(error, StoreUnavailable):  # /healthz looks at the store itself
                    log.exception("new events cannot be read; it is tried again in %g s", again_s)
                    self._error = repr(error)[:200]
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, MOST_AGAIN_S)
                self._wake.set()
            self._since_s = math.inf
            # A burst becomes one message to each listener.
            await asyncio.sleep(self._gather_s + self.listeners * _GATHER_PER_LISTENER_S)

    def _read(self, since: int, job_id: str | None = None) -> list[Entry]:
        return [self._entry(seq, event) for seq, event in self._plane.events(since, job_id, _PAGE)]

    def _entry(self, seq: int, event: Event) -> Entry:
        """An event of the log, ready to be sent; one that cannot be sent is skipped by all listeners."""
        owner, data = self._owner(event), b""
        try:
            data = frame(seq, event)
        except Exception:
            log.exception("event %d cannot be sent and is left out", seq)
        return Entry(seq, owner, event.job_id, data)

    def _owner(self, event: Event) -> str | None:
        if event.job_id is None:
            return None
        owner = self._owners.get(event.job_id)
        if owner is None:
            owner = self._find_owner(event)
            if len(self._owners) >= _OWNERS:
                self._owners.clear()
            self._owners[event.job_id] = owner
        return owner

    def owner_of(self, event: Event) -> str | None:
        """The owner of an event's job; None for events of nodes, which all users may see. May block."""
        return self._owner(event)

    def _find_owner(self, event: Event) -> str:
        if event.kind is EventKind.SUBMITTED and "owner" in event.data:
            return str(event.data["owner"])
        try:
            return self._plane.jobs.get(str(event.job_id)).owner
        except NotFound:
            return ""  # a job without an owner: only administrators see it
        except Unreadable as error:
            return error.owner

    def _add(self, fresh: list[Entry]) -> None:
        self._entries += fresh
        self.last = fresh[-1].seq
        if len(self._entries) > 2 * self._window:
            cut = len(self._entries) - self._window
            self._floor = self._entries[cut - 1].seq
            del self._entries[:cut]
        self._shared.clear()
        self._shared_bytes = 0
        self._notify()

    # -- listening ---------------------------------------------------------------------------------------

    async def stream(
        self,
        scope: str | None,
        job_id: str | None,
        since: int,
        allowed: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[bytes]:
        """Server-sent events after number `since`: of one owner (or all), of one job (or all).

        The stream ends once `allowed` says no, which is asked at every event, every beat and every `poke`.
        """
        cursor = since
        # Before the first event, tell the client the number to come back with after a lost connection.
        yield f"retry: 1000\nid: {since}\n\n".encode()
        self.listeners += 1
        try:
            while not self.closed and allowed():
                changed = self._changed
                if cursor < self._floor:
                    frames, cursor = await self._catch_up(cursor, scope, job_id)
                else:
                    frames, cursor = self._frames(cursor, scope, job_id)
                if frames:
                    yield frames
                elif cursor >= self.last and not await self._wait(changed, self._beat_s):
                    yield b": still here\n\n"
        finally:
            self.listeners -= 1

    async def job_changed(self, job_id: str, since: int, timeout_s: float) -> int:
        """Wait, `timeout_s` at most, until a job has an event after `since`; returns the newest number."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while not self.closed:
            changed, head = self._changed, self.last
            if since < self._floor or self._happened(since, job_id):
                return head
            since = head
            if not await self._wait(changed, until_s - clock()):
                return head
        return self.last

    def page(
        self, scope: str | None, job_id: str | None, since: int, limit: int
    ) -> tuple[list[EventView], int]:
        """At most `limit` events that the asker may see, and the number to go on from. Blocks."""
        found: list[EventView] = []
        while page := self._plane.events(since, job_id, _PAGE):
            for seq, event in page:
                since = seq
                if scope is None or self._owner(event) in (None, scope):
                    found.append(EventView.of_event(seq, event))
                    if len(found) == limit:
                        return found, since
            if len(page) < _PAGE:
                break
        return found, since

    async def _wait(self, changed: asyncio.Event, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(changed.wait(), max(timeout_s, 0.0))
        except TimeoutError:
            return False
        return True

    async def _catch_up(self, cursor: int, scope: str | None, job_id: str | None) -> tuple[bytes, int]:
        """Read a page from the store, for a listener that is too far behind for the window."""
        head = self.last
        page: list[Entry] = await self._call(self._read, cursor, job_id)
        # A page that is not full contains all events there were when it was read, hence all up to `head`.
        cursor = page[-1].seq if len(page) == _PAGE else max(head, page[-1].seq if page else 0)
        return b"".join(entry.frame for entry in page if _visible(entry, scope, job_id)), cursor

    def _happened(self, since: int, job_id: str) -> bool:
        """Whether the window has an event of a job after number `since`."""
        first = bisect_right(self._entries, since, key=lambda entry: entry.seq)
        return any(entry.job_id == job_id for entry in self._entries[first:])

    def _frames(self, cursor: int, scope: str | None, job_id: str | None) -> tuple[bytes, int]:
        """The next events of the window for a listener, `_PIECE` at most, and the number to go on from.

        Listeners that are at the same number share the bytes. How many bytes are kept for that is bounded:
        listeners that each begin at another number would else cost a copy of the window each.
        """
        key = (cursor, scope, job_id)
        shared = self._shared.get(key)
        if shared is None:
            first = bisect_right(self._entries, cursor, key=lambda entry: entry.seq)
            piece = self._entries[first : first + _PIECE]
            frames = b"".join(entry.frame for entry in piece if _visible(entry, scope, job_id))
            shared = frames, piece[-1].seq if piece else max(cursor, self.last)
            if self._shared_bytes + len(frames) <= _SHARED_BYTES:
                self._shared[key] = shared
                self._shared_bytes += len(frames)
        return shared


def _visible(entry: Entry, scope: str | None, job_id: str | None) -> bool:
    if job_id is not None and entry.job_id != job_id:
        return False
    return scope is None or entry.owner is None or entry.owner == scope


def frame(seq: int, event: Event) -> bytes:
    """An event as a server-sent event."""
    body = EventView.of_event(seq, event).model_dump_json()
    return f"id: {seq}\nevent: {event.kind.value}\ndata: {body}\n\n".encode()
