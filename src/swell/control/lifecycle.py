"""The life of a job as a pure state machine: inputs in, a new record and instructions out.

    queued --granted--> running --granted nothing--> queued
      |  ^                | |  |
      |  +--resume-- paused<+  +--seen finished/failed--> finished | failed
      +------cancel, refuse--> cancelled | refused

No clock, no I/O: the conductor feeds the inputs, has the new record written and carries out the instructions.
An input that is fed twice changes nothing the second time, because after a crash some inputs are fed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swell.control.errors import Conflict
from swell.control.model import JobRecord, Phase, Promise
from swell.domain import Event, EventKind, InputError, Placement, many
from swell.engines import Observed, RunState

NOT_REPORTED = "for a reason that was not reported"
"""Why a job lost slots, where nobody said."""

# -- inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """The scheduler decided that the job should have these slots; no slots means that it must stop."""

    placement: Placement
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine starts the job's workers on these slots; the job is expected to train after this pause."""

    gpus: Placement
    pause_s: float


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The engine found the job in this state."""

    observed: Observed


@dataclass(frozen=True, slots=True)
class Vanished:
    """The job should run, but the engine knows nothing of it."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """The job reported its progress."""

    done: float
    of: float | None = None
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class JobSwitched:
    """The job goes on with workers on these slots, after this pause."""

    gpus: Placement
    pause_s: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker that was training died, or was given up because it did not answer."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """The job says what holds it up, or that it is over."""

    text: str


@dataclass(frozen=True, slots=True)
class JobConfined:
    """The job found out that it cannot use more than so many workers."""

    most: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The job saved a checkpoint after this many steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Admission was decided, or the estimate changed."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A person wants the job ended."""

    by: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """A person wants the job to give its slots back until it is resumed."""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """A person wants a paused job to go on."""


@dataclass(frozen=True, slots=True)
class BoundsAsked:
    """A person wants the job to have at least and at most so many workers."""

    min_workers: int
    max_workers: int | None


Input = (
    Granted
    | Started
    | JobSeen
    | Vanished
    | Progressed
    | JobSwitched
    | WorkerLost
    | Noticed
    | JobConfined
    | CheckpointSaved
    | Answered
    | CancelAsked
    | PauseAsked
    | ResumeAsked
    | BoundsAsked
)

# -- instructions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogEvent:
    event: Event


@dataclass(frozen=True, slots=True)
class Apply:
    """Have the engine put the job on its wanted slots."""


@dataclass(frozen=True, slots=True)
class EndJob:
    """Have the engine end the job and clean up."""


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Let the policy decide again: capacity or demand changed."""


Instruction = LogEvent | Apply | EndJob | Reschedule
Step = tuple[JobRecord, list[Instruction]]


def step(record: JobRecord, given: Input, now_s: float) -> Step:
    """The job's record after this input, and the instructions to carry out."""
    match given:
        case Granted():
            return _granted(record, given, now_s)
        case Started(gpus, pause_s):
            return _started(record, gpus, pause_s, now_s)
        case JobSeen(observed):
            return _seen(record, observed, now_s)
        case Vanished():
            return _vanished(record, now_s)
        case Progressed(done, of, batch_size):
            changed = replace(
                record,
                done=done,
                of=record.of if of is None else of,
                batch_size=record.batch_size if batch_size is None else batch_size,
            )
            return changed, ([Reschedule()] if record.of != changed.of else [])
        case JobSwitched(gpus, pause_s):
            return _switched(record, gpus, pause_s, now_s)
        case WorkerLost(worker, reason):
            return record, [_log(record, EventKind.WORKER_LOST, now_s, worker=worker, reason=reason)]
        case Noticed(text):
            return record, [_log(record, EventKind.NOTICED, now_s, text=text)]
        case JobConfined(most, reason):
            return _confined(record, most, reason, now_s)
        case CheckpointSaved(step_number):
            return record, [_log(record, EventKind.CHECKPOINT_SAVED, now_s, step=step_number)]
        case Answered(promise):
            return _answered(record, promise, now_s)
        case CancelAsked(by):
            return _cancelled(record, by, now_s)
        case PauseAsked():
            return _paused(record, now_s)
        case ResumeAsked():
            return _resumed(record)
        case BoundsAsked(least, most):
            return _bounded(record, least, most)


