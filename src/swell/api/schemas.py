"""The models of requests and answers. Requests are strict and bounded; answers are what the SDK returns.

A request with an unknown field is refused by the field's name. Unknown fields of an answer are ignored, so
that an older client reads a newer server. Times are Unix seconds. The fields of a job are those of
`swell.domain.JobRequest`, from which the models are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from swell.control.model import JobRecord, Phase, Promise
from swell.domain import Event, JobRequest, Reservation, Team
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

if TYPE_CHECKING:
    from swell.control.reservations import ReservationState
    from swell.control.teams import TeamState


ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
Workers = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class Incoming(BaseModel):
    """A request: strict types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Outgoing(BaseModel):
    """An answer: unknown fields ignored."""

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
    limits: dict[str, Any] = {}
    if about.kind is Kind.WORDS and about.pattern is not None:
        kind = list[Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=about.pattern)]]
    else:
        limits["pattern"] = about.pattern
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
    # Examples of durations, moments and sizes are written for people, not in the units of the API.
    examples = None if about.kind in _UNITS else [about.example]
    return Field(default, description=about.help + _UNITS.get(about.kind, ""), examples=examples)


class _Submission(Incoming):
    """What a person submits: a script and perhaps a deadline. Never a number of GPUs.

    A relative path of the script is relative to workdir.
    """

    def to_request(self) -> JobRequest:
        """The submission as the request that the control plane takes."""
        return JobRequest(**{name: getattr(self, name) for name in FIELDS})


if TYPE_CHECKING:

    class JobSubmission(_Submission):
        """What a person submits; its fields are those of `JobRequest`."""

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

    min_workers: Workers = Field(default=1, description="Fewest workers.")
    max_workers: Workers | None = Field(default=None, description="Most workers; null for no bound.")


class EstimateView(Outgoing):
    """When a job will probably be done."""

    finish_s: float | None = Field(default=None, description="Most likely finish; null if unknown.")
    earliest_s: float | None = None
    latest_s: float | None = None
    source: str = Field(default="none", description="model, history, kin, profile or none.")


class PromiseView(Outgoing):
    """The answer to a submission or a quote."""

    admitted: bool
    pending: bool = Field(
        default=False, description="The deadline is decided after a short profiling run; see `reason`."
    )
    guaranteed_s: float | None = Field(default=None, description="The guaranteed finish, if there is one.")
    estimate: EstimateView
    earliest_deadline_s: float | None = Field(
        default=None, description="If refused: the earliest deadline that would be admitted."
    )
    reason: str = Field(default="", description="If refused: why. If pending: when it is decided.")
    gpu_type: str | None = Field(
        default=None, description="With several GPU types: the one that the guaranteed finish is planned on."
    )

    @classmethod
    def of(cls, promise: Promise) -> Self:
        """The wire form of a promise."""
        return cls.model_validate(promise)


if TYPE_CHECKING:
    RequestView = JobRequest  # the same attributes, which is all that users of a view need
else:
    RequestView = create_model(
        "RequestView",
        __base__=Outgoing,
        __doc__="A job's request, as it was submitted.",
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
    wanted: tuple[int, ...] = Field(default=(), description="Numbers of the slots that it should have.")
    started_s: float | None = None
    ended_s: float | None = None
    done: float = Field(default=0.0, description="Progress in iterations.")
    of: float | None = Field(default=None, description="Iterations in all; null until the job reports it.")
    batch_size: int | None = None
    resizes: int = 0
    pause_s: float = Field(default=0.0, description="Sum of the pauses that resizes cost.")
    restarts: int = 0
    exit_code: int | None = None
    reason: str = Field(default="", description="Why the job is in its phase, in a line for people.")
    most_workers: int | None = Field(
        default=None, description="Most workers that the job itself can use; null if it has not said."
    )
    confined: str = Field(default="", description="Why it can use no more than `most_workers`.")

    @classmethod
    def of_record(cls, record: JobRecord) -> Self:
        """The wire form of a record."""
        return cls.model_validate(record)

    @property
    def name(self) -> str:
        """The name that the owner gave the job."""
        return self.request.name

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self.phase.over


class JobPage(Outgoing):
    """Jobs, newest first."""

    jobs: list[JobView]
    next: str | None = Field(default=None, description="Give this as `after` to get the next page.")


class SeriesView(Outgoing):
    """A job's curves over time: columns of equal length, null where a report lacks the value."""

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

    seq: int = Field(description="Number in the log; give it as `since` to go on after this event.")
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
    """A node and its slots."""

    name: str
    gpus: int
    gpu_type: str = "gpu"
    up: bool = True
    draining: bool = False
    used: int = Field(default=0, description="Slots in use.")
    held: int = Field(default=0, description="Slots that somebody outside swell has taken.")
    rentable: bool = Field(default=False, description="Whether the autoscaler rents it and lets it go.")
    slow: float | None = Field(
        default=None, description="If its workers stay slow: how many times slower than others they were."
    )
    avoided_until_s: float | None = Field(
        default=None,
        description="If it is avoided, being slow or one where no worker starts: until when (Unix time).",
    )
    unstartable: str = Field(default="", description="Why no worker can be started there, if that is so.")


class AutoscalerView(Outgoing):
    """How many nodes are rented, how many should be, and why."""

    least: int = Field(description="Nodes that are always kept.")
    most: int = Field(description="The most nodes that the bound and the budget allow.")
    wanted: int
    ready: int = Field(description="Nodes that can run jobs, those that leave included.")
    coming: int = Field(description="Nodes that were requested and are not ready yet.")
    leaving: list[str] = Field(default=[], description="Nodes that go once the last worker has left.")
    reason: str = Field(description="Why so many are wanted.")
    price_per_hour: float = Field(description="Price of one node.")
    budget_per_hour: float | None = None


class NodeList(Outgoing):
    """All nodes, and the autoscaler where nodes are rented."""

    nodes: list[NodeView]
    autoscaler: AutoscalerView | None = None


class PolicyView(Outgoing):
    """The scheduling policy."""

    policy: str


class PolicyChange(Incoming):
    """Another policy, by name and options."""

    policy: Annotated[str, StringConstraints(min_length=1, max_length=500)] = Field(
        examples=["elasticflow", "pollux"], description="A policy that `swell policies` lists."
    )


class ReplayRequest(Incoming):
    """A replay of the platform's history under other policies, or on another cluster."""

    policies: list[Annotated[str, StringConstraints(min_length=1, max_length=500)]] = Field(
        default=[], max_length=20, description="Policies to replay under; if empty, the present one."
    )
    cluster: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        default=None, description="Another cluster, such as 8x8; null for the present one.", examples=["8x8"]
    )


