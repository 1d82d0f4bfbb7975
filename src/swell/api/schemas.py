"""The words on the wire. What comes in is strict and bounded; what goes out is what the SDK returns.

Requests refuse fields they do not know, by name. Answers ignore fields they do not know, so that an older
client reads a newer server. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from swell.control.model import JobRecord, JobRequest, Phase, Promise
from swell.domain import Event

MAX_WORKERS = 100_000
ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"

# No NUL: such a text can be neither a path nor an argument of a process.
Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
]
EnvName = Annotated[str, StringConstraints(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Moment = Annotated[float, Field(gt=0, lt=1e11, allow_inf_nan=False)]
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class Incoming(BaseModel):
    """A request: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Outgoing(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)


# -- jobs ------------------------------------------------------------------------------------------------


class JobSubmission(Incoming):
    """What a person hands in: a script, and if they like a deadline. Never a number of GPUs."""

    name: Name = Field(description="Name for people; need not be unique.", examples=["digits"])
    script: Path = Field(
        description="Training script on the server's machine, relative to workdir.", examples=["train.py"]
    )
    args: list[Text] = Field(default=[], max_length=1000, description="Arguments of the script.")
    workdir: Path = Field(default=".", description="Directory on the server's machine to run in.")
    env: dict[EnvName, Text] = Field(default={}, max_length=200, description="Extra environment variables.")
    auto: bool = Field(default=False, description="The script does not import swell: make it elastic.")
    deadline_s: Moment | None = Field(
        default=None, description="Unix time by which it must be done; none for best effort."
    )
    min_workers: Workers = Field(default=1, description="Least workers it can run on.")
    max_workers: Workers | None = Field(default=None, description="Most workers it may get.")
    workers: Workers = Field(default=1, description="What policies that do not resize give it.")
    memory_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = Field(
        default=None, description="Most memory for each worker; one that takes more is ended."
    )
    checkpoint_s: float = Field(
        default=60.0, gt=0, le=1e7, allow_inf_nan=False, description="Seconds between checkpoints."
    )
    max_restarts: int = Field(
        default=3, ge=0, le=1000, description="Restarts after all its workers died for no fault of its own."
    )
    pip: list[Text] = Field(
        default=[], max_length=200, description="Requirements to install for it, where the engine can."
    )

    def to_request(self) -> JobRequest:
        """What the control plane takes."""
        lists = {"args": tuple(self.args), "pip": tuple(self.pip)}
        return JobRequest(**self.model_dump(exclude={"args", "pip"}) | lists)


class Bounds(Incoming):
    """Bounds for the workers of a job, set by hand."""

    min_workers: Workers = Field(default=1, description="Least workers.")
    max_workers: Workers | None = Field(default=None, description="Most workers; none for no bound.")


class EstimateView(Outgoing):
    """When a job will be done, as far as is known."""

    finish_s: float | None = Field(default=None, description="Most likely finish.")
    earliest_s: float | None = None
    latest_s: float | None = None
    source: str = Field(default="none", description="model, history, profile or none.")


class PromiseView(Outgoing):
    """The answer to a submission or a quote."""

    admitted: bool
    pending: bool = Field(default=False, description="Decided after a short profiling run; see `reason`.")
    guaranteed_s: float | None = Field(default=None, description="The finish that is guaranteed.")
    estimate: EstimateView
    earliest_deadline_s: float | None = Field(
        default=None, description="If refused: the earliest deadline that would be admitted."
    )
    reason: str = Field(default="", description="If refused: what stands in the way.")

    @classmethod
    def of(cls, promise: Promise) -> Self:
        """The wire form of a promise."""
        return cls.model_validate(promise)


