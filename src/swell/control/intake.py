"""Many submissions, one commit: whoever comes while the disk is busy goes together with the next write.

A commit waits for the disk whatever is in it. So callers queue up; the one in front serves everybody who
waits by then, in one transaction, and hands over to the first who came meanwhile. Under load the cost of the
disk is shared, with one caller alone nothing is added, and nobody is overtaken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Wish = TypeVar("Wish")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Ticket(Generic[Wish, Answer]):
    """A wish and what became of it: an answer, or the reason why not."""

    wish: Wish
    answer: Answer | None = None
    refusal: BaseException | None = None
    called: threading.Event = field(default_factory=threading.Event)
    """Set once it was served, or once it is its turn to serve."""

    @property
    def open(self) -> bool:
        """Whether nobody has dealt with it yet."""
        return self.answer is None and self.refusal is None


class Intake(Generic[Wish, Answer]):
    """Serves wishes of many threads in batches."""

    def __init__(self, serve: Callable[[Sequence[Ticket[Wish, Answer]]], None], *, most: int = 64) -> None:
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Ticket[Wish, Answer]] = deque()
        self._busy = False  # somebody serves, or has been called to

    def __call__(self, wish: Wish) -> Answer:
        """Have a wish served, alone or with others; raises what `serve` refused it with."""
        ticket: Ticket[Wish, Answer] = Ticket(wish)
        with self._lock:
            self._waiting.append(ticket)
            first, self._busy = not self._busy, True
        if not first:
            ticket.called.wait()
        if ticket.open:
            self._serve_batch()
        if ticket.refusal is not None:
            raise ticket.refusal
        assert ticket.answer is not None
        return ticket.answer

    def _serve_batch(self) -> None:
        """Serve those who wait, the caller in front, and call the next."""
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most))]
        try:
            self._serve(batch)
        except BaseException as error:
            # All or nothing: what was answered within a transaction that failed was not answered.
            for ticket in batch:
                if ticket.refusal is None:
                    ticket.answer, ticket.refusal = None, error
        finally:
            with self._lock:
                self._busy = bool(self._waiting)
                following = self._waiting[0] if self._waiting else None
            for ticket in batch:
                ticket.called.set()
            if following is not None:
                following.called.set()
