"""Every message between the processes of a job, and every limit that is checked where one comes in.

    worker    -- FromWorker -->    coordinator  -- ToWorker -->
    launcher  -- FromLauncher -->  coordinator  -- ToLauncher -->
    tool      -- FromTool -->      coordinator  -- answers -->     (a command, the engine of a control plane)
    notes     -- FromNotes -->     coordinator  -- answers -->     (a worker that builds a process group)
    worker    -- Joining -->       worker       -- Joined -->      (then frames: `sync/mesh`)

A connection begins with a hello that names its role. A message is a JSON object whose `type` says which of
the types below it is; the types' fields are its fields. `wire` carries them.

`read` turns what arrived into a message, or raises `Refused`, which names the field. Behind `read` an
exception is an error of swell's own, never of the sender. Unknown fields are ignored, so that a newer release
may add some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, ValidationError

from swell.train.agent.errors import Refused

# ---------------------------------------------------------------------- values

MOST = 1 << 53
"""Numbers up to this one survive every JSON reader."""
MOST_DEPTH = 32
"""Deepest nesting of an object, so that everything that writes it again can follow."""

Count = Annotated[int, Meta(ge=0, le=MOST, description="a whole number from 0 on")]
Positive = Annotated[int, Meta(ge=1, le=MOST, description="a whole number from 1 on")]
Whole = Annotated[int, Meta(ge=-MOST, le=MOST, description="a whole number")]
Amount = Annotated[float, Meta(ge=-MOST, le=MOST, description="a number")]
ExitCode = Annotated[int, Meta(ge=-255, le=255, description="an exit code; negative for a signal")]
Text = Annotated[str, Meta(description="text")]
Steps = Annotated[float, Meta(ge=0, le=1e15, description="a number from 0 to 1e+15")]
Seconds = Annotated[float, Meta(ge=0, le=1e7, description="a number of seconds from 0 to 1e+07")]
Samples = Annotated[int, Meta(ge=0, le=10**12, description="a whole number from 0 to 10^12")]
Batch = Annotated[int, Meta(ge=1, le=10**12, description="a whole number from 1 to 10^12")]
Members = Annotated[int, Meta(ge=0, le=100_000, description="a whole number from 0 to 100000")]
Gradient = Annotated[float, Meta(ge=-1e30, le=1e30, description="a number from -1e+30 to 1e+30")]
Word = Annotated[str, Meta(pattern=r"^[ -~]{1,100}\Z", description="1 to 100 printable characters")]
Json = Annotated[dict[str, Any], Meta(description=f"an object, nested {MOST_DEPTH} levels deep at most")]
WorkerName = Annotated[
    str,
    Meta(pattern=r"^w(0|[1-9][0-9]{0,8})\Z", description="the name of a worker: w0, w1, ..."),
]
NoWorker = Annotated[
    str,
    Meta(pattern=r"^(w(0|[1-9][0-9]{0,8}))?\Z", description="the name of a worker, or empty"),
]
Names = Annotated[
    tuple[WorkerName, ...],
    Meta(max_length=100_000, description="a list of the names of different workers, at most 100000"),
]
SomeNames = Annotated[
    tuple[WorkerName, ...],
    Meta(min_length=1, description="a list of the names of different workers, at least 1"),
]
_Host = Annotated[str, Meta(min_length=1)]
_Port = Annotated[int, Meta(gt=0, lt=1 << 16)]
Address = Annotated[tuple[_Host, _Port], Meta(description="a host and a port")]
Addresses = Annotated[
    dict[WorkerName, Address | None],
    Meta(description="a host and a port for each worker, null where they are not known yet"),
]


def age(name: str) -> int:
    """The number in a worker's name: the lower, the older."""
    return int(name[1:]) if name[1:].isdecimal() else 0


