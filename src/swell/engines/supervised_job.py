"""What an engine keeps of one job under a supervisor: what is wanted of it, its connection, who lives."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swell.domain import Placement
from swell.engines.base import Launch, Observed, RunState
from swell.engines.order import Order
from swell.engines.supervisor import STOPPED, is_locked
from swell.train.errors import TrainError
from swell.train.jobdir import JobDirectory
from swell.train.wire import Connection, Message

CONNECT_EVERY_S = 0.2
ANSWER_S = 1.0
"""A coordinator that takes longer is tried again later: other jobs wait meanwhile."""
STOP: Message = {"type": "stop", "save": True}
"""What a coordinator is told to have its job save its state and leave."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    code: int
    reason: str

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """What the supervisor wrote down; None if it was killed."""
        try:
            content = json.loads((directory / "exit.json").read_text())
            code, reason = int(content["code"]), str(content["reason"])
        except (OSError, ValueError, KeyError):
            return None
        if reason == STOPPED:
            return cls(RunState.STOPPED, code, reason)
        return cls(RunState.FINISHED if code == 0 else RunState.FAILED, code, reason)


@dataclass(slots=True)
class SupervisedJob:
    """One job. Written by the engine's thread, under its lock where others look."""

    job_id: str
    directory: Path
    launch: Launch | None = None
    order: Order | None = None
    """What its supervisor was last told to run, as it is in the job's start.json."""
    wanted: Placement = ()
    """What `apply` last asked for, and since when."""
    wanted_s: float = 0.0
    noted: Placement = ()
    """What the job's files say it has, for whoever adopts it."""
    told: Placement = ()
    """Where the running processes were last told to have workers; only the number counts where slots do not
    matter."""
    told_s: float = float("-inf")
    live: dict[str, int | None] = field(default_factory=dict)
    """The workers that have a process, and their slots: the job says them where they matter, else the engine
    does."""
    ready: set[str] = field(default_factory=set)
    """Who of them has been heard of."""
    members: set[str] = field(default_factory=set)
    former: set[str] = field(default_factory=set)
    """Who was a member once."""
    connection: Connection | None = None
    fresh: bool = False
    """The connection was just made: whoever takes wishes may not know the last one."""
    target: int = 0
    """How many workers the coordinator wanted when it was connected to."""
    child: subprocess.Popen[bytes] | None = None
    """The supervisor, if this engine started it."""
    alive: bool = False
    state: RunState = RunState.STARTING
    outcome: Outcome | None = None
    started_s: float = float("-inf")
    tried_s: float = float("-inf")
    stop_by_s: float | None = None
    """Asked to save and leave; ended by force at this moment."""
    ending: bool = False
    end_by_s: float | None = None

    @classmethod
    def found(cls, directory: Path) -> SupervisedJob:
        """A job that an earlier engine started."""
        order = Order.read(directory)
        job = cls(order.launch.job_id, directory, order.launch, order)
        if is_locked(directory):
            job.alive, job.wanted = True, order.placement
            job.noted = job.told = job.wanted
        else:
            job.outcome = Outcome.read(directory)  # whoever wants it to run again will say so
        return job

    # -- what others see ---------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Whether a supervisor of ours is on its way to the job's lock, or has it."""
        return self.child is not None and self.child.poll() is None

    @property
    def present(self) -> bool:
        """Whether there is anything to say of it: it lives, waits for slots, or its end is known."""
        return self.alive or bool(self.wanted) or self.outcome is not None

    @property
    def over(self) -> bool:
        """Whether its script came to an end: it must not be started again."""
        return self.outcome is not None and self.outcome.state is not RunState.STOPPED

    @property
    def slots(self) -> set[int]:
        """The slots that it has workers on, or was told to use. They are its own until its end was noted."""
        if not self.alive and not self.over:
            return set()
        return set(self.told) | {slot for slot in self.live.values() if slot is not None}

    @property
    def leaving(self) -> bool:
        """Whether workers that trained and must not any more are still there."""
        return bool((self.live.keys() & self.former) - self.members)

    def observed(self) -> Observed:
        """The job as the control plane sees it."""
        if self.outcome is not None:
            end = self.outcome
            return Observed(job_id=self.job_id, state=end.state, exit_code=end.code, reason=end.reason)
        return Observed(
            job_id=self.job_id, state=self.state, placement=self.occupied(self.live), target=self.wanted
        )

    def occupied(self, workers: Collection[str]) -> Placement:
        """The slots of these workers, as far as they are known."""
        slots = (self.live.get(name) for name in workers)
        return tuple(sorted(slot for slot in slots if slot is not None))

    # -- its life ----------------------------------------------------------------------------------------

    def write_order(self, granted: Placement, most: int, extras: dict[str, Any]) -> None:
        """Write down what its supervisor shall run; `extras` is what its kind of engine adds."""
        assert self.launch is not None
        launch = replace(self.launch, max_workers=max(self.launch.max_workers, most))
        self.order = Order(launch=launch, workers=len(granted), placement=self.wanted, extras=extras)
        self.order.write()
        self.noted = self.wanted

    def note_placement(self) -> None:
        """Bring the written order up to date, for whoever adopts the job."""
        if self.order is not None:
            self.order = replace(self.order, placement=self.wanted)
            self.order.write()
        self.noted = self.wanted

    def started(self, child: subprocess.Popen[bytes], granted: Placement, now_s: float) -> None:
        """Its supervisor is on its way."""
        self.child, self.started_s = child, now_s
        self.told, self.told_s = granted, now_s
        self.alive, self.state, self.outcome = True, RunState.STARTING, None
        self.stop_by_s = None
        self.live, self.ready, self.members, self.former = {}, set(), set(), set()

    def gone(self) -> None:
        """Its supervisor is no more."""
        self.disconnect()
        self.alive, self.stop_by_s, self.child = False, None, None
        self.noted = ()
        self.ready, self.members, self.former = set(), set(), set()
        self.outcome = Outcome.read(self.directory)
        if not self.over:
            self.told, self.live = (), {}
        if self.outcome is not None and self.outcome.state is RunState.STOPPED and self.wanted:
            self.outcome = None  # it was wanted again while it left
        else:
            self.wanted = ()  # whoever wants it to run again will say so

    def follow(self, event: Message) -> None:
        """Keep track of who is there."""
        kind = event.get("event")
        if kind == "spawn":
            slot = event.get("slot")
            self.live[str(event["worker"])] = None if slot is None else int(slot)
        elif kind == "exited":
            self.live.pop(str(event["worker"]), None)
            self.ready.discard(str(event["worker"]))
        elif kind == "ready":
            self.ready.add(str(event["worker"]))
        elif kind == "generation":
            self.members = {str(name) for name in event["members"]}
            self.former |= self.members

    # -- its coordinator ---------------------------------------------------------------------------------

    def connect(self, now_s: float) -> bool:
        """Get in touch with the job's coordinator, if it is there already; True if that was just done."""
        if self.connection is not None or now_s - self.tried_s < CONNECT_EVERY_S:
            return False
        self.tried_s = now_s
        runs = sorted((self.directory / "runs").glob("*"))
        if not runs:
            return False
        run = JobDirectory(runs[-1])
        with contextlib.suppress(OSError, TrainError, ValueError, KeyError):
            connection = Connection.open(run.address(), run.config()["secret"], timeout_s=ANSWER_S)
            status = connection.request({"type": "hello", "role": "tool"}, ANSWER_S)
            connection.request({"type": "watch"}, ANSWER_S)
            slots = status.get("slots", {})
            self.live = {name: slots.get(name) for name in status["workers"]}
            self.ready = {name for name, state in status["workers"].items() if state != "starting"}
            self.members = set(status["members"])
            self.target = int(status["target"])
            self.former |= self.members | {n for n, s in status["workers"].items() if s == "leaving"}
            self.connection, self.fresh = connection, True
            if self.stop_by_s is not None:  # the coordinator that was told so may be gone
                self.send(STOP)
        return self.connection is not None

    def send(self, message: Message) -> bool:
        """Tell the coordinator something; False if it is away."""
        assert self.connection is not None
        try:
            self.connection.send(message)
        except OSError:
            self.disconnect()
            return False
        return True

    def disconnect(self) -> None:
        """Hang up."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.close()
            self.connection = None
