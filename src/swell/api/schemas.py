"""The words on the wire. What comes in is strict and bounded; what goes out is what the SDK returns.

Requests refuse fields they do not know, by name. Answers ignore fields they do not know, so that an older
client reads a newer server. Times are Unix seconds. The fields of a job are those of
`swell.domain.JobRequest`: the models for them are made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from swell.control.model import JobRecord, Phase, Promise
from swell.domain import Event, JobRequest
from swell.domain.request import (
    FIELDS,
    MAX_TEXT,
    MAX_VARIABLE,
    MAX_WORKERS,
    NO_NUL,
    VARIABLE,
    Kind,
    RequestField,
)

ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class Incoming(BaseModel):
    """A request: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Outgoing(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)


# -- jobs ------------------------------------------------------------------------------------------------

_Text = Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=NO_NUL)]
_Path = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT, pattern=NO_NUL)]
_Variable = Annotated[str, StringConstraints(max_length=MAX_VARIABLE, pattern=VARIABLE)]
_TYPES: dict[Kind, Any] = {
    Kind.TEXT: _Text,
    Kind.PATH: _Path,
    Kind.SWITCH: bool,
    Kind.COUNT: int,
    Kind.BYTES: int,
    Kind.DURATION: float,
    Kind.MOMENT: float,
    Kind.WORDS: list[_Text],
    Kind.VARIABLES: dict[_Variable, _Text],
}
_UNITS = {Kind.BYTES: " In bytes.", Kind.DURATION: " In seconds.", Kind.MOMENT: " Unix time, in seconds."}


def _strict_type(field: RequestField) -> Any:
    """The type of a field of a submission, with its limits."""
    about, kind = field.about, _TYPES[field.about.kind]
    limits: dict[str, Any] = {"pattern": about.pattern}
    if kind in (int, float):
        limits |= {"ge": about.least, "gt": about.above, "le": about.most}
        if kind is float:
            limits["allow_inf_nan"] = False
    else:
        limits |= {"min_length": about.least, "max_length": about.most}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    bounded = Annotated[kind, Field(**limits)] if limits else kind
    return bounded | None if field.optional else bounded


def _schema(field: RequestField) -> Any:
    """The default of a field of a submission, and what the OpenAPI document says about the field."""
    about = field.about
    default = ... if field.required else list(field.default) if about.kind is Kind.WORDS else field.default
    # People write durations, moments and sizes otherwise than programs do: those examples are for people.
    examples = None if about.kind in _UNITS else [about.example]
    return Field(default, description=about.help + _UNITS.get(about.kind, ""), examples=examples)


class _Submission(Incoming):
    """What a person hands in: a script, and if they like a deadline. Never a number of GPUs.

    A relative path of the script is relative to workdir.
    """

    def to_request(self) -> JobRequest:
        """What the control plane takes."""
        return JobRequest(**{name: getattr(self, name) for name in FIELDS})


if TYPE_CHECKING:

    class JobSubmission(_Submission):
        """What a person hands in; its fields are those of `JobRequest`."""

else:
    JobSubmission = create_model(
        "JobSubmission",
        __base__=_Submission,
        __doc__=_Submission.__doc__,
        __module__=__name__,
        **{name: (_strict_type(field), _schema(field)) for name, field in FIELDS.items()},
    )


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


if TYPE_CHECKING:
    RequestView = JobRequest  # the same attributes; what it does not share, nobody needs of a view
else:
    RequestView = create_model(
        "RequestView",
        __base__=Outgoing,
        __doc__="A job as it was asked for.",
        __module__=__name__,
        **{
            name: (kind, ... if FIELDS[name].required else FIELDS[name].default)
            for name, kind in get_type_hints(JobRequest).items()
        },
    )


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


class SeriesView(Outgoing):
    """A job's curves over time: columns of equal length, null where the job said nothing."""

    time_s: list[float]
    curves: dict[str, list[float | None]] = Field(
        description="By name: done, of, workers, epoch, batch_size, loss, lr, noise_scale and others."
    )
    metrics: dict[str, list[float | None]] = Field(description="What the script gave to `job.log`.")
    changes: list[dict[str, Any]] = Field(
        description="Starts, resizes with their pauses, lost workers and checkpoints, oldest first."
    )


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