class Status(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Being started or preparing; not yet able to join."""
    READY = "ready"
    """Prepared, waiting to be part of a generation."""
    MEMBER = "member"
    """In the current generation."""
    LEAVING = "leaving"
    """Dropped by a switch, and about to end."""
    DONE = "done"
    """Finished the training loop."""


CAUSES = ("home", "software", "link", "silent", "process")
"""Why a worker cannot be started on a node: swell's home is not there; swell cannot be loaded, or the job's
environment not be made; the node does not reach the job's supervisor, perhaps for a moment; it does not
answer; the worker's process ended before it ran the script."""


class Error(Struct, frozen=True, tag="error"):
    """To everybody: a message was refused, and has changed nothing."""

    error: Text


# ---------------------------------------------------------------------- hello: who connects


class WorkerHello(Struct, frozen=True, tag_field="role", tag="worker"):
    """A worker connects, and repeats after each reconnect what lost messages may have said."""

    worker: WorkerName
    pid: Count
    address: Address
    """Where other workers reach it."""
    status: Annotated[Status, Meta(description="one of " + ", ".join(Status))]
    generation: Count
    """The generation that it is in; 0 if it is in none."""
    members: Names
    epoch: Count | None = None
    broken: Count = 0
    """The generation whose connections broke, if they did, in `operation`."""
    operation: Count = 0
    type: Literal["hello"] = "hello"

    def __post_init__(self) -> None:
        if self.generation and not self.members:
            raise ValueError("members: got an empty list, must be the names of the generation's workers")


class LauncherHello(Struct, frozen=True, tag_field="role", tag="agent"):
    """The launcher connects: it starts the job's workers and reports their ends."""

    alive: Names = ()
    """The workers that exist right now."""
    type: Literal["hello"] = "hello"


class ToolHello(Struct, frozen=True, tag_field="role", tag="tool"):
    """A command, a dashboard or a control plane connects. Answer: `JobStatus` as `welcome`."""

    fencing: Count | None = None
    """The fencing number of a control plane that is one of several. The orders of lower ones are refused."""
    type: Literal["hello"] = "hello"


class NotesHello(Struct, frozen=True, tag_field="role", tag="notes"):
    """A worker wants to read and write the notes of a process group (`notes`)."""

    group: Text
    type: Literal["hello"] = "hello"


Hello = WorkerHello | LauncherHello | ToolHello | NotesHello


class Greeting(Struct, frozen=True, tag="welcome"):
    """To the launcher and for notes: the connection is ready."""


# ---------------------------------------------------------------------- worker to coordinator


class Ready(Struct, frozen=True, tag="ready"):
    """The worker is prepared, and waits in this epoch."""

    epoch: Count


class Beat(Struct, frozen=True, tag="beat"):
    """The worker is alive, at this step: twice a second or so, before `Done`, and when its process ends."""

    step: Count = 0
    report: Json = {}
    """What it reports, as `docs/reference/wire-protocol.md` lists it; the coordinator passes it on."""


class AtEpoch(Struct, frozen=True, tag="epoch"):
    """The members began this epoch."""

    epoch: Count


class Switched(Struct, frozen=True, tag="switched"):
    """The worker entered a generation."""

    generation: Count
    members: SomeNames
    epoch: Count
    step: Count = 0


class Broken(Struct, frozen=True, tag="broken"):
    """The connections of the worker's generation broke in an operation; it needs a new generation."""

    generation: Count
    operation: Count
    lost: NoWorker = ""
    """The member whose connection ended first, if that is known."""
    certain: bool = False
    """Whether the system says that this member is exiting."""


class Left(Struct, frozen=True, tag="left"):
    """The worker leaves, because this candidate was agreed on without it."""

    generation: Count


class Done(Struct, frozen=True, tag="done"):
    """The worker's training loop is over: it takes no part in this operation and later ones."""

    operation: Count


class Stopped(Struct, frozen=True, tag="stopped"):
    """The job's state is on disk, and its workers leave, because the job was asked to stop."""


class WorkerEvent(Struct, frozen=True, tag="event"):
    """An event for the job's history."""

    name: Text
    fields: Json = {}


class Suspect(Struct, frozen=True, tag="suspect"):
    """The worker's link to another one seems to be cut."""

    worker: WorkerName


class Checked(Struct, frozen=True, tag="checked"):
    """The answer to `TryReach`: the workers that this one cannot reach."""

    number: Count
    unreachable: Names


class Waiting(Struct, frozen=True, tag="waiting"):
    """The worker's step stands still, because these workers have not sent their part."""

    step: Count
    workers: Names


FromWorker = (
    Ready
    | Beat
    | AtEpoch
    | Switched
    | Broken
    | Left
    | Done
    | Stopped
    | WorkerEvent
    | Suspect
    | Checked
    | Waiting
)


# ---------------------------------------------------------------------- what a worker reports


class Limits(Struct, frozen=True):
    """The batches that a job may use: one batch only unless it is adaptive."""

    init_batch: Batch
    """The batch that the job was tuned for."""
    max_batch: Batch
    min_local: Batch
    """Least samples for one gradient."""
    max_local: Batch


class Report(Struct, frozen=True):
    """A heartbeat's report, as far as a control plane uses it. Figures that may diverge may be anything."""

    step: Steps = 0.0
    rank: Members = 0
    done: Steps | None = None
    """Progress in steps at the batch that the job was tuned for; `step` if it is left out."""
    of: Steps | None = None
    """The same at the end; null if the script does not say, or has a target."""
    at_most: Steps | None = None
    """For a job that trains until its loss is low enough: the most that it trains."""
    target_loss: Any = None
    """That loss."""
    epoch: Samples | None = None
    batch_size: Batch | None = None
    loss: Any = None
    """The loss of the whole job, averaged over some fifty steps; null before the first."""
    lr: Any = None
    metrics: Any = None
    """What `job.log` was given, by name."""
    local_batch: Samples | None = None
    """Samples for one gradient of a worker, which computes `accumulation + 1` of them for a step."""
    accumulation: Samples = 0
    workers: Members | None = None
    world: Members | None = None
    step_s: Seconds | None = None
    sync_s: Seconds = 0.0
    steps: Samples | None = None
    """How many steps the times are averaged over."""
    mode: Word | None = None
    limits: Limits | None = None
    sqr: Gradient | None = None
    """In adaptive mode: the squared norm of the gradient at the tuned batch."""
    var: Annotated[float, Meta(ge=0, le=1e30, description="a number from 0 to 1e+30")] | None = None
    """In adaptive mode: the variance of the gradient."""
    noise_updates: Samples | None = None
    """How many steps these two are averaged over."""


# ---------------------------------------------------------------------- coordinator to worker


class Welcome(Struct, frozen=True, tag="welcome"):
    """The answer to a worker's hello: whether the job trains already, and where it is."""

    live: bool = False
    epoch: Count = 0
    generation: Count = 0


class GoToEpoch(Struct, frozen=True, tag="turn"):
    """The job went on to this epoch while the worker waited in another: prepare for it."""

    epoch: Count


class Offer(Struct, frozen=True):
    """A generation that begins when every member of the present one agrees to it at one step boundary."""

    number: Count
    members: SomeNames
    addresses: Addresses
    epoch: Count
    """The epoch of its newcomers: members that are in another one must not switch to it."""
    recovery: bool = False
    """True if the present generation is broken, so that members enter this one at once."""


class NextGeneration(Struct, frozen=True, tag="candidate"):
    """The candidate for the next generation; null withdraws the earlier one."""

    candidate: Offer | None = None


class TryReach(Struct, frozen=True, tag="check"):
    """Find out which of these workers you reach, and answer with `Checked`."""

    number: Count
    addresses: Addresses


class SaveAndLeave(Struct, frozen=True, tag="stop"):
    """Save the job's state at the next step, and leave."""


class Fenced(Struct, frozen=True, tag="fenced"):
    """The job goes on without you: end."""


ToWorker = Welcome | GoToEpoch | NextGeneration | TryReach | SaveAndLeave | Fenced | Error


# ---------------------------------------------------------------------- launcher to coordinator


class Exited(Struct, frozen=True, tag="exited"):
    """A worker's process has ended, with this exit code (negative: killed by that signal)."""

    worker: WorkerName
    code: ExitCode
    note: Text = ""
    """Why, in a line for the job's owner."""


class Lost(Struct, frozen=True, tag="lost"):
    """A worker's slot cannot be reached; its process may still be running. Not the script's fault."""

    worker: WorkerName


class Unstartable(Struct, frozen=True, tag="unstartable"):
    """A worker could not be started on the node of its slot, through no fault of its script."""

    worker: WorkerName
    node: Text
    cause: Annotated[
        str, Meta(pattern=rf"^({'|'.join(CAUSES)})\Z", description="one of " + ", ".join(CAUSES))
    ]
    """One of `CAUSES`."""
    reason: Text
    """What happened, in a line for the job's owner."""


class Figures(Struct, frozen=True, omit_defaults=True):
    """What a program printed about itself; what it did not print is left out."""

    done: Amount | None = None
    of: float | None = None
    loss: float | None = None
    lr: float | None = None
    epoch: int | None = None
    saved: Whole | None = None
    """The progress of which the program has just saved its state."""
    metrics: dict[str, float] = {}


class Said(Struct, frozen=True, tag="said"):
    """A program printed figures; those of rank 0 become the job's report."""

    worker: WorkerName
    figures: Figures


class LauncherEnds(Struct, frozen=True, tag="ending"):
    """The launcher was told to end the job: no worker is started any more."""

    code: ExitCode
    reason: Text


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """Everything is cleaned up; the coordinator can end."""


FromLauncher = Exited | Lost | Unstartable | Said | LauncherEnds | Goodbye


# ---------------------------------------------------------------------- coordinator to launcher


class Spawn(Struct, frozen=True, tag="spawn"):
    """Start a worker process with this name, on this slot if the job has slots."""

    worker: WorkerName
    slot: Count | None = None


class Kill(Struct, frozen=True, tag="kill"):
    """End this worker's process, and those that it started."""

    worker: WorkerName


class Finish(Struct, frozen=True, tag="finish"):
    """The job is over."""

    code: int
    reason: Text
    report: Json = {}
    """The leader's last report."""


ToLauncher = Greeting | Spawn | Kill | Finish | Error


# ---------------------------------------------------------------------- tools


class GetStatus(Struct, frozen=True, tag="status"):
    """Answer: `JobStatus` as `status`."""


class Watch(Struct, frozen=True, tag="watch"):
    """Answer: `JobStatus` as `watching`, then every event and report as it happens."""


class GetStory(Struct, frozen=True, tag="story"):
    """Answer: `StoryLines`."""


class Resize(Struct, frozen=True, tag="resize"):
    """Give the job this many workers, on these slots if it has slots. Answer: `Resized`."""

    workers: Count
    slots: list[Count] | None = None


class StopJob(Struct, frozen=True, tag="stop"):
    """End the job with this exit code, or have it save its state first. Answer: `Stopping`."""

    code: ExitCode = 143
    save: bool = False


FromTool = GetStatus | GetStory | Watch | Resize | StopJob


class StoryLines(Struct, frozen=True, tag="story"):
    """The last transitions of the job's membership, a line for each, the oldest first."""

    lines: list[str]


class Resized(Struct, frozen=True, tag="resized"):
    """The job's new target."""

    workers: Count


class Stopping(Struct, frozen=True, tag="stopping"):
    """The job ends."""


class Reported(Struct, frozen=True, tag="report"):
    """To those who watch: a worker's report."""

    worker: WorkerName
    report: Json


class Result(Struct, frozen=True):
    """How a job ended."""

    code: int
    reason: str


class JobStatus(Struct, frozen=True):
    """A job as it is now. Reports and ids are those of workers that are there."""

    workers: dict[WorkerName, Word]
    """The status of each worker."""
    members: Names
    target: Members
    minimum: Members = 0
    maximum: Members = 0
    confined: Text = ""
    """Why the job may have fewer workers than it was started with, or empty."""
    job: Text = ""
    """Its name."""
    generation: Count = 0
    epoch: Count = 0
    step: Count = 0
    slots: dict[WorkerName, Count] = {}
    """The slots of workers that have one."""
    processes: dict[WorkerName, Count | None] | None = None
    """The workers that were started and have not ended, with their slots; null from an earlier release."""
    event: Count = 0
    """The number of the last event before this answer."""
    over: bool = False
    result: Result | None = None
    pids: dict[str, int] = {}
    reports: dict[str, Any] = {}
    last_report: Json = {}
    """The leader's latest report, also after its end."""


class StatusAnswer(JobStatus, frozen=True, tag="status"):
    """The answer to `GetStatus`."""


class WelcomeTool(JobStatus, frozen=True, tag="welcome"):
    """The answer to `ToolHello`."""


class Watching(JobStatus, frozen=True, tag="watching"):
    """The answer to `Watch`. The events that follow are numbered from `event + 1` on, so none is missed."""


# ---------------------------------------------------------------------- events

# A job's history, a line for each in events.jsonl, and an `event` message to those who watch: `event` is the
# tag of the type, `time_s` when it was, and `number` its place among the events of this coordinator. Some
# messages are events as they are: `Spawn`, `Exited`, `Unstartable`, `Finish`. Workers add events of their own
# with `WorkerEvent` (`differs`, `could_not_follow` and others), and more fields to those below.


class CoordinatorBegan(Struct, frozen=True, tag="coordinator"):
    """The coordinator serves; `restarted` if an earlier one was killed."""

    pid: int
    restarted: bool


class NewTarget(Struct, frozen=True, tag="resize"):
    """The job was given another number of workers."""

    target: Count


class StopAsked(Struct, frozen=True, tag="stop"):
    """The job was asked to save its state and stop."""


class Prepared(Struct, frozen=True, tag="ready"):
    """A newcomer is prepared."""

    worker: WorkerName


class Proposed(Struct, frozen=True, tag="candidate"):
    """A candidate for the next generation was announced."""

    number: Count
    members: Names
    recovery: bool


class Began(Struct, frozen=True, tag="generation"):
    """A generation began."""

    members: Names
    number: Count = 0
    step: Count | None = None


class Switch(Struct, frozen=True, tag="switch"):
    """The job went on with other workers after this pause."""

    pause_s: Seconds | None = None
    world: Count | None = None


class Recovery(Struct, frozen=True, tag="recovery"):
    """The job went on after a worker was lost."""

    pause_s: Seconds | None = None
    world: Count | None = None


class Checkpoint(Struct, frozen=True, tag="checkpoint"):
    """The job's state was saved."""

    step: Annotated[int, Meta(ge=0, le=10**15, description="a whole number from 0 to 10^15")]
    worker: NoWorker = ""


class Saving(Struct, frozen=True, tag="save"):
    """The workers of a generation were asked to save their state and end."""

    number: Count


class GaveUp(Struct, frozen=True, tag="fenced"):
    """The job goes on without a worker, which must end."""

    worker: WorkerName


class LeftOut(Struct, frozen=True, tag="left_out"):
    """The job goes on without a worker that these cannot reach, or that was silent for so long."""

    worker: WorkerName
    by: Names | None = None
    silent_s: Seconds | None = None


class NewcomerWaits(Struct, frozen=True, tag="unreachable"):
    """A newcomer waits, because these workers cannot reach it."""

    worker: WorkerName
    by: Names


class Returned(Struct, frozen=True, tag="back"):
    """A worker joined in the place of one that was left out."""

    worker: WorkerName
    instead_of: WorkerName


class Standstill(Struct, frozen=True, tag="standstill"):
    """A step waits for these workers."""

    step: Count
    workers: Names


class StepRepeated(Struct, frozen=True, tag="out_of_step"):
    """A worker found the members at different points of the script; the step is made again."""

    worker: WorkerName
    step: Count


class Straggler(Struct, frozen=True, tag="straggler"):
    """A worker that is slower than the others is replaced."""

    worker: WorkerName
    times: Annotated[float, Meta(ge=1, le=1e9, description="a number from 1 to 1e+09")]
    slot: Count | None = None
    leader: bool = False
    """Whether it led the job, and so may have had more to do than the others."""
    link: bool = False
    """Whether it is its links to the others that are slow."""


class Parted(Struct, frozen=True, tag="parted"):
    """A replica is started again: its workers do not reach each other, or `worker` asked for it."""

    workers: Names
    worker: NoWorker = ""


class Confined(Struct, frozen=True, tag="confined"):
    """The job cannot use more workers than this."""

    workers: Annotated[int, Meta(ge=1, le=100_000, description="a whole number from 1 to 100000")]
    reason: Text


Happening = (
    CoordinatorBegan
    | NewTarget
    | StopAsked
    | Spawn
    | Prepared
    | Proposed
    | Began
    | Switch
    | Recovery
    | Checkpoint
    | Saving
    | GaveUp
    | LeftOut
    | NewcomerWaits
    | Returned
    | Standstill
    | StepRepeated
    | Straggler
    | Parted
    | Confined
    | Exited
    | Unstartable
    | Finish
)


# ---------------------------------------------------------------------- notes


class WriteNotes(Struct, frozen=True, tag="note"):
    """Keep these notes. Answer: `Noted`."""

    values: dict[str, str]


class ReadNotes(Struct, frozen=True, tag="read"):
    """Answer: those of these notes that have been written."""

    keys: list[str]


class Noted(Struct, frozen=True, tag="noted"):
    """The notes are kept."""


class NotesFound(Struct, frozen=True, tag="notes"):
    """Notes, by key."""

    values: dict[str, str]


FromNotes = WriteNotes | ReadNotes


# ---------------------------------------------------------------------- job.json


class JobFile(Struct, frozen=True):
    """The settings of a job, in `job.json` in its directory: what its processes know before they connect."""

    name: Text = ""
    launch: Text = ""
    """This run of the job; processes of an earlier one end."""
    secret: Text = ""
    script: Text = ""
    minimum: Positive = 1
    maximum: Positive = 1
    target: Positive = 1
    """Workers to begin with."""
    slots: list[Count] | None = None
    """Their slots, one for each; null for a job without slots."""
    spares: Count = 0
    """Prepared workers that are kept waiting beyond those that train."""
    silent_after_s: Amount = 5.0
    """A member that says nothing for so long is given up."""
    kill_silent: bool = True
    """Whether its process is killed then; if not, it is only fenced."""
    gather_s: Amount = 1.0
    """How long a prepared newcomer waits for others that are being prepared, to join in one switch."""
    host: Text = ""
    """Where the coordinator listens; empty for the loopback."""
    away_s: Amount = 60.0
    """How long a coordinator that hears nobody on other hosts waits, because its own link may be down."""
    encrypt: bool = True
    """Whether connections between hosts are encrypted."""
    command: bool = False
    """Whether the script is any program, which is resized by save and restart."""
    auto: bool = False
    """Whether the script is unmodified."""
    workers_per_replica: Positive = 1
    checkpoints: Text = ""
    """The folder for checkpoints; empty for the one in the job's directory."""
    checkpoint_s: Amount | None = None
    """Seconds between checkpoints; null if the script or the default says."""
    track: list[str] = []
    """The experiment trackers that the job reports to."""
    shared_memory: bool = True
    """Whether workers on one host share memory."""
    collectives: Text = "auto"
    """Who adds gradients: `mesh`, `nccl`, `gloo` or `auto`."""

    @property
    def listens_at(self) -> str:
        """The address where the coordinator listens."""
        return self.host or "127.0.0.1"


# ---------------------------------------------------------------------- between workers


class Joining(Struct, frozen=True):
    """The first message of a worker to an older member of a candidate."""

    mesh: Count
    """The candidate's number."""
    worker: WorkerName
    about: Json
    token: Text = ""
    """A fresh token for `records`, or empty."""


class Joined(Struct, frozen=True):
    """The answer to `Joining`."""

    about: Json
    token: Text = ""


class Mapped(Struct, frozen=True):
    """This side has mapped what it reads of the other: frames may follow."""

    met: bool = True


class Pulse(Struct, frozen=True):
    """The only message of a connection that carries the system's probes and nothing else."""

    pulse: WorkerName
    """Who sends it."""


# ---------------------------------------------------------------------- reading and writing

S = TypeVar("S", bound=Struct)
Message = Hello | FromWorker | ToWorker | FromLauncher | ToLauncher | FromTool | FromNotes
REPEATED = (Beat, AtEpoch, Ready, Switched, GetStatus, GetStory, Watch, WriteNotes, ReadNotes)
"""Messages that change nothing which a worker's next greeting or heartbeat would not say again."""


def _by_tag(union: Any) -> dict[object, type[Struct]]:
    return {kind.__struct_config__.tag: kind for kind in get_args(union)}


HEARD: Mapping[str, Mapping[object, type[Struct]]] = {
    "": _by_tag(Hello),
    "worker": _by_tag(FromWorker),
    "agent": _by_tag(FromLauncher),
    "tool": _by_tag(FromTool),
    "notes": _by_tag(FromNotes),
}
"""By role of a connection, "" before its hello: what the coordinator takes from it."""
TO_WORKER = _by_tag(ToWorker)
TO_LAUNCHER = _by_tag(ToLauncher)
HAPPENINGS = _by_tag(Happening)


def heard(role: str, raw: Mapping[str, Any]) -> Any:
    """The message that a connection with this role sent to the coordinator; Refused if it is none."""
    tag = raw.get("type")
    kinds = HEARD[role]
    if role == "" and tag == "hello":
        tag = raw.get("role")
        if not isinstance(tag, str) or tag not in kinds:
            raise Refused(f"role: got {_shown(tag)}, must be worker, agent, tool or notes")
    elif not isinstance(tag, str) or tag not in kinds or role == "":
        raise Refused(f"unknown message {_shown(tag)} from {role or 'a stranger'}")
    return read(kinds[tag], raw)


def received(kinds: Mapping[object, type[Struct]], raw: Mapping[str, Any]) -> Any:
    """A message of the coordinator's, or None for one of a kind that this release does not have."""
    tag = raw.get("type")
    return read(kinds[tag], raw) if isinstance(tag, str) and tag in kinds else None


def happened(raw: object) -> Any:
    """An event of a job's history, or None for one of a kind that is not above."""
    tag = raw.get("event") if isinstance(raw, Mapping) else raw
    if not isinstance(raw, Mapping) or not isinstance(tag, str):
        raise Refused(f"event: got {_shown(tag)}, must be the name of an event")
    return read(HAPPENINGS[tag], {**raw, "type": tag}) if tag in HAPPENINGS else None


def record(event: Struct) -> dict[str, Any]:
    """An event as a line of the history; fields that have their usual value are left out."""
    written: dict[str, Any] = {"event": event.__struct_config__.tag}
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if value != ({} if field.default_factory is dict else field.default):
            written[field.name] = list(value) if isinstance(value, tuple) else value
    return written


def read(kind: type[S], raw: object) -> S:
    """What arrived, as a message of this kind; Refused if it is malformed."""
    try:
        message = msgspec.convert(raw, kind)
    except ValidationError as error:
        raise Refused(_refusal(kind, raw, str(error))) from None
    _check(message)
    return message


def plain(message: Struct | Mapping[str, Any]) -> dict[str, Any]:
    """A message as the JSON object that is sent; the objects in it may still be messages."""
    if not isinstance(message, Struct):
        return dict(message)
    config = message.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field is not None else {}
    return tag | msgspec.structs.asdict(message)


def _check(message: Struct) -> None:
    """Check what a field's type cannot: no name twice, and no object nested too deep."""
    for key, value in msgspec.structs.asdict(message).items():
        if isinstance(value, Struct):
            _check(value)
        elif isinstance(value, tuple) and len(set(value)) != len(value):
            raise Refused(f"{key}: got {_shown(value)}, must be {_need(type(message), key)}")
        elif isinstance(value, dict) and _is_deeper(value, MOST_DEPTH):
            raise Refused(f"{key}: got an object, must be {_need(type(message), key)}")


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _refusal(kind: type[Struct], raw: object, error: str) -> str:
    """What was wrong with a message, in our words: the field, what it had, what it must be."""
    problem, _, path = error.partition(" - at ")
    keys = re.findall(r"\.(\w+)", path)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        return f"{missing[1]}: missing, must be {_need(kind, *keys, missing[1]) or 'there'}"
    if not problem.startswith(("Expected", "Invalid")):
        return problem
    if not keys:
        return f"message: got {_shown(raw)}, must be an object"
    value: Any = raw
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    for index in re.findall(r"\[(\d+)\]", path):
        value = value[int(index)] if isinstance(value, list | tuple) else value
    return f"{keys[-1]}: got {_shown(value)}, must be {_need(kind, *keys) or problem}"


def _need(kind: Any, *keys: str) -> str:
    """What the field at this path of a message must be, by its type's description."""
    for key in keys:
        hint = get_type_hints(kind, include_extras=True).get(key)
        structs = (one for one in get_args(hint) if isinstance(one, type) and issubclass(one, Struct))
        kind = next(structs, hint)
    return next((meta.description for meta in _metas(kind) if meta.description), "")


def _metas(hint: object) -> Iterator[Meta]:
    """The descriptions of a type, outer ones first."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from _metas(inner)


def _shown(value: object) -> str:
    """The beginning of a value; its whole text may be long, or too deep to be written."""
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
