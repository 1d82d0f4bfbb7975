"""The launcher's end of the coordinator: the process, and the connection to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from msgspec import Struct

from swell.train.agent import children
from swell.train.agent.errors import Refused, TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.prepared import end
from swell.train.agent.protocol import TO_LAUNCHER, Goodbye, LauncherHello, ToLauncher, received
from swell.train.agent.wire import Connection, WireError

MOST_STARTS = 12
"""Coordinators in a row that may end early; after the last one the job fails."""
LASTING_S = 5.0
"""A coordinator that lived for this long did not end early."""
_AT_ONCE = 3
"""How many of them are followed by the next one at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def pause_s(early: int) -> float:
    """How long to wait for the next coordinator after so many in a row that ended early."""
    if early <= _AT_ONCE:
        return 0.0
    return float(min(FIRST_PAUSE_S * 2 ** (early - _AT_ONCE - 1), LONGEST_PAUSE_S))


class CoordinatorProcess:
    """Starts the coordinator, connects to it as the job's agent, and repeats what it could not hear."""

    def __init__(self, job: JobDirectory, launch: str, alive: Callable[[], list[str]]) -> None:
        """`alive`: the workers that exist; a coordinator is told them first of all."""
        self._job, self._launch, self._alive = job, launch, alive
        self._process: children.Child | None = None
        self._connection: Connection | None = None
        self._unsent: list[Struct] = []
        self._began_s = self._next_s = 0.0
        """When the process was started, and when the next one may be."""
        self._early = 0
        """How many processes in a row ended early."""

    def start(self) -> None:
        """Start the process; it goes on with what an earlier one has written down."""
        self._began_s = time.monotonic()
        log = self._job.path / "logs" / "coordinator.log"
        self._process = children.start(
            "swell.train.agent.coordinator", [str(self._job.path), self._launch], log
        )
        self.connect()

    def connect(self) -> None:
        """Connect if there is no connection; one try. Starts the next process if it is time."""
        if self._connection is not None or self._process is None:
            return
        if self._process.returncode is not None:
            if time.monotonic() >= self._next_s:
                self.start()
            return
        try:
            connection = Connection.to_job(self._job.address(), self._job.config(), timeout_s=2.0)
            connection.send(LauncherHello(tuple(self._alive())))
            connection.receive(2.0)
        except (OSError, WireError, TimeoutError):
            time.sleep(0.01)
            return
        self._connection = connection
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.tell(message)

    def watched(self) -> list[Connection]:
        """The connection, while there is one."""
        return [self._connection] if self._connection is not None else []

    def hear(self) -> list[ToLauncher]:
        """What the coordinator sent; call it when the connection can be read from."""
        if self._connection is None:
            return []
        try:
            arrived = self._connection.pending()
            messages = [received(TO_LAUNCHER, raw) for raw in arrived]
        except (OSError, WireError, Refused):
            self._hang_up()
            return []
        return [message for message in messages if message is not None]

    def tell(self, message: Struct) -> None:
        """Say something, now or to the next coordinator."""
        if self._connection is None:
            self._unsent.append(message)
            return
        try:
            self._connection.send(message)
        except OSError:
            self._unsent.append(message)

    def child_ended(self, pid: int, code: int, *, again: bool) -> bool:
        """A child of this process ended; True if it was the coordinator. `again`: start the next one.

        The next one comes at once or after a pause (`pause_s`). Raises TrainError if too many ended early.
        """
        if self._process is None or pid != self._process.pid:
            return False
        self._process.returncode = code
        if again:
            self._hang_up()
            now_s = time.monotonic()
            self._early = 1 if now_s - self._began_s >= LASTING_S else self._early + 1
            if self._early >= MOST_STARTS:
                raise TrainError(
                    f"the job's coordinator ended {self._early} times in a row within {LASTING_S:g} s of its "
                    f"start (the last time {_in_words(code)}); logs/coordinator.log has the reason"
                )
            self._next_s = now_s + pause_s(self._early)
            self.connect()
        return True

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Say goodbye, and end the process."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(Goodbye())
            self._hang_up()
        if self._process is not None and self._process.returncode is None:
            end(self._process)


def _in_words(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"
