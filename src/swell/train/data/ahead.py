"""Reading ahead of an iterator in a thread, so that its samples are there, in order, when they are needed.

No sample is lost or repeated: to drop an `Ahead` drops what it has read, and the source is iterated again.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

_LOOK_S = 0.2
"""How often a thread whose queue is full checks whether its `Ahead` still exists."""


class Ahead:
    """Iterates `samples`, reading up to `depth` of them in advance; an exception is raised in its turn."""

    def __init__(self, samples: Iterable[Any], depth: int) -> None:
        self._come: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
        stopped = threading.Event()
        # The thread must not keep this object alive, because it ends when the object is garbage-collected.
        weakref.finalize(self, stopped.set)
        arguments = (samples, self._come, stopped)
        threading.Thread(target=_fill, args=arguments, name="swell-ahead", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        good, value = self._come.get()
        if good:
            return value
        self._come.put((good, value))  # so that the next call raises the same
        raise value


def _fill(samples: Iterable[Any], come: queue.Queue[tuple[bool, Any]], stopped: threading.Event) -> None:
    try:
        for sample in samples:
            if not _put(come, (True, sample), stopped):
                return
        _put(come, (False, StopIteration()), stopped)
    except BaseException as error:
        _put(come, (False, error), stopped)


def _put(come: queue.Queue[tuple[bool, Any]], entry: tuple[bool, Any], stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            come.put(entry, timeout=_LOOK_S)
            return True
        except queue.Full:
            continue
    return False
