"""What people may ask a control plane: about jobs, and about nodes, reservations and teams."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from swell.control import lifecycle, promises, teams, views
from swell.control.book import MAX_SCRIPT_BYTES
from swell.control.conductor import NOT_BOTH, Conductor
from swell.control.errors import Conflict, NotFound, TooMany
from swell.control.limits import Gate, OwnerLimits
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.renting import AutoscalerState
from swell.control.reservations import ReservationState
from swell.control.teams import TeamState
from swell.control.views import NodeState
from swell.domain import Event, EventKind, InputError, Reservation, Team
from swell.domain.request import not_python
from swell.engines.accounts import no_script

# How the parts of a control plane reach its conductor: one at a time, with the turns.


@dataclass(frozen=True, slots=True)
class Access:
    """The conductor, and the lock under which it may be touched."""

    conductor: Conductor
    clock: Callable[[], float]
    wake: Callable[[], None]
    """Has a turn taken soon."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def changing(self) -> Iterator[float]:
        """Hold the lock for a change, and have a turn taken because of it; gives the time."""
        with self.lock:
            yield self.clock()
            self.wake()


# A job's curves over time, read from the event log and nothing else.


CHANGES = (
    EventKind.ALLOCATED,
    EventKind.RESIZED,
    EventKind.PREEMPTED,
    EventKind.WORKER_LOST,
    EventKind.CHECKPOINT_SAVED,
)
"""Kinds of events that are marked on the time axis of a job's curves."""


def series(events: Iterable[Event]) -> dict[str, Any]:
    """One job's progress as columns of equal length (null where a report lacks a value), and its changes."""
    reports, changes = [], []
    for event in events:
        if event.kind is EventKind.PROGRESS:
            reports.append((event.time_s, dict(event.data)))
        elif event.kind in CHANGES:
            changes.append({"time_s": event.time_s, "kind": event.kind.value} | dict(event.data))
    names = sorted({name for _, data in reports for name in data if name != "metrics"})
    metrics = sorted({name for _, data in reports for name in data.get("metrics") or {}})
    return {
        "time_s": [time_s for time_s, _ in reports],
        "curves": {name: [data.get(name) for _, data in reports] for name in names},
        "metrics": {name: [(data.get("metrics") or {}).get(name) for _, data in reports] for name in metrics},
        "changes": changes,
    }


# Many submissions, one commit: submissions that arrive while the disk is busy share the next write.
#
# A commit waits for the disk, however much is in it. So the calling threads queue up. The first one serves
# all submissions that wait by then, in one transaction, and hands over to the first that arrived meanwhile.
# Under load the callers share the cost of the disk; a caller who is alone pays nothing extra; the order of
# arrival is kept.


Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Ticket(Generic[Item, Answer]):
    """One submission in the queue, and its outcome: an answer, or the error it is refused with."""

    submission: Item
    answer: Answer | None = None
    refusal: BaseException | None = None
    called: threading.Event = field(default_factory=threading.Event)
    """Set once the ticket has been served, or once its thread is to serve the next batch."""

    @property
    def open(self) -> bool:
        """Whether the ticket has not been served yet."""
        return self.answer is None and self.refusal is None


class Intake(Generic[Item, Answer]):
    """Serves the submissions of many threads in batches."""

    def __init__(self, serve: Callable[[Sequence[Ticket[Item, Answer]]], None], *, most: int = 64) -> None:
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Ticket[Item, Answer]] = deque()
        self._busy = False  # a thread is serving a batch, or has been called to serve the next one

    def __call__(self, submission: Item) -> Answer:
        """Have a submission served, alone or in a batch; raises the error that `serve` refused it with."""
        ticket: Ticket[Item, Answer] = Ticket(submission)
        with self._lock:
            self._waiting.append(ticket)
            first, self._busy = not self._busy, True
        if not first:
            ticket.called.wait()
        if ticket.open:
            self._serve_batch()
        if ticket.refusal is not None:
            raise ticket.refusal
        assert ticket.answer is not None
        return ticket.answer

    def _serve_batch(self) -> None:
        """Serve the tickets that wait, the caller's first, and call the thread that serves next."""
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most))]
        try:
            self._serve(batch)
        except BaseException as error:
            # The transaction failed as a whole, so answers that were given inside it do not count.
            for ticket in batch:
                if ticket.refusal is None:
                    ticket.answer, ticket.refusal = None, error
        finally:
            with self._lock:
                self._busy = bool(self._waiting)
                following = self._waiting[0] if self._waiting else None
            for ticket in batch:
                ticket.called.set()
            if following is not None:
                following.called.set()


# What people may ask a control plane about jobs: to take one in, to change one, and how it is.


