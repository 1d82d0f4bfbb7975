"""A job under a supervisor as its engine holds it: its files, its processes, its connection and its state."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct

from swell.domain import Placement
from swell.engines.accounts import Account
from swell.engines.base import Launch, RunState
from swell.engines.border import BadMessage, read_status, read_story
from swell.engines.job_state import JobState, Outcome
from swell.engines.order import EXIT, LOG, JobOrder, folder_of
from swell.engines.processes import MARK, mark
from swell.engines.supervisor import MOST_REASON, STOPPED, is_locked, signal_supervisor
from swell.train.agent.children import Child
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import GetStory, JobStatus, StopJob, ToolHello, Watch
from swell.train.agent.regular import folder, open_for_append, read_regular
from swell.train.agent.wire import Connection, Message

# The engine's connection to the coordinator of one job.


CONNECT_EVERY_S = 0.2
_MOST_RUNS = 10_000
"""A job that puts more entries into its folder of runs is not reached any more."""
SLOWEST_CONNECT_S = 30.0
ANSWER_S = 1.0
"""Longest wait for a coordinator's answer, because other jobs wait meanwhile; it is tried again later."""
_NO_ANSWER = (
    *(OSError, TrainError, ValueError, KeyError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)
"""Errors that a coordinator's files and answers may cause: they are the job's, and may be anything."""
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
        except _NO_ANSWER as error:
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


def story_of(directory: Path) -> list[str]:
    """The last transitions of a job's membership, from its coordinator; none if it does not answer soon."""
    try:
        with _last_run(directory) as run:
            (host, port), config = run.address(), run.config()
        _refuse_name(host)
        connection = Connection.to_job((host, port), config, timeout_s=ANSWER_S)
        with contextlib.closing(connection):
            connection.limit_sending(ANSWER_S)
            connection.request(ToolHello(), ANSWER_S)
            return read_story(connection.request(GetStory(), ANSWER_S))
    except _NO_ANSWER:
        return []


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


log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0
"""The server's log gets at most one line about a misbehaving job in this time."""


@dataclass(slots=True)
class Allowance:
    """How many reports of one job are listened to: `rate` per second, and `most` in a burst."""

    rate: float = 20.0
    most: float = 400.0
    _left: float = 400.0
    _at_s: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether one more report is listened to."""
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._at_s) * self.rate, self.most)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(slots=True)
class SupervisedJob:
    """One job. Its state is changed under the engine's lock; all else belongs to the engine's thread."""

    launch: Launch
    state: JobState = field(default_factory=JobState)
    account: Account | None = None
    """The account that the job runs as; None for the platform's own."""
    order: JobOrder | None = None
    """The content of the job's start.json: what its supervisor was last told to run."""
    child: Child | None = None
    """The supervisor, if this engine started it."""
    line: CoordinatorLine = field(default_factory=CoordinatorLine)
    allowance: Allowance = field(default_factory=Allowance)
    progress: Mapping[str, Any] | None = None
    """The progress that was handed on last."""
    complaints: int = 0
    """How often the job did or said something that the platform cannot use."""
    complained_s: float = float("-inf")

    @classmethod
    def found(cls, directory: Path) -> SupervisedJob:
        """A job that an earlier engine started; raises an exception of any kind if its order is unusable."""
        order = JobOrder.read(directory)
        job = cls(order.launch, order=order)
        if is_locked(directory):
            job.state.found_running()
            job.state.wanted, job.state.told = order.placement, order.slots
        else:
            job.state.outcome = job.read_outcome()  # if the job is to run again, `apply` will say so
        return job

    @property
    def job_id(self) -> str:
        return self.launch.job_id

    @property
    def directory(self) -> Path:
        return self.launch.job_dir

    @property
    def runs_any_command(self) -> bool:
        """Whether the job runs any program (docs/guides/any-command.md), which need not report anything."""
        return self.launch.request.command

    @property
    def starting(self) -> bool:
        """Whether a supervisor that this engine started runs, though it may not hold the job's lock yet."""
        return self.child is not None and self.child.poll() is None

    def has_processes(self) -> bool:
        """Whether a supervisor of the job runs, whichever engine started it."""
        return is_locked(self.directory) or self.starting

    def read_outcome(self) -> Outcome | None:
        """The outcome that the supervisor wrote to exit.json; None if the supervisor was killed."""
        try:
            content = json.loads(read_regular(folder_of(self.directory) / EXIT))
            code, reason = int(content["code"]), str(content["reason"])[:MOST_REASON]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None
        if reason == STOPPED:
            return Outcome(RunState.STOPPED, code, reason)
        state = RunState.FINISHED if code == 0 else RunState.FAILED
        return Outcome(state, code, reason, content.get("report"))

    def complain(self, about: str) -> bool:
        """Count something that is wrong with this job; True if the log got a line about it."""
        self.complaints += 1
        now_s = time.monotonic()
        if now_s - self.complained_s < COMPLAIN_EVERY_S:
            return False
        self.complained_s = now_s
        log.warning("job %s: %s (%d so far)", self.job_id, about, self.complaints)
        return True

    def whole_replicas(self, granted: Placement) -> Placement:
        """Of these slots as many as whole replicas need, those that the job uses already first."""
        size, told = self.launch.request.workers_per_replica, self.state.told
        if len(granted) % size == 0:
            return granted
        first = sorted(granted, key=lambda slot: slot not in told)
        return tuple(sorted(first[: len(granted) - len(granted) % size]))

    def write_order(self, granted: Placement, most: int, extras: dict[str, Any]) -> None:
        """Write start.json for the job's supervisor; `extras` is what the site adds."""
        launch = replace(self.launch, max_workers=max(self.launch.max_workers, most))
        account = None if self.account is None else self.account.name
        self.order = JobOrder(
            launch=launch, slots=granted, placement=self.state.wanted, account=account, extras=extras
        )
        self.order.write()

    def note(self, slots: Placement) -> None:
        """Bring start.json up to date, for an engine that takes the job over: the wanted slots, and those
        that the coordinator is told."""
        order, wanted = self.order, self.state.wanted
        if order is not None and (order.slots, order.placement) != (slots, wanted):
            order = replace(order, slots=slots, placement=wanted)
            order.write()
            self.order = order

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the job's supervisor: `base`, the job's mark, and what its account has."""
        own = {} if self.account is None else self.account.environment
        return {**base, MARK: mark(self.directory), **own}

    def spawn_supervisor(self, env: Mapping[str, str]) -> Child:
        """Start the job's supervisor as a new process, with this environment."""
        with open_for_append(folder_of(self.directory) / LOG) as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "swell.engines.supervisor", str(self.directory.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env=env,
                cwd="/",  # Python imports from its working directory, and jobs may write where this one is
            )

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the job's supervisor. Its workers hold a pipe to it, and end when it ends."""
        if signal_supervisor(self.directory, number):
            return
        if self.child is not None:
            self.child.send_signal(number)
        else:
            self.line.send(END)  # a control plane on another machine started it
