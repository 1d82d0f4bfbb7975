"""How this worker runs its script: as a part of the job, or as it is."""

from __future__ import annotations

import enum
from typing import Protocol

from swell.train.agent.errors import LEFT
from swell.train.auto.job import ScriptJob
from swell.train.auto.randomness import Randomness
from swell.train.sync.link import STOP, Link


class ScriptStage(enum.Enum):
    """How a script is run. It begins as WATCHED, and ends as SHARED or ALONE."""

    WATCHED = "watched"
    """None of its optimizers has stepped, so nobody knows what it trains. There is no job yet."""
    FOUNDING = "founding"
    """At its first step. The job is made, and this worker becomes part of it."""
    SHARED = "shared"
    """This worker is part of the job. Its script may still have to catch up: see `ScriptJob.forwarding`."""
    ALONE = "alone"
    """The script can neither be shared among workers nor be followed: it runs as it is, without a job."""


class OpenFiles(Protocol):
    """The files that a script keeps open (`files`)."""

    def positions(self) -> dict[str, int]:
        """How long they are where the script is."""

    def arrive(self, positions: dict[str, int]) -> None:
        """The script has come to where another worker's is, whose files were so long there."""


class ScriptRun:
    """This worker's run of the script, and its job once there is one."""

    def __init__(self, link: Link, *, leads: bool, processes: int = 1) -> None:
        self.link = link
        self.processes = processes
        """For how many processes the script was made (see `processes`)."""
        self.stage = ScriptStage.WATCHED
        self.randomness = Randomness(link.name)
        self.job: ScriptJob | None = None
        """None as long as the script is watched, and if it runs alone."""
        self.left = False
        """True once this worker was told to leave, and ends its script for that."""
        self.files: OpenFiles | None = None
        self._leads = leads
        """Whether this worker's output counts before it has come to its first step."""

    @property
    def forwarding(self) -> bool:
        """Whether the script is catching up with the job."""
        return self.job is not None and self.job.forwarding

    @property
    def behind(self) -> bool:
        """Whether the script has not come to the job's position, or has none yet."""
        return not self.leads() and (self.job is None or self.job.forwarding)

    @property
    def steps(self) -> int:
        """How many steps the job has made."""
        return 0 if self.job is None else self.job.steps

    def leads(self) -> bool:
        """Whether this worker is the leader, whose output and files count."""
        if self.job is not None and self.stage is ScriptStage.SHARED:
            return self.job.is_leader and not self.job.forwarding
        return self._leads or self.stage is ScriptStage.ALONE

    def found(self, job: ScriptJob) -> None:
        """The script has come to its first step, which shows what `job` trains."""
        self.stage, self.job = ScriptStage.FOUNDING, job

    def stop_if_asked(self) -> None:
        """End a script that cannot be followed when the job is paused; it will begin again."""
        if self.link.offer(0) == STOP:
            self.left = True
            self.link.stopped()
            raise SystemExit(LEFT)
