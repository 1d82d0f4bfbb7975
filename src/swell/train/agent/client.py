"""Talk to a running job, as `swell resize` does; a control plane or a test can use it too.

with JobClient.find("digits") as job:
    job.resize(3)
    print(job.status()["members"])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import GetStatus, Resize, StopJob, ToolHello, Watch
from swell.train.agent.wire import Connection, Message


class JobClient:
    """One connection to a job's coordinator."""

    def __init__(self, directory: JobDirectory, *, wait_s: float = 0.0) -> None:
        self.directory = directory
        self._connection = self._open(wait_s)

    @classmethod
    def find(cls, name: str) -> JobClient:
        """A connection to the job with that name (or in that directory)."""
        return cls(JobDirectory.find(name))

    def __enter__(self) -> JobClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resize(self, workers: int) -> None:
        """Ask for that many workers; TrainError if the job does not allow it."""
        self._connection.request(Resize(workers))

    def status(self) -> Message:
        """Generation, members, target, workers, epoch, step and the workers' last reports."""
        return self._connection.request(GetStatus())

    def stop(self, code: int = 143) -> None:
        """End the job."""
        self._connection.request(StopJob(code))

    def listen(self) -> Connection:
        """Ask for events and reports; they arrive on the connection, which is good for nothing else then."""
        self._connection.request(Watch())
        return self._connection

    def watch(self) -> Iterator[Message]:
        """Events and reports as they come; after this the connection can be used for nothing else."""
        self.listen()
        while True:
            yield self._connection.receive()

    def wait_for(self, condition: Callable[[Message], Any], timeout_s: float = 30.0) -> Message:
        """Poll the status until `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s; the job is at {status}")
            time.sleep(0.01)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _open(self, wait_s: float) -> Connection:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                connection = Connection.to_job(self.directory.address(), self.directory.config())
                connection.request(ToolHello())
                return connection
            except (OSError, ValueError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
