"""Many wishes, few batches; each is served once, in order, and failures reach who they concern."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from swell.control.desks import Intake, Ticket
from swell.domain import InputError


def test_wishes_that_come_together_are_served_together_once_and_in_order() -> None:
    batches: list[list[int]] = []

    def serve(tickets: Sequence[Ticket[int, int]]) -> None:
        batches.append([ticket.submission for ticket in tickets])
        time.sleep(0.01)
        for ticket in tickets:
            ticket.answer = ticket.submission * 2 + 1

    intake: Intake[int, int] = Intake(serve, most=16)
    answers: dict[int, int] = {}

    def ask(first: int) -> None:
        for wish in range(first, first + 10):
            answers[wish] = intake(wish)

    threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {100 * i + j: 2 * (100 * i + j) + 1 for i in range(30) for j in range(10)}
    served = [wish for batch in batches for wish in batch]
    assert sorted(served) == sorted(answers), "a wish was served twice or never"
    assert max(map(len, batches)) <= 16
    assert len(batches) < len(served) / 3, "nothing was gathered"


def test_a_caller_alone_is_served_at_once() -> None:
    def serve(tickets: Sequence[Ticket[str, str]]) -> None:
        (ticket,) = tickets
        ticket.answer = ticket.submission.upper()

    assert Intake(serve)("a") == "A"


def test_one_refusal_is_one_callers_and_a_failure_is_everybodys() -> None:
    gate, entered = threading.Event(), threading.Event()
    broken = OSError("disk full")

    def serve(tickets: Sequence[Ticket[str, str]]) -> None:
        if tickets[0].submission == "first":
            entered.set()
            gate.wait(10)
        for ticket in tickets:
            if ticket.submission == "bad":
                ticket.refusal = InputError("bad")
            else:
                ticket.answer = "done"
        if any(ticket.submission == "fatal" for ticket in tickets):
            raise broken

    intake: Intake[str, str] = Intake(serve)
    outcomes: dict[str, object] = {}

    def ask(wish: str) -> None:
        try:
            outcomes[wish] = intake(wish)
        except Exception as error:
            outcomes[wish] = error

    def together(*wishes: str) -> None:
        gate.clear()
        entered.clear()
        threads = [threading.Thread(target=ask, args=("first",))]
        threads[0].start()
        entered.wait(10)
        for wish in wishes:
            threads.append(threading.Thread(target=ask, args=(wish,)))
            threads[-1].start()
        while len(intake._waiting) < len(wishes):
            time.sleep(0.001)
        gate.set()
        for thread in threads:
            thread.join(10)

    together("good", "bad")
    assert outcomes["good"] == "done"
    assert isinstance(outcomes["bad"], InputError)
    together("good", "bad", "fatal")
    assert outcomes["first"] == "done", "the batch before had nothing to do with it"
    assert outcomes["good"] is broken, "an answer from a transaction that failed"
    assert isinstance(outcomes["bad"], InputError)
    with pytest.raises(OSError, match="disk full"):
        intake("fatal")
    assert intake("fine") == "done", "the queue goes on"
