"""What people may ask a control plane about jobs: to take one in, to change one, and how it is."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swell.control import lifecycle, promises, teams, views
from swell.control.access import Access
from swell.control.errors import NotFound, TooMany
from swell.control.fingerprints import MAX_SCRIPT_BYTES
from swell.control.intake import Intake, Ticket
from swell.control.limits import Gate, Limits
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.series import series
from swell.domain import Event, InputError
from swell.domain.request import not_python
from swell.engines.accounts import no_script

FEW_SUBMISSIONS = 4
"""Up to this many submissions at a time get an estimate by looking ahead; more get a rougher one."""

ESTIMATED_EVERY_S = 3.0
"""Estimates that are shown are at most this old."""

_Accepted = tuple[JobRecord, Sequence[int], Sequence[Event]]


@dataclass(frozen=True, slots=True)
class _Submission:
    request: JobRequest
    owner: str
    key: str | None


class JobDesk:
    """Takes jobs in, answers questions about them, and does what people ask. Methods are thread-safe."""

    def __init__(self, access: Access, limits: Limits, trouble: Callable[[], str]) -> None:
        """`trouble`: why the platform does not work; empty if all is well."""
        self._access = access
        self._conductor, self._lock, self._clock = access.conductor, access.lock, access.clock
        self._book, self._store = access.conductor.book, access.conductor.book.store
        self._gate = Gate(limits)
        self._trouble = trouble
        self._estimates: tuple[float, dict[str, Estimate]] = (-math.inf, {})
        """When the estimates of active jobs were made last, and what they were."""
        self._intake: Intake[_Submission, JobRecord] = Intake(self._take_in)

    def submit(self, request: JobRequest, owner: str, idempotency_key: str | None = None) -> JobRecord:
        """Take a job in, or refuse its deadline. The returned record is on disk."""
        self._check(request, owner)
        return self._intake(_Submission(request, owner, idempotency_key))

    def _take_in(self, tickets: Sequence[Ticket[_Submission, JobRecord]]) -> None:
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
        submission: _Submission,
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
        """One job."""
        with self._lock:
            record = self._book.records.get(job_id) or self._store.job(job_id)
        if record is None:
            raise NotFound(f"there is no job '{job_id}'; 'swell queue --all' lists the jobs")
        return record

    def cancel(self, job_id: str, by: str = "its owner") -> JobRecord:
        """End a job."""
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
