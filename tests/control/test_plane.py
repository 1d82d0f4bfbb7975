"""The loop: when it takes turns, and what becomes of a turn that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from swell.control import plane as module
from swell.control.errors import StoreUnavailable
from swell.control.plane import Loop

WAIT_S = 20.0


class Turns:
    """Counts turns, and fails when told to."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()
        if self.error is not None:
            raise self.error

    def reach(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, WAIT_S)


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def started(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    loop = Loop(turns, lambda: 3600.0)
    loop.start()
    yield loop
    loop.stop()


def test_it_begins_with_a_turn_and_takes_one_when_woken(started: Loop, turns: Turns) -> None:
    assert turns.reach(1)
    before = turns.count
    started.wake()
    assert turns.reach(before + 1)


def test_it_takes_a_turn_when_one_is_due(turns: Turns) -> None:
    loop = Loop(turns, lambda: 0.01)
    loop.start()
    assert turns.reach(5)
    loop.stop()


def test_it_gathers_for_as_long_as_turns_take_unless_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GATHER_S", 3600.0)
    monkeypatch.setattr(module.time, "perf_counter", iter(range(0, 10_000_000, 1000)).__next__)
    hurried, turns = threading.Event(), Turns()
    loop = Loop(turns, lambda: 3600.0, hurried.is_set)
    hurried.set()
    loop.start()
    for _ in range(3):  # every turn takes 1000 s by that clock
        before = turns.count
        loop.wake()
        assert turns.reach(before + 1)
    loop.stop()


def test_a_turn_that_fails_is_tried_again_and_its_trouble_is_shown_until_one_succeeds(
    started: Loop, turns: Turns
) -> None:
    turns.error = StoreUnavailable("the disk is full")
    started.wake()
    assert turns.reach(turns.count + 3)
    assert started.trouble == "the disk is full"
    turns.error = ValueError("a mistake of ours")
    assert turns.reach(turns.count + 2)
    assert "internal error" in started.trouble
    turns.error = None
    assert turns.reach(turns.count + 1)
    started.stop()
    assert started.trouble == ""


def test_it_ends_when_it_is_stopped(turns: Turns) -> None:
    loop = Loop(turns, lambda: 0.0)
    loop.start()
    assert turns.reach(1)
    loop.stop()
    count = turns.count
    loop.wake()
    assert turns.count == count
