"""Many submissions, one commit: whoever comes while the disk is busy goes together with the next write.

A commit waits for the disk whatever is in it. So callers put their wish into a queue and pass a turnstile one
by one; the first whose wish is still open serves all that wait by then, in one transaction. Under load the
cost of the disk is shared, with one caller alone nothing is added, and nobody can be overtaken for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Wish = TypeVar("Wish")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Ticket(Generic[Wish, Answer]):
    """A wish and what became of it: an answer, or the reason why not."""

    wish: Wish
    answer: Answer | None = None
    refusal: BaseException | None = None

    @property
    def open(self) -> bool:
        """Whether nobody has dealt with it yet."""
        return self.answer is None and self.refusal is None


class Intake(Generic[Wish, Answer]):
    """Serves wishes of many threads in batches."""

    def __init__(self, serve: Callable[[Sequence[Ticket[Wish, Answer]]], None], *, most: int = 64) -> None:
        self._serve = serve
        self._most = most
        self._waiting: deque[Ticket[Wish, Answer]] = deque()
        self._turnstile = threading.Lock()

    def __call__(self, wish: Wish) -> Answer:
        """Have a wish served, alone or with others; raises what `serve` refused it with."""
        ticket: Ticket[Wish, Answer] = Ticket(wish)
        self._waiting.append(ticket)
        with self._turnstile:
            while ticket.open:
                self._serve_batch()
        if ticket.refusal is not None:
            raise ticket.refusal
        assert ticket.answer is not None
        return ticket.answer

    def _serve_batch(self) -> None:
        # Only the holder of the turnstile takes tickets out, so every ticket is served exactly once.
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most))]
        try:
            self._serve(batch)
        except BaseException as error:
            # All or nothing: what was answered within a transaction that failed was not answered.
            for ticket in batch:
                if ticket.refusal is None:
                    ticket.answer, ticket.refusal = None, error
            if not isinstance(error, Exception):
                raise