def _granted(record: JobRecord, given: Granted, now_s: float) -> Step:
    placement, reason = given.placement, given.reason
    if not reason and len(placement) < len(record.wanted) and record.phase is Phase.RUNNING:
        reason = NOT_REPORTED
    if record.phase not in (Phase.QUEUED, Phase.RUNNING) or placement == record.wanted:
        return record, []
    before = record.wanted
    if not placement:
        changed = replace(record, phase=Phase.QUEUED, wanted=(), held=(), reason=reason or NOT_REPORTED)
        log = _log(record, EventKind.PREEMPTED, now_s, before=before, reason=changed.reason)
        return changed, [log, Apply()]
    # The start or the resize is logged once it has happened: see Started and JobSwitched.
    started_s = record.started_s or now_s
    changed = replace(record, phase=Phase.RUNNING, wanted=placement, reason=reason, started_s=started_s)
    return changed, [Apply()]


def _started(record: JobRecord, gpus: Placement, pause_s: float, now_s: float) -> Step:
    if record.held:  # it died and was started again before anybody noticed
        return (record, []) if gpus == record.held else _switched(record, gpus, pause_s, now_s)
    if record.phase is not Phase.RUNNING:
        return record, []
    log = _log(record, EventKind.ALLOCATED, now_s, gpus=gpus, pause_s=pause_s)
    return replace(record, held=gpus), [log]


def _switched(record: JobRecord, gpus: Placement, pause_s: float, now_s: float) -> Step:
    if record.phase is not Phase.RUNNING or not record.held:
        return record, []
    changed = replace(record, held=gpus, pause_s=record.pause_s + pause_s)
    if gpus == record.held:
        return changed, []
    why = {"reason": record.reason} if record.reason else {}
    log = _log(record, EventKind.RESIZED, now_s, gpus=gpus, before=record.held, pause_s=pause_s, **why)
    return replace(changed, resizes=record.resizes + 1, reason=""), [log]


def _seen(record: JobRecord, observed: Observed, now_s: float) -> Step:
    if record.phase.over:
        return record, ([] if observed.state in (RunState.FINISHED, RunState.FAILED) else [EndJob()])
    if observed.state is RunState.FINISHED:
        deadline_s = record.request.deadline_s
        met = None if deadline_s is None else now_s <= deadline_s
        changed = _over(record, Phase.FINISHED, now_s, "", exit_code=0, done=record.of or record.done)
        jct_s, work = now_s - record.submitted_s, changed.done
        log = _log(record, EventKind.FINISHED, now_s, jct_s=jct_s, met=met, work=work)
        return changed, [log, EndJob(), Reschedule()]
    if observed.state is RunState.FAILED:
        reason = observed.reason or f"the script ended with exit code {observed.exit_code}"
        changed = _over(record, Phase.FAILED, now_s, reason, exit_code=observed.exit_code)
        code, work = observed.exit_code, record.done
        log = _log(record, EventKind.FAILED, now_s, reason=reason, exit_code=code, work=work)
        return changed, [log, EndJob(), Reschedule()]
    if observed.target != record.wanted and observed.state is not RunState.STOPPING:
        return record, [Apply()]
    return record, []


def _over(record: JobRecord, phase: Phase, now_s: float, reason: str, **changes: Any) -> JobRecord:
    """The record of a job that is over now. Its deadline, if still undecided, stays without an answer."""
    promise = record.promise
    if promise.pending:
        promise = replace(promise, pending=False, reason="the job was over before its profiling run was")
    return replace(
        record, phase=phase, wanted=(), held=(), ended_s=now_s, reason=reason, promise=promise, **changes
    )