FEW_SUBMISSIONS = 4
"""Up to this many submissions at a time get an estimate by looking ahead; more get a rougher one."""

ESTIMATED_EVERY_S = 3.0
"""Estimates that are shown are at most this old."""

_Accepted = tuple[JobRecord, Sequence[int], Sequence[Event]]


@dataclass(frozen=True, slots=True)
class _Accepting:
    request: JobRequest
    owner: str
    key: str | None


class JobDesk:
    """Takes jobs in, answers questions about them, and does what people ask. Methods are thread-safe."""

    def __init__(self, access: Access, limits: OwnerLimits, trouble: Callable[[], str]) -> None:
        """`trouble`: why the platform does not work; empty if all is well."""
        self._access = access
        self._conductor, self._lock, self._clock = access.conductor, access.lock, access.clock
        self._book, self._store = access.conductor.book, access.conductor.book.store
        self._gate = Gate(limits)
        self._trouble = trouble
        self._estimates: tuple[float, dict[str, Estimate]] = (-math.inf, {})
        """When the estimates of active jobs were made last, and what they were."""
        self._intake: Intake[_Accepting, JobRecord] = Intake(self._take_in)

    def submit(self, request: JobRequest, owner: str, idempotency_key: str | None = None) -> JobRecord:
        """Take a job in, or refuse its deadline. The returned record is on disk."""
        self._check(request, owner)
        return self._intake(_Accepting(request, owner, idempotency_key))

    def _take_in(self, tickets: Sequence[Ticket[_Accepting, JobRecord]]) -> None:
        """Serve submissions that came at about the same time, in one transaction."""
        accepted: list[_Accepted] = []
        quick = len(tickets) > FEW_SUBMISSIONS
        with self._lock:
            try:
                with self._store.transaction():
                    for ticket in tickets:
                        try:
                            ticket.answer = self._accept(ticket.submission, accepted, quick)
                        except (InputError, TooMany) as error:
                            ticket.refusal = error
            except BaseException:
                for record, _, _ in accepted:
                    self._conductor.forget(record.job_id, self._clock())
                raise
            for record, seqs, events in accepted:
                self._book.publish(seqs, events)
                if record.promise.pending and not record.phase.over:
                    self._conductor.scheduler.profiling.ask(record, record.submitted_s)
            self._access.wake()

    def _accept(
        self,
        submission: _Accepting,
        accepted: list[_Accepted],
        quick: bool,
    ) -> JobRecord:
        """Write a new job to the store; if its owner has used the key before, return that job instead."""
        if submission.key is not None:
            earlier = self._store.by_key(submission.owner, submission.key)
            if earlier is not None:
                return self._book.records.get(earlier.job_id, earlier)
        scheduler = self._conductor.scheduler
        active = sum(record.owner == submission.owner for record in self._book.records.values())
        self._gate.submission(submission.owner, active, self._clock())
        record = self._new_record(submission.request, submission.owner)
        knowledge = self._book.knowledge_of(record)
        answer, asked = promises.promise(record, knowledge, scheduler, record.submitted_s, quick=quick)
        record = replace(record, promise=answer)
        if not answer.admitted:
            record = replace(record, phase=Phase.REFUSED, ended_s=record.submitted_s, reason=answer.reason)
        events = views.submission(record, knowledge, scheduler)
        seqs = self._store.accept(record, submission.key, events)
        accepted.append((record, seqs, events))
        if answer.admitted:
            self._book.add(record, knowledge)
            scheduler.add(record, record.submitted_s)
            if asked is not None:
                scheduler.accepted(asked)
        return record

    def quote(self, request: JobRequest, owner: str) -> Promise:
        """The promise that submitting this request would give. Changes nothing."""
        self._check(request, owner)
        with self._lock:
            record = self._new_record(request, owner)
            knowledge = self._book.knowledge_of(record)
            return promises.promise(record, knowledge, self._conductor.scheduler, record.submitted_s)[0]

    def find(
        self,
        owner: str | None = None,
        phase: Phase | None = None,
        limit: int = 1000,
        before: JobRecord | None = None,
    ) -> list[JobRecord]:
        """Jobs, newest first; `before`, the last job of a page, asks for the next page."""
        with self._lock:
            live = teams.with_reasons(self._book.records.values(), self._conductor.scheduler)
        found = {
            r.job_id: r
            for r in live
            if (owner is None or r.owner == owner)
            and (phase is None or r.phase is phase)
            and (before is None or _age(r) < _age(before))
        }
        if phase is None or phase.over:
            ended = self._store.jobs(owner=owner, over=True, phase=phase, before=before, limit=limit)
            found |= {r.job_id: r for r in ended}
        return sorted(found.values(), key=_age, reverse=True)[:limit]

    def with_estimates(self, records: Sequence[JobRecord]) -> list[JobRecord]:
        """The same jobs; those that are not over with the present estimate of their finish."""
        if all(record.phase.over for record in records):
            return list(records)
        with self._lock:
            found = self._present_estimates()
        return [
            replace(r, promise=replace(r.promise, estimate=found[r.job_id]))
            if r.job_id in found and not r.phase.over
            else r
            for r in records
        ]

    def _present_estimates(self) -> dict[str, Estimate]:
        """By job, the estimates of a moment ago; with the lock held."""
        now_s, (made_s, found) = self._clock(), self._estimates
        if not made_s <= now_s < made_s + ESTIMATED_EVERY_S or set(found) - set(self._book.records):
            found = promises.all_estimated(self._conductor.scheduler, now_s)
            self._estimates = (now_s, found)
        return found

    def get(self, job_id: str) -> JobRecord:
        with self._lock:
            record = self._book.records.get(job_id) or self._store.job(job_id)
        if record is None:
            raise NotFound(f"there is no job '{job_id}'; 'swell queue --all' lists the jobs")
        return record

    def cancel(self, job_id: str, by: str = "its owner") -> JobRecord:
        return self._ask(job_id, lifecycle.CancelAsked(by))

    def pause(self, job_id: str) -> JobRecord:
        """Have a job give its slots back until it is resumed; its state is saved first."""
        return self._ask(job_id, lifecycle.PauseAsked())

    def resume(self, job_id: str) -> JobRecord:
        """Let a paused job go on."""
        return self._ask(job_id, lifecycle.ResumeAsked())

    def scale(self, job_id: str, min_workers: int, max_workers: int | None) -> JobRecord:
        """Bound a job's workers by hand."""
        with self._lock:
            self._conductor.scheduler.check_fits(min_workers)
            return self._ask(job_id, lifecycle.BoundsAsked(min_workers, max_workers))

    def _ask(self, job_id: str, given: lifecycle.Input) -> JobRecord:
        with self._lock:
            record = self._book.records.get(job_id)
            if record is None:
                # The job is over or does not exist: `job` or the state machine refuses, unless the request
                # asks for what is so already.
                return lifecycle.step(self.get(job_id), given, self._clock())[0]
            self._conductor.feed(record, given, self._clock())
            self._access.wake()
            return self._book.records.get(job_id) or self.get(job_id)

    def logs(self, job_id: str, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """A job's output from an offset, and the offset to go on from."""
        self.get(job_id)
        return self._conductor.engine.logs(
            job_id, self._conductor.job_dir(job_id), offset=offset, limit=limit
        )

    def story(self, job_id: str) -> list[str]:
        """The last decisions of the state machines of a job, a line for each."""
        self.get(job_id)
        return self._conductor.engine.story(job_id, self._conductor.job_dir(job_id))

    def explain(self, job_id: str) -> dict[str, Any]:
        """Why a job runs or waits, when it will be done, and the slots it has had."""
        events = [event for _, event in self._store.events(job_id=job_id, limit=10_000)]
        with self._lock:
            record = self.get(job_id)
            now_s, scheduler = self._clock(), self._conductor.scheduler
            behind_s = self._conductor.reconciler.behind_s(job_id, now_s)
            answer = views.explain(record, scheduler, events, now_s, behind_s, self._trouble())
            if answer["estimate"] is not None and (present := self._present_estimates().get(job_id)):
                answer["estimate"] = asdict(present)
            return answer

    def series(self, job_id: str) -> dict[str, Any]:
        """A job's curves: progress, loss, metrics and slots over time."""
        self.get(job_id)
        return series([event for _, event in self._store.events(job_id=job_id, limit=10_000)])

    def _check(self, request: JobRequest, owner: str) -> None:
        script = Path(request.workdir, request.script)
        if not os.path.isfile(script):  # noqa: PTH113 - a name too long for the file system is not there
            raise no_script(script)
        self._conductor.engine.check(self._conductor.launch(self._new_record(request, owner)))
        if request.command and not os.access(script, os.X_OK):
            raise InputError(
                f"script: '{script}' cannot be run; make it executable (chmod +x), or name first the "
                "program that runs it, such as: sh train.sh",
                field="script",
            )
        if not request.command and (why := not_python(request.script, _beginning(script))):
            raise InputError(f"script: {why}", field="script")
        if script.stat().st_size > MAX_SCRIPT_BYTES and not request.command:
            raise InputError(
                f"script: '{script}' has {script.stat().st_size} bytes, allowed are {MAX_SCRIPT_BYTES}",
                field="script",
            )
        if request.deadline_s is not None and request.deadline_s <= self._clock():
            raise InputError(
                "deadline_s must be in the future: give a later one, or none for best effort",
                field="deadline_s",
            )
        self._conductor.scheduler.check_fits(request.min_workers)

    def _new_record(self, request: JobRequest, owner: str) -> JobRecord:
        return JobRecord(
            job_id=f"{request.name}-{secrets.token_hex(5)}",
            owner=owner,
            request=request,
            submitted_s=self._clock(),
            phase=Phase.QUEUED,
            promise=Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None)),
        )


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256)


