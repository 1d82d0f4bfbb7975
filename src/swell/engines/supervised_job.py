"""A job under a supervisor as its engine holds it: its files, its processes, its connection and its state."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swell.domain import Placement
from swell.engines.accounts import Account
from swell.engines.base import Launch, RunState
from swell.engines.coordinator_line import END, CoordinatorLine
from swell.engines.job_state import JobState, Outcome
from swell.engines.order import EXIT, LOG, Order, folder_of
from swell.engines.processes import MARK, mark
from swell.engines.supervisor import MOST_REASON, STOPPED, is_locked, signal_supervisor
from swell.train.agent.children import Child
from swell.train.agent.regular import open_for_append, read_regular

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
    order: Order | None = None
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
        order = Order.read(directory)
        job = cls(order.launch, order=order)
        if is_locked(directory):
            job.state.found_running()
            job.state.wanted, job.state.told = order.placement, order.slots
        else:
            job.state.outcome = job.read_outcome()  # if the job is to run again, `apply` will say so
        return job

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.launch.job_id

    @property
    def directory(self) -> Path:
        """The job's directory."""
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
        self.order = Order(
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
