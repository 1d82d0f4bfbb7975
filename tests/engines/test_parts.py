"""Threads that must not end: they are started again, and they say so."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.engines import parts
from swell.engines.local import LocalSite
from swell.engines.parts import Part, SteadyClock
from swell.engines.supervised import SupervisedEngine


def test_a_part_that_fails_is_started_again_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AGAIN_S", 0.01)
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise SystemExit("no more")
        part.stopping.wait(20)

    part = Part("toy", work)
    part.start()
    wait_until(lambda: len(runs) == 2, 30, "the part to be started again")
    assert "toy" in part.trouble and "no more" in part.trouble
    monkeypatch.setattr(parts, "SHOWN_S", -parts.MOST_AGAIN_S)
    assert part.trouble == "", "later all is well again"
    part.stop(5)


def test_a_thread_that_has_ended_is_replaced_when_somebody_looks() -> None:
    part = Part("toy", lambda: part.stopping.wait(20) and None)
    part.start()
    part._thread = threading.Thread(target=lambda: None)
    part._thread.start()
    part._thread.join()
    assert "has ended" in part.look()
    assert part._thread.is_alive() and part.failures == 1
    part.stop(5)


def test_a_part_that_gives_no_sign_of_life_is_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("toy", lambda: part.stopping.wait(20) and None)
    part.start()
    assert part.trouble == ""
    monkeypatch.setattr(parts, "SILENT_S", -1.0)
    part.beat()
    assert "has not answered" in part.trouble
    part.beat(busy=True)
    assert part.trouble == ""
    part.stop(5)


def test_an_engine_whose_thread_fails_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "AGAIN_S", 0.01)
    monkeypatch.setattr("swell.engines.local.Nursery", lambda log: None)
    engine, ticks = SupervisedEngine(LocalSite(tmp_path, slots=1)), []

    def look(self: LocalSite, jobs: object, now_s: float) -> bool:
        ticks.append(now_s)
        if len(ticks) == 2:
            raise SystemExit("the engine's thread is gone")
        return False

    monkeypatch.setattr(LocalSite, "look", look)
    engine.start(lambda: None)
    (part,) = engine.parts()
    wait_until(lambda: "engine" in part.look(), 30, "the trouble to be seen", poll_s=0.005)
    wait_until(lambda: len(ticks) > 4, 30, "the engine to take turns again")
    assert part.failures == 1
    engine.close()


def test_the_clock_neither_jumps_nor_goes_back() -> None:
    wall, elapsed = [1000.0], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    for jump_s in (3600.0, -7200.0):
        before = clock()
        wall[0] += jump_s + 10.0
        elapsed[0] += 10.0
        assert 8.0 <= clock() - before <= 12.0
    elapsed[0] += 1e5
    wall[0] = clock() + 1e5
    elapsed[0] += 1e5
    assert abs(clock() - wall[0]) < 1e-6, "in the long run it is the system's time"
