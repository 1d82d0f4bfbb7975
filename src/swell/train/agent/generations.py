"""The data types of `membership`: workers, generations, candidates, and the instructions it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from swell.train.agent.protocol import Finish as Finish
from swell.train.agent.protocol import Kill as Kill
from swell.train.agent.protocol import Spawn as Spawn
from swell.train.agent.protocol import Status as Status


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
    """For a worker that is done: the first operation that it takes no part in."""
    slot: int | None = None
    """The slot of its process, in a job whose workers are given slots."""
    slow: bool = False
    """Whether it is to be replaced, because it is slower than the others."""
    leaving_s: float | None = None
    """For a worker that was a member and leaves: since when; None once it was killed for taking too long."""


@dataclass(slots=True)
class Names:
    """The names of workers, numbered as they are started; none is used twice."""

    prefix: str = "w"
    """What the names begin with; "r" if the workers are replicas (see `replicas`)."""
    born: int = 0
    """How many names were given."""

    def new(self) -> str:
        """The name of a worker that is about to be started."""
        self.born += 1
        return f"{self.prefix}{self.born - 1}"


@dataclass(slots=True)
class GivenUp:
    """Workers that the job goes on without, and those that it will as soon as there is proof."""

    fenced: set[str] = field(default_factory=set)
    """Workers that must end if they are heard again."""
    accused: set[str] = field(default_factory=set)
    """Members of which a peer reported that their connection ended."""
    missing: dict[str, int | None] = field(default_factory=dict)
    """Members that were left out because of cut links, with their slots: others come in their place."""

    def fence(self, name: str) -> None:
        """Make sure that a worker cannot come back."""
        self.fenced.add(name)
        self.accused.discard(name)


@dataclass(slots=True)
class Generation:
    """The present generation. Invariants: members are alive and unique; numbers only grow."""

    number: int = 0
    members: list[str] = field(default_factory=list)
    leader: str = ""
    """The member that was first when the generation began: what it prints and saves is the job's result."""
    epoch: int = 0
    live: bool = False
    """True if there is (or was a moment ago) a generation with live state."""
    counter: int = 0
    """The highest number that a generation or a candidate has had."""

    def next_number(self) -> int:
        """A number for a candidate, which none has had."""
        self.counter = max(self.counter, self.number) + 1
        return self.counter


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation that begins when every member of the present one agrees to it at one step boundary."""

    number: int
    members: tuple[str, ...]
    recovery: bool = False
    """True if the present generation is broken, so that members enter this one at once."""
    epoch: int = 0
    """The epoch of its newcomers: members that are in another epoch must not switch to it."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell this worker that the job goes on without it, so that it ends."""

    worker: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell these workers about the candidate; None withdraws the earlier one."""

    candidate: Candidate | None
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tell a waiting newcomer that the job went on to another epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell these workers to save the job's state and leave at the next step."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Have these workers try whom of each other they reach, and say so."""

    number: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Add an event to the job's history."""

    event: Struct


@dataclass(frozen=True, slots=True)
class Begin:
    """Write down who is in this generation, before its processes are started (see `restarts`)."""

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Tell the processes of this generation to save their state and end."""

    number: int


Instruction = Spawn | Kill | Fence | Announce | Turn | Finish | Stop | Check | Say | Begin | Save