class CollectRequest(Incoming):
    """What to delete of jobs that are over."""

    keep_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)] | None = Field(
        default=None, description="Keep jobs for so long after their end; null: as `swell up` was told."
    )
    keep_bytes: Annotated[int, Field(ge=0, le=1 << 60)] | None = Field(
        default=None, description="Keep at most so many bytes of directories; null: as `swell up` was told."
    )
    dry: bool = Field(default=True, description="Only say what would be deleted.")


class Collected(Outgoing):
    """What was deleted, or would be."""

    forgotten: list[str]
    thinned: list[str] = Field(description="Jobs of which only the newest checkpoint is kept.")
    freed_bytes: int


class PolicyInfo(Outgoing):
    """A policy that can be chosen."""

    name: str
    paper: str = ""
    goal: str = ""
    knows: str = ""
    error: str | None = Field(default=None, description="Why the policy cannot be loaded.")


class PolicyList(Outgoing):
    """All policies."""

    policies: list[PolicyInfo]


class LaneView(Outgoing):
    """One job's slots over time."""

    name: str
    changes: list[tuple[float, int]] = Field(description="Moments, and how many slots it had from then on.")
    ended_s: float | None = None


class LanesView(Outgoing):
    """All jobs' slots over time."""

    last_seq: int = Field(description="Give this as `since` to the event stream to go on from here.")
    jobs: dict[str, LaneView]
    capacity: list[tuple[float, int]] = Field(
        description="Moments, and how many slots there were from then on."
    )
    marks: list[tuple[float, str, str]] = Field(
        description="Moment, kind and subject: lost workers, nodes that came and went."
    )


# -- tokens ----------------------------------------------------------------------------------------------


class TokenRequest(Incoming):
    """A token to be made."""

    user: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    role: Annotated[str, StringConstraints(pattern="^(user|viewer|admin)$")] = "user"
    ttl_s: Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds until the token expires; null for never."
    )


class WhoView(Outgoing):
    """The holder of a token."""

    user: str
    role: str = Field(description="user, viewer or admin.")


class TokenView(Outgoing):
    """A token, without its secret."""

    token_id: str
    user: str
    role: str
    expires_s: float | None = None


class NewToken(TokenView):
    """A token that was just made. Its secret is shown only now."""

    token: str


class TokenList(Outgoing):
    """All tokens."""

    tokens: list[TokenView]


# -- the rest --------------------------------------------------------------------------------------------


class Health(Outgoing):
    """The state of the server."""

    status: str
    version: str
    role: str = "leader"
    """'leader', or 'standby' of a control plane that waits while another one leads."""
    leader: str | None = None
    """For a standby: the URL of the control plane that leads, if it knows one."""
    notes: list[str] = Field(default=[], description="What is not as it was set up, though all parts work.")


class ErrorBody(Outgoing):
    """What went wrong, and what to do about it."""

    code: str = Field(description="A word for programs.")
    message: str = Field(description="A line for people.")
    field: str | None = Field(default=None, description="The field that was refused.")
    hint: str | None = Field(default=None, description="What to do next.")