class RequestView(Outgoing):
    """A job as it was asked for."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    workdir: str = "."
    env: dict[str, str] = {}
    auto: bool = False
    deadline_s: float | None = None
    min_workers: int = 1
    max_workers: int | None = None
    workers: int = 1
    memory_bytes: int | None = None
    checkpoint_s: float = 60.0
    max_restarts: int = 3
    pip: tuple[str, ...] = ()


class JobView(Outgoing):
    """A job as it is now."""

    job_id: str
    owner: str
    request: RequestView
    submitted_s: float
    phase: Phase
    promise: PromiseView
    wanted: tuple[int, ...] = Field(default=(), description="Numbers of the slots it holds or is to get.")
    started_s: float | None = None
    ended_s: float | None = None
    done: float = Field(default=0.0, description="Progress in iterations.")
    of: float | None = Field(default=None, description="Iterations in all, once the job has said so.")
    batch_size: int | None = None
    resizes: int = 0
    pause_s: float = Field(default=0.0, description="Sum of the pauses that resizes cost.")
    restarts: int = 0
    exit_code: int | None = None
    reason: str = Field(default="", description="Why it is where it is, in a line for people.")

    @classmethod
    def of_record(cls, record: JobRecord) -> Self:
        """The wire form of a record."""
        return cls.model_validate(record)

    @property
    def name(self) -> str:
        """The name its owner gave it."""
        return self.request.name

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.phase.over


class JobPage(Outgoing):
    """Jobs, newest first."""

    jobs: list[JobView]
    next: str | None = Field(default=None, description="Give this as `after` to get the next page.")


# -- events, nodes, policy -------------------------------------------------------------------------------


class EventView(Outgoing):
    """One thing that happened."""

    seq: int = Field(description="Its number in the log; give it as `since` to go on from here.")
    time_s: float
    kind: str
    job_id: str | None = None
    node: str | None = None
    data: dict[str, Any] = {}

    @classmethod
    def of_event(cls, seq: int, event: Event) -> Self:
        """The wire form of an event."""
        return cls(
            seq=seq,
            time_s=event.time_s,
            kind=event.kind.value,
            job_id=event.job_id,
            node=event.node,
            data=dict(event.data),
        )


class EventPage(Outgoing):
    """Events, oldest first."""

    events: list[EventView]
    next: int = Field(description="Give this as `since` to get the next page.")


class NodeView(Outgoing):
    """A machine and its slots."""

    name: str
    gpus: int
    gpu_type: str = "gpu"
    up: bool = True
    draining: bool = False
    used: int = Field(default=0, description="Slots in use.")
    held: int = Field(default=0, description="Slots that others than swell have at the moment.")


class NodeList(Outgoing):
    """The machines there are."""

    nodes: list[NodeView]


class PolicyView(Outgoing):
    """The scheduling policy."""

    policy: str


class PolicyChange(Incoming):
    """Another policy, by name and options."""

    policy: Annotated[str, StringConstraints(min_length=1, max_length=500)] = Field(
        examples=["elasticflow", "pollux"], description="As `swell policies` lists them."
    )


class ReplayRequest(Incoming):
    """What would have happened under other policies, or on another cluster."""

    policies: list[Annotated[str, StringConstraints(min_length=1, max_length=500)]] = Field(
        default=[], max_length=20, description="Policies to replay under; the present one if there are none."
    )
    cluster: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        default=None, description="Another cluster, such as 8x8; none for the present one.", examples=["8x8"]
    )


# -- tokens ----------------------------------------------------------------------------------------------


class TokenRequest(Incoming):
    """A token to be made."""

    user: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    role: Annotated[str, StringConstraints(pattern="^(user|admin)$")] = "user"
    ttl_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds until it expires; none for never."
    )


class TokenView(Outgoing):
    """A token, without its secret."""

    token_id: str
    user: str
    role: str
    expires_s: float | None = None


class NewToken(TokenView):
    """A token that was just made. The secret is shown this once."""

    token: str


class TokenList(Outgoing):
    """The tokens there are."""

    tokens: list[TokenView]


# -- the rest --------------------------------------------------------------------------------------------


class Health(Outgoing):
    """Whether the server is well."""

    status: str
    version: str


class ErrorBody(Outgoing):
    """What went wrong, and what to do about it."""

    code: str = Field(description="A word for programs.")
    message: str = Field(description="A line for people.")
    field: str | None = Field(default=None, description="The field that was refused.")
    hint: str | None = Field(default=None, description="What to do next.")


class ErrorAnswer(Outgoing):
    """Every error has this form."""

    error: ErrorBody