def _vanished(record: JobRecord, now_s: float) -> Step:
    """All processes of the job died without an exit code: start it again, `max_restarts` times at most."""
    if record.phase is not Phase.RUNNING:
        return record, []
    if record.restarts >= record.request.max_restarts:
        reason = f"all its workers died {record.restarts + 1} times; see 'swell logs {record.job_id}'"
        changed = _over(record, Phase.FAILED, now_s, reason)
        return changed, [
            _log(record, EventKind.FAILED, now_s, reason=reason, work=record.done),
            EndJob(),
            Reschedule(),
        ]
    changed = replace(record, restarts=record.restarts + 1, held=())
    instructions: list[Instruction] = [Apply()]
    if record.held:
        why = "all its workers died"
        instructions.insert(0, _log(record, EventKind.PREEMPTED, now_s, before=record.held, reason=why))
    return changed, instructions


def _answered(record: JobRecord, promise: Promise, now_s: float) -> Step:
    if record.phase.over:
        return record, []
    if promise.admitted:
        if record.promise.admitted and record.promise.guaranteed_s == promise.guaranteed_s:
            return replace(record, promise=promise), []
        log = _log(record, EventKind.ADMITTED, now_s, finish_s=promise.guaranteed_s)
        return replace(record, promise=promise), [log]
    changed = _over(replace(record, promise=promise), Phase.REFUSED, now_s, promise.reason)
    log = _log(
        record,
        EventKind.REJECTED,
        now_s,
        reason=promise.reason,
        earliest_deadline_s=promise.earliest_deadline_s,
    )
    instructions: list[Instruction] = [log]
    if record.wanted:
        instructions += [EndJob(), Reschedule()]
    return changed, instructions


def _cancelled(record: JobRecord, by: str, now_s: float) -> Step:
    if record.phase is Phase.CANCELLED:
        return record, []
    if record.phase.over:
        raise Conflict(f"job '{record.job_id}' is {record.phase.value}: there is nothing to cancel")
    changed = _over(record, Phase.CANCELLED, now_s, f"cancelled by {by}")
    log = _log(record, EventKind.CANCELLED, now_s, by=by, work=record.done)
    return changed, [log, EndJob(), Reschedule()]


def _paused(record: JobRecord, now_s: float) -> Step:
    if record.phase is Phase.PAUSED:
        return record, []
    if record.phase.over:
        raise Conflict(f"job '{record.job_id}' is {record.phase.value}: there is nothing to pause")
    changed = replace(record, phase=Phase.PAUSED, wanted=(), held=(), reason="paused by its owner")
    instructions: list[Instruction] = [Reschedule()]
    if record.wanted:
        log = _log(record, EventKind.PREEMPTED, now_s, before=record.wanted, reason="paused")
        instructions = [log, Apply(), Reschedule()]
    return changed, instructions


def _resumed(record: JobRecord) -> Step:
    if record.phase in (Phase.QUEUED, Phase.RUNNING):
        return record, []
    if record.phase is not Phase.PAUSED:
        raise Conflict(f"job '{record.job_id}' is {record.phase.value}: there is nothing to resume")
    return replace(record, phase=Phase.QUEUED, reason="waits for slots"), [Reschedule()]


def _confined(record: JobRecord, most: int, reason: str, now_s: float) -> Step:
    if record.phase.over or (record.most_workers, record.confined) == (most, reason):
        return record, []
    least = min(record.request.min_workers, most)
    request = replace(record.request, min_workers=least)
    changed = replace(record, request=request, most_workers=most, confined=reason)
    text = f"gets at most {many(most, 'worker')} from now on, because {reason}"
    return changed, [_log(record, EventKind.NOTICED, now_s, text=text), Reschedule()]


def _bounded(record: JobRecord, least: int, most: int | None) -> Step:
    if record.phase.over:
        raise Conflict(f"job '{record.job_id}' is {record.phase.value}: there is nothing to scale")
    usable = record.most_workers
    if usable is not None and (least > usable or (most is not None and most > usable)):
        raise Conflict(
            f"job '{record.job_id}' cannot use more than {many(usable, 'worker')}, because {record.confined}"
        )
    needed = record.request.min_workers
    if record.promise.guaranteed_s is not None and most is not None and most < needed:
        raise InputError(
            f"max_workers must be at least {needed}, because the job's finish is guaranteed, got {most}",
            field="max_workers",
        )
    request = replace(record.request, min_workers=least, max_workers=most)
    if request == record.request:
        return record, []
    return replace(record, request=request), [Reschedule()]


