"""Many submissions, one commit: submissions that arrive while the disk is busy share the next write.

A commit waits for the disk, however much is in it. So the calling threads queue up. The first one serves all
submissions that wait by then, in one transaction, and hands over to the first that arrived meanwhile. Under
load the callers share the cost of the disk; a caller who is alone pays nothing extra; the order of arrival is
kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Ticket(Generic[Item, Answer]):
    """One submission in the queue, and its outcome: an answer, or the error it is refused with."""

    submission: Item
    answer: Answer | None = None
    refusal: BaseException | None = None
    called: threading.Event = field(default_factory=threading.Event)
    """Set once the ticket has been served, or once its thread is to serve the next batch."""

    @property
    def open(self) -> bool:
        """Whether the ticket has not been served yet."""
        return self.answer is None and self.refusal is None


class Intake(Generic[Item, Answer]):
    """Serves the submissions of many threads in batches."""

    def __init__(self, serve: Callable[[Sequence[Ticket[Item, Answer]]], None], *, most: int = 64) -> None:
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Ticket[Item, Answer]] = deque()
        self._busy = False  # a thread is serving a batch, or has been called to serve the next one

    def __call__(self, submission: Item) -> Answer:
        """Have a submission served, alone or in a batch; raises the error that `serve` refused it with."""
        ticket: Ticket[Item, Answer] = Ticket(submission)
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
        """Serve the tickets that wait, the caller's first, and call the thread that serves next."""
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most))]
        try:
            self._serve(batch)
        except BaseException as error:
            # The transaction failed as a whole, so answers that were given inside it do not count.
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
