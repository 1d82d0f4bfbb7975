"""Reading ahead: the same order, really ahead, errors in their place, no thread left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from swell.train.data.ahead import Ahead


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "swell-ahead"}


def test_it_gives_what_the_source_gives_and_its_end_again_and_again() -> None:
    ahead = Ahead(range(100), depth=3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []


def test_it_reads_ahead_while_nobody_asks_but_not_further_than_told() -> None:
    read: list[int] = []
    far_enough = threading.Event()

    def source() -> Iterator[int]:
        for i in range(100):
            read.append(i)
            if i == 4:
                far_enough.set()
            yield i

    ahead = Ahead(source(), depth=4)
    assert far_enough.wait(5)
    assert len(read) == 5, "four wait in the queue, and one for a place there"
    assert next(ahead) == 0


def test_an_exception_comes_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the file is gone")

    ahead = Ahead(source(), depth=4)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="the file is gone"):
            next(ahead)


def test_a_reader_nobody_holds_ends_its_thread(eventually: Callable[..., None]) -> None:
    of_other_tests = _threads()
    ahead = Ahead(iter(int, 1), depth=1)
    [thread] = _threads() - of_other_tests
    del ahead
    gc.collect()
    eventually(lambda: not thread.is_alive())