def _log(record: JobRecord, kind: EventKind, now_s: float, **data: object) -> LogEvent:
    return LogEvent(Event(now_s, kind, job_id=record.job_id, data=data))


# Compares what should run with what does run, and says what to do about each difference.
#
# Nothing here acts. The conductor asks once in every turn; doing the same thing twice does no harm.


LOST_AFTER_S = 3.0
"""A job that should run counts as vanished once the engine has not known it for this long."""
UNHEARD_S = 3.0
"""A job that has run for this long without a word of its start counts as started: the report was lost with a
failed write, or the record is from an older version."""
BEHIND_S = 30.0
"""If a job has had another number of workers than wanted for this long, the engine is asked again."""


@dataclass(frozen=True, slots=True)
class EndStray:
    """The engine runs a job that is over, or that the store does not know: have it ended."""

    job_id: str


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The job does not run as it should: ask the engine again. It was never asked, or has not done it yet."""

    job_id: str


@dataclass(frozen=True, slots=True)
class FeedInput:
    """Feed this input to the job's state machine."""

    job_id: str
    given: Input


Difference = EndStray | AskAgain | FeedInput


@dataclass(slots=True)
class Reconciler:
    """Finds the differences, and remembers since when jobs are missing."""

    _unconfirmed: set[str] = field(default_factory=set)
    """Jobs from the store that have not been compared since the control plane came up."""
    _missing_since_s: dict[str, float] = field(default_factory=dict)
    _behind_since_s: dict[str, float] = field(default_factory=dict)
    """Since when jobs have not had as many workers as they should."""
    _unheard_since_s: dict[str, float] = field(default_factory=dict)
    """Since when jobs have run though their records do not say on which slots."""

    def came_up(self, job_id: str) -> None:
        """Note a job that was in the store when the control plane came up."""
        self._unconfirmed.add(job_id)

    def forget(self, job_id: str) -> None:
        """Forget what was remembered of a job."""
        self._unconfirmed.discard(job_id)
        self._missing_since_s.pop(job_id, None)
        self._behind_since_s.pop(job_id, None)
        self._unheard_since_s.pop(job_id, None)

    def behind_s(self, job_id: str, now_s: float) -> float:
        """For how long a job has not had as many workers as it should; 0 if it has."""
        return now_s - self._behind_since_s.get(job_id, now_s)

    def differences(
        self, records: Mapping[str, JobRecord], observed: Mapping[str, Observed], now_s: float
    ) -> Iterator[Difference]:
        """The present differences. The caller may change `records` while it iterates."""
        for job_id, seen in observed.items():
            yield FeedInput(job_id, JobSeen(seen)) if job_id in records else EndStray(job_id)
        for job_id in list(records):
            record = records.get(job_id)
            if record is None:
                continue
            if record.phase is not Phase.RUNNING:
                self.forget(job_id)
            elif job_id in observed:
                self._unconfirmed.discard(job_id)
                self._missing_since_s.pop(job_id, None)
                seen = observed[job_id]
                if record.held or seen.state is not RunState.RUNNING or not seen.placement:
                    self._unheard_since_s.pop(job_id, None)
                elif now_s - self._unheard_since_s.setdefault(job_id, now_s) >= UNHEARD_S:
                    yield FeedInput(job_id, Started(seen.placement, 0.0))
                if len(seen.placement) == len(record.wanted):
                    self._behind_since_s.pop(job_id, None)
                elif now_s - self._behind_since_s.setdefault(job_id, now_s) >= BEHIND_S:
                    yield AskAgain(job_id)
            elif job_id in self._unconfirmed:
                self._unconfirmed.discard(job_id)
                yield AskAgain(job_id)  # the control plane that decided it was killed before it could say so
            elif now_s - self._missing_since_s.setdefault(job_id, now_s) >= LOST_AFTER_S:
                del self._missing_since_s[job_id]
                yield FeedInput(job_id, Vanished())
