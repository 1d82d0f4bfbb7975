"""A worker's side of the control plane, for its main thread.

At a step boundary the main thread only asks cheap questions (`offer`, `take`). It waits only when it has no
generation to train in (`wait_join`, `wait_recovery`). `line` has the thread that talks to the coordinator,
`standing` what is known of the job: events in, instructions out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from swell.train.agent import protocol
from swell.train.agent.errors import FENCED, RESPAWN
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import Status
from swell.train.agent.wire import Message
from swell.train.sync.line import Line
from swell.train.sync.mesh import Mesh
from swell.train.sync.standing import STOP as STOP

PATIENCE_S = 120.0
"""How long a worker that cannot train waits for the coordinator, before it ends to be started again."""


class Link:
    """What the main thread of one worker asks and reports."""

    def __init__(self, directory: JobDirectory, name: str) -> None:
        config = directory.config()
        if os.environ.get("SWELL_LAUNCH", config.get("launch")) != config.get("launch"):
            os._exit(FENCED)  # started for an earlier run of this job
        self.name = name
        self.directory = directory
        self.config = config
        self._pid = os.getpid()
        self.step = 0
        self.report: Message = {}
        """What heartbeats say, besides the step."""
        self.line = Line(directory, config, name, lambda: (self.step, self.report))
        self.peers = self.line.peers
        self._standing = self.line.standing
        self._changed = self.line.changed

    def welcome(self) -> protocol.Welcome:
        """The coordinator's first message: whether the job is training already, and in which epoch."""
        with self._changed:
            self._wait(lambda: self._standing.welcome is not None, PATIENCE_S, "to be welcomed")
            assert self._standing.welcome is not None
            return self._standing.welcome

    def announce_ready(self, epoch: int) -> None:
        """Tell the coordinator that this worker is prepared for `epoch`."""
        with self._changed:
            self.line.do(self._standing.ready(epoch))

    def wait_join(self) -> Mesh | int:
        """Wait for a connected candidate (its mesh) or for the job to go to another epoch (its number)."""
        with self._changed:
            self._wait(lambda: self._standing.joinable() is not None, None, "to join")
            found = self._standing.joinable()
            assert found is not None
            return found

    def offer(self, epoch: int) -> int:
        """The number of the candidate that this worker, in `epoch`, could switch to right now, or 0.

        The candidate is kept until `release`: once a worker has agreed, a newer one must not replace it.
        """
        standing = self._standing
        if standing.stop:
            return STOP
        offer = standing.offer
        if offer is None or offer.number <= standing.generation:  # most steps: no lock
            return 0
        with self._changed:
            return self._standing.pick(epoch)

    def hold(self, number: int) -> None:
        """Defer newer candidates until this worker has its state: all members have entered `number`."""
        with self._changed:
            self._standing.hold(number)

    def release(self) -> None:
        """Let newer candidates replace the one that `offer` or `hold` kept."""
        with self._changed:
            self.line.do(self._standing.release())

    def take(self, number: int) -> Mesh | None:
        """The mesh of an agreed candidate; None if this worker is not in it and has to leave.

        Raises PeerLost if a recovery has replaced the candidate.
        """
        with self._changed:
            return self._standing.take(number)

    def brings_newcomers(self, number: int) -> bool:
        """Whether candidate `number` is still there and has members that this generation has not."""
        with self._changed:
            return self._standing.brings_newcomers(number)

    def candidate(self) -> str:
        """The latest candidate in words, for the job's log."""
        offer = self._standing.offer
        return "none" if offer is None else f"{offer.number} of {' '.join(offer.members)}"

    def wait_recovery(self, broken: Mesh, operation: int) -> Mesh:
        """Report that a generation is broken, and wait for the mesh of the one that replaces it."""
        with self._changed:
            self.line.do(self._standing.broke(broken, operation))
            self._wait(
                lambda: bool(self._standing.replacement(broken.number)), PATIENCE_S, "for a new generation"
            )
            found = self._standing.replacement(broken.number)
        if isinstance(found, bool):  # the others went on without this worker
            raise SystemExit(RESPAWN)
        return found

    def entered(self, mesh: Mesh, step: int, epoch: int) -> None:
        """Report that this worker has entered the generation of `mesh`."""
        with self._changed:
            self.peers.enter(mesh)
            self.step = step
            self.line.do(self._standing.enter(mesh, step, epoch))

    def at_epoch(self, epoch: int) -> None:
        """Report that this worker begins `epoch`."""
        self._standing.epoch = epoch
        self.line.send_now(protocol.AtEpoch(epoch))

    def event(self, name: str, **fields: Any) -> None:
        """Add an event to the job's history."""
        self.line.send(protocol.Event(name, fields))

    def leaving(self, number: int) -> None:
        """Report that this worker leaves: candidate `number` was agreed on without it."""
        with self._changed:
            self._standing.end(Status.LEAVING)
        self.line.send(protocol.Left(number))
        self.flush()

    def stopped(self) -> None:
        """Report that the job's state is on disk and that its workers leave."""
        self.line.send(protocol.Stopped())
        self.flush()

    def done(self, operation: int) -> None:
        """Report that this worker's training loop is over: it takes no part in `operation` and later ones."""
        with self._changed:
            self._standing.end(Status.DONE, operation)
        # A short job may end between two heartbeats, so the last report is sent now.
        self.line.send(protocol.Beat(self.step, self.report))
        self.line.send(protocol.Done(operation))

    def last_report(self) -> None:
        """Send the latest report, at the end of the process; a worker that left the job has none to send."""
        if os.getpid() == self._pid and self._standing.status in (Status.MEMBER, Status.DONE):
            self.line.send(protocol.Beat(self.step, self.report))
            self.flush()

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until all messages have been sent, at the end of the process."""
        self.line.flush(timeout_s)

    def close(self) -> None:
        """Close the connections; for workers inside a process that lives longer (tests)."""
        self.line.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        if not self._changed.wait_for(condition, timeout_s):
            # No failure of the script: a link is cut, say. The coordinator has the worker started again.
            sys.stderr.write(
                f"worker {self.name} waited {timeout_s:g} s {what}; it ends, to be started again. See"
                " logs/coordinator.log in the job's directory\n"
            )
            raise SystemExit(RESPAWN)
