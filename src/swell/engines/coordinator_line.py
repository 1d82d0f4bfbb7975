"""The engine's connection to the coordinator of one job."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from msgspec import Struct

from swell.engines.border import BadMessage, read_status
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import JobStatus, StopJob, ToolHello, Watch
from swell.train.agent.regular import folder
from swell.train.agent.wire import Connection, Message

CONNECT_EVERY_S = 0.2
_MOST_RUNS = 10_000
"""A job that puts more entries into its folder of runs is not reached any more."""
SLOWEST_CONNECT_S = 30.0
ANSWER_S = 1.0
"""Longest wait for a coordinator's answer, because other jobs wait meanwhile; it is tried again later."""
STOP = StopJob(save=True)
"""Tells a coordinator to have its job save its state and stop."""
END = StopJob(143)
"""Tells a coordinator to end its job at once."""


@dataclass(slots=True)
class CoordinatorLine:
    """Connects when the coordinator is up, and again after a connection was lost.

    A connection begins with a snapshot of the job, which has the number of the last event before it. Then
    the events after that follow, one number after the other. So no event is lost between the two; where a
    number is missing all the same, the connection is given up, and the next one has a new snapshot.
    """

    connection: Connection | None = None
    tried_s: float = float("-inf")
    slow: int = 0
    """How many attempts in a row to connect ended by the coordinator's silence."""
    event: int = 0
    """The number of the last event of this connection."""

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
            with _last_run(directory) as run:
                (host, port), config = run.address(), run.config()
            _refuse_name(host)
            connection = Connection.to_job((host, port), config, timeout_s=ANSWER_S)
            connection.limit_sending(ANSWER_S)
            greeting = connection.request(ToolHello(fencing), ANSWER_S)
            # A coordinator of an earlier version has no snapshot in its second answer.
            status = read_status({**greeting, **connection.request(Watch(), ANSWER_S)}, slots)
        except (
            *(OSError, TrainError, ValueError, KeyError, TypeError, AttributeError),
            *(RecursionError, OverflowError),  # the files and the answer are the job's: they may be anything
        ) as error:
            if connection is not None:
                connection.close()
            self.slow += time.monotonic() - began_s > ANSWER_S / 2
            if isinstance(error, BadMessage):
                raise
            return None
        self.slow, self.connection, self.event = 0, connection, status.event
        return status

    def send(self, message: Struct) -> bool:
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
            messages = list(self.connection.pending())
        except (OSError, TrainError):
            self.close()
            return []
        for index, message in enumerate(messages):
            if message.get("type") != "event" or "number" not in message:
                continue
            if message["number"] != self.event + 1:
                self.close()
                return messages[:index]
            self.event += 1
        return messages

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.close()
            self.connection = None


@contextlib.contextmanager
def _last_run(directory: Path) -> Iterator[JobDirectory]:
    """The newest run in a job's directory; OSError if there is none.

    The job may have put a link in place of each folder, to another job's run for example. So each is opened
    without following links, and read through its descriptor.
    """
    with folder(directory.parent, directory.name, "runs") as runs:
        with os.scandir(runs) as entries:
            names = [entry.name for entry in islice(entries, _MOST_RUNS + 1)]
        if not names or len(names) > _MOST_RUNS:
            raise OSError(f"{directory / 'runs'} has {len(names)} entries")
        with folder(runs, max(names)) as run:
            yield JobDirectory(Path(f"/proc/self/fd/{run}"))


def _refuse_name(host: str) -> None:
    """Raise BadMessage for anything but an address: to look a name up could take minutes."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise BadMessage(f"coordinator.json: got the host {host[:80]!r}, must be an IP address") from None
