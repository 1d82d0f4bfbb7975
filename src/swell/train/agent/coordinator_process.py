"""The launcher's end of the coordinator: the process, and the connection to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from swell.train.agent import children
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.prepared import end
from swell.train.agent.wire import Connection, Message, WireError


class CoordinatorProcess:
    """Starts the coordinator, connects to it as the job's agent, and repeats what it could not hear."""

    def __init__(self, job: JobDirectory, launch: str, alive: Callable[[], list[str]]) -> None:
        """`alive`: the workers that exist; a coordinator is told them first of all."""
        self._job, self._launch, self._alive = job, launch, alive
        self._process: children.Child | None = None
        self._connection: Connection | None = None
        self._unsent: list[Message] = []

    def start(self) -> None:
        """Start the process; it goes on with what an earlier one has written down."""
        log = self._job.path / "logs" / "coordinator.log"
        self._process = children.start(
            "swell.train.agent.coordinator", [str(self._job.path), self._launch], log
        )
        self.connect()

    def connect(self) -> None:
        """Connect if there is no connection; one try."""
        if self._connection is not None or self._process is None:
            return
        try:
            connection = Connection.to_job(self._job.address(), self._job.config(), timeout_s=2.0)
            connection.send({"type": "hello", "role": "agent", "alive": self._alive()})
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

    def hear(self) -> list[Message]:
        """What the coordinator said; call it when the connection can be read from."""
        if self._connection is None:
            return []
        try:
            return self._connection.pending()
        except (OSError, WireError):
            self._hang_up()
            return []

    def tell(self, message: Message) -> None:
        """Say something, now or to the next coordinator."""
        if self._connection is None:
            self._unsent.append(message)
            return
        try:
            self._connection.send(message)
        except OSError:
            self._unsent.append(message)

    def child_ended(self, pid: int, code: int, *, again: bool) -> bool:
        """A child of this process ended; True if it was the coordinator. `again`: start the next one."""
        if self._process is None or pid != self._process.pid:
            return False
        self._process.returncode = code
        if again:
            self._hang_up()
            self.start()
        return True

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Say goodbye, and end the process."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send({"type": "goodbye"})
            self._hang_up()
        if self._process is not None and self._process.returncode is None:
            end(self._process)
