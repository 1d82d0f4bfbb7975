"""How the parts of a control plane reach its conductor: one at a time, with the turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swell.control.conductor import Conductor


@dataclass(frozen=True, slots=True)
class Access:
    """The conductor, and the lock under which it may be touched."""

    conductor: Conductor
    clock: Callable[[], float]
    wake: Callable[[], None]
    """Has a turn taken soon."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def changing(self) -> Iterator[float]:
        """Hold the lock for a change, and have a turn taken because of it; gives the time."""
        with self.lock:
            yield self.clock()
            self.wake()