def _age(record: JobRecord) -> tuple[float, str]:
    """The key by which jobs are sorted in lists."""
    return record.submitted_s, record.job_id


@dataclass(frozen=True, slots=True)
class NodeDesk:
    """Shows the nodes, and takes some of them out of use. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[NodeState]:
        """The nodes and how many of their slots are in use."""
        conductor = self._access.conductor
        with self._access.lock:
            cluster = conductor.engine.cluster().without(conductor.scheduler.cluster.held)
            slow = conductor.slow_nodes.slow(self._access.clock())
            records = conductor.book.records.values()
            return views.nodes(
                cluster, conductor.drained, records, conductor.renting, slow, conductor.avoided
            )

    def autoscaler(self) -> AutoscalerState | None:
        """How many nodes are rented, how many should be, and why; None if no nodes are rented."""
        with self._access.lock:
            renting = self._access.conductor.renting
            return None if renting is None else renting.state()

    def drain(self, node: str) -> None:
        """Move all jobs off a node, and give it none until it is undrained."""
        self._set_drained(node, True)

    def undrain(self, node: str) -> None:
        """Use a drained node again."""
        self._set_drained(node, False)

    def _set_drained(self, node: str, drained: bool) -> None:
        conductor = self._access.conductor
        store = conductor.book.store
        with self._access.changing():
            names = [n.name for n in conductor.engine.cluster().nodes]
            if node not in names:
                raise NotFound(f"there is no node '{node}'; nodes: {', '.join(names)}")
            changed = conductor.drained | {node} if drained else conductor.drained - {node}
            store.set_setting("drained", json.dumps(sorted(changed)))
            conductor.drained = changed
            if not drained:  # a person who calls the node healthy outranks the measurement
                conductor.slow_nodes.forget(node)
                store.set_setting("slow_nodes", json.dumps(conductor.slow_nodes.to_json()))


@dataclass(frozen=True, slots=True)
class ReservationDesk:
    """Reserves capacity for services. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[ReservationState]:
        """The reservations of services, and the slots that they have now."""
        with self._access.lock:
            return self._access.conductor.reservations.states(self._access.clock())

    def make(self, asked: Reservation, by: str, *, force: bool = False) -> ReservationState:
        """Reserve capacity for a service, or change a reservation. Refused if it would break a promise."""
        conductor = self._access.conductor
        if conductor.renting is not None:
            raise Conflict(NOT_BOTH)
        with self._access.changing() as now_s:
            made = conductor.reservations.make(asked, now_s, by=by, force=force)
            text = f"its promised finish is in danger: slots are reserved for {asked.name}"
            for job_id in made.endangered:
                conductor.feed(conductor.book.records[job_id], lifecycle.Noticed(text), now_s)
            return made

    def remove(self, name: str, by: str) -> ReservationState:
        with self._access.changing() as now_s:
            return self._access.conductor.reservations.remove(name, now_s, by=by)

    def demand(self, name: str, gpus: int) -> ReservationState:
        """Give the service that a reservation follows this many slots from now on."""
        with self._access.changing() as now_s:
            return self._access.conductor.reservations.demand(name, gpus, now_s)


@dataclass(frozen=True, slots=True)
class TeamDesk:
    """Shows and changes the teams. Methods are thread-safe."""

    _access: Access

    def states(self) -> list[TeamState]:
        """The teams, and how many slots each has now."""
        with self._access.lock:
            return teams.states(self._access.conductor.scheduler)

    def change(self, asked: Team, *, keep_users: bool = False, force: bool = False) -> TeamState:
        """Make a team, or change it (`keep_users`: its slots alone). Refused if it would break a promise."""
        conductor = self._access.conductor
        with self._access.changing() as now_s:
            present = conductor.scheduler.teams.get(asked.name) if keep_users else None
            asked = asked if present is None else replace(asked, users=present.users)
            return teams.change(conductor.scheduler, conductor.book.store, asked, now_s, force=force)

    def remove(self, name: str, *, force: bool = False) -> TeamState:
        """Remove a team. Refused if it would break a promise."""
        conductor = self._access.conductor
        with self._access.changing() as now_s:
            return teams.remove(conductor.scheduler, conductor.book.store, name, now_s, force=force)