class ErrorAnswer(Outgoing):
    """Every error has this form."""

    error: ErrorBody


# Reservations over the wire: what is asked and what is answered.


MOST_GPUS = 1_000_000
_Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
_Name = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


class ReservationRequest(Incoming):
    """Capacity to keep from training: a number of slots or named nodes, for some hours or a service."""

    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = Field(
        default=0, description="How many slots, whichever; with `most`, what the service wants now."
    )
    nodes: list[_Name] = Field(default=[], max_length=1000, description="All slots of these nodes instead.")
    start_s: _Moment | None = Field(default=None, description="Unix time; null for now.")
    end_s: _Moment | None = Field(default=None, description="Unix time; null for no end.")
    every_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="The same hours again after so many seconds: 86400 for every day."
    )
    most: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = Field(
        default=None, description="Follow the demand of a service that never wants more than this."
    )
    owner: Annotated[str, StringConstraints(max_length=128)] = Field(
        default="", description="The user who may say what the service wants, besides administrators."
    )
    force: bool = Field(default=False, description="Reserve even if a promise to a job is broken by it.")

    def to_reservation(self, name: str, now_s: float) -> Reservation:
        """The request as the control plane takes it."""
        return Reservation(
            name=name,
            gpus=self.gpus,
            nodes=tuple(self.nodes),
            start_s=now_s if self.start_s is None else self.start_s,
            end_s=self.end_s,
            every_s=self.every_s,
            most=self.most,
            owner=self.owner,
        )


class DemandRequest(Incoming):
    """What a service wants now."""

    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = Field(description="How many slots.")


class ReservationView(Outgoing):
    """A reservation and the slots that it has."""

    name: str
    gpus: int = Field(description="How many slots are wanted in its hours, or by the service now.")
    nodes: list[str] = Field(default=[], description="All slots of these nodes, if not a number.")
    start_s: float
    end_s: float | None = None
    every_s: float | None = None
    most: int | None = None
    owner: str = ""
    active: bool = Field(description="Whether its hours are now.")
    slots: list[int] = Field(default=[], description="The slots that it holds.")
    yielded: bool = Field(description="Whether training has left them, so that they can be used.")
    heard_s: float | None = Field(default=None, description="When the service's demand was last heard of.")
    endangered: list[str] = Field(
        default=[], description="Jobs whose promised finish this reservation puts in danger."
    )

    @classmethod
    def of_state(cls, state: ReservationState) -> Self:
        """The wire form of a reservation."""
        one = state.reservation
        return cls(
            name=one.name,
            gpus=one.gpus,
            nodes=list(one.nodes),
            start_s=one.start_s,
            end_s=one.end_s,
            every_s=one.every_s,
            most=one.most,
            owner=one.owner,
            active=state.active,
            slots=list(state.slots),
            yielded=state.yielded,
            heard_s=state.heard_s,
            endangered=list(state.endangered),
        )


class ReservationList(Outgoing):
    """All reservations."""

    reservations: list[ReservationView]


# Teams over the wire: what is asked and what is answered.


_User = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]*$")]


class TeamRequest(Incoming):
    """A team as an administrator wants it."""

    slots: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        description="Its quota: slots that it gets whenever its jobs can use them."
    )
    users: list[_User] | None = Field(
        default=None,
        max_length=10_000,
        description="Users whose jobs are the team's; null keeps those it has, an empty list removes them.",
    )
    force: bool = Field(default=False, description="Change it even if a promise to a job is broken by it.")

    def to_team(self, name: str) -> Team:
        """The request as the control plane takes it."""
        return Team(name=name, slots=self.slots, users=tuple(dict.fromkeys(self.users or ())))


class TeamView(Outgoing):
    """A team and the slots that it has."""

    name: str = Field(description="Empty for all users who are in no team.")
    slots: int = Field(description="Its quota.")
    users: list[str] = Field(default=[])
    own: int = Field(description="What it may count on now; less than its quota if nodes are lost.")
    used: int = Field(description="Slots that its jobs have.")
    borrowed: int = Field(description="How many of these are other teams', and go back when they want them.")
    running: int = Field(description="Jobs that run.")
    waiting: int = Field(description="Jobs that wait for slots.")
    endangered: list[str] = Field(
        default=[], description="Jobs whose promised finish this change puts in danger."
    )

    @classmethod
    def of_state(cls, state: TeamState) -> Self:
        """The wire form of a team."""
        return cls(
            name=state.team.name,
            slots=state.team.slots,
            users=list(state.team.users),
            own=state.use.own,
            used=state.use.used,
            borrowed=state.use.borrowed,
            running=state.running,
            waiting=state.waiting,
            endangered=list(state.endangered),
        )


class TeamList(Outgoing):
    """All teams."""

    teams: list[TeamView]
