"""The words of `membership`: what is known of a worker, what a generation is, what is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Being started or preparing; not yet able to join."""
    READY = "ready"
    """Prepared, waiting to be part of a generation."""
    MEMBER = "member"
    """In the current generation."""
    LEAVING = "leaving"
    """Was dropped by a switch and is on its way out."""
    DONE = "done"
    """Finished the training loop."""


@dataclass(slots=True)
class Worker:
    """What is known of one worker process."""

    name: str
    status: Status
    seen_s: float
    ready_s: float = 0.0
    address: tuple[str, int] | None = None
    connected: bool = False
    done_at: int = 0
    """For a worker that is done: the first operation it has no part in."""
    slot: int | None = None
    """Where its process is, in a job whose workers have places of their own."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation that may come: it does when every member of the present one agrees at one step."""

    number: int
    members: tuple[str, ...]
    recovery: bool = False
    """The present generation is broken: enter this one at once."""
    epoch: int = 0
    """Where its newcomers stand: members in another epoch must not take them in."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker process under this name, on this slot if slots are given out."""

    worker: str
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """End this worker's process."""

    worker: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell this worker that it was given up."""

    worker: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell these workers of the candidate (None: an earlier one is withdrawn)."""

    candidate: Candidate | None
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tell a waiting newcomer that the job went on to another epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell these workers to save the job's state and leave at the next step."""

    to: tuple[str, ...]


Instruction = Spawn | Kill | Fence | Announce | Turn | Finish | Stop
