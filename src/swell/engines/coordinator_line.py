"""The engine's connection to the coordinator of one job."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.engines.border import BadMessage, JobStatus, read_status
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.regular import folder
from swell.train.agent.wire import Connection, Message

CONNECT_EVERY_S = 0.2
SLOWEST_CONNECT_S = 30.0
_UNUSABLE = (
    OSError,
    TrainError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""How a run's files, which are the job's own work, or the coordinator's answers may fail to make sense."""
MOST_RUNS = 10_000
"""So many runs of a job are looked at: each is one start of its supervisor."""
ANSWER_S = 1.0
"""Longest wait for a coordinator's answer, because other jobs wait meanwhile; it is tried again later."""
STOP: Message = {"type": "stop", "save": True}
"""Tells a coordinator to have its job save its state and stop."""
END: Message = {"type": "stop", "code": 143}
"""Tells a coordinator to end its job at once."""


@dataclass(slots=True)
class CoordinatorLine:
    """Connects when the coordinator is up, and again after a connection was lost."""

    connection: Connection | None = None
    tried_s: float = float("-inf")
    slow: int = 0
    """How many attempts in a row to connect ended by the coordinator's silence."""

    def connect(
        self, directory: Path, now_s: float, slots: int, fencing: int | None = None
    ) -> JobStatus | None:
        """Connect unless there is a connection or it is too early to try again; None if none was made now.

        `slots`: how many slots the cluster has. `fencing`: the fencing number of this control plane. Raises
        BadMessage if the coordinator's answer makes no sense.
        """
        # Other jobs wait meanwhile, so a coordinator that does not answer is tried less and less often.
        patience_s = min(CONNECT_EVERY_S * 2**self.slow, SLOWEST_CONNECT_S)
        if self.connection is not None or now_s - self.tried_s < patience_s:
            return None
        self.tried_s, began_s = now_s, time.monotonic()
        connection = None
        try:
            address, config = _newest_run(directory)
            connection = Connection.to_job(address, config, timeout_s=ANSWER_S)
            connection.limit_sending(ANSWER_S)
            hello = {"type": "hello", "role": "tool", "fencing": fencing}
            status = read_status(connection.request(hello, ANSWER_S), slots)
            connection.request({"type": "watch"}, ANSWER_S)
        except _UNUSABLE as error:
            if connection is not None:
                connection.close()
            self.slow += time.monotonic() - began_s > ANSWER_S / 2
            if isinstance(error, BadMessage):
                raise
            return None
        self.slow, self.connection = 0, connection
        return status

    def send(self, message: Message) -> bool:
        """Send the coordinator a message; False if there is no connection, or it is lost."""
        if self.connection is None:
            return False
        try:
            self.connection.send(message)
        except OSError:
            self.close()
            return False
        return True

    def pending(self) -> list[Message]:
        """The messages that have arrived; none, and no connection any more, if the connection is lost."""
        if self.connection is None:
            return []
        try:
            return list(self.connection.pending())
        except (OSError, TrainError):
            self.close()
            return []

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.close()
            self.connection = None


def _newest_run(directory: Path) -> tuple[tuple[str, int], dict[str, Any]]:
    """Where the coordinator of a job's newest run listens, and the settings of that run; OSError if there is
    none.

    No link is followed, or a job would have its engine speak to the coordinator of another one.
    """
    with folder(directory.parent, directory.name, "runs") as runs:
        with os.scandir(runs) as entries:
            names = [one.name for one in itertools.islice(entries, MOST_RUNS)]
        with folder(runs, max(names, default="")) as newest:
            run = JobDirectory(Path(f"/proc/self/fd/{newest}"))
            (host, port), config = run.address(), run.config()
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name that nobody answers for would keep the engine waiting
        raise BadMessage(f"coordinator.json: got the host {host[:80]!r}, must be an IP address") from None
    return (host, port), config
