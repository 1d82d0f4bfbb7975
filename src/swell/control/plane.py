"""The control plane: what people ask of it, on top of the loop that keeps the cluster in order."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swell.control import lifecycle, promises, views
from swell.control.book import Subscriber
from swell.control.errors import NotFound
from swell.control.intake import Intake, Ticket
from swell.control.loop import Loop
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.scheduler import check_fits
from swell.control.views import NodeView
from swell.domain import Event, InputError
from swell.policies import make_policy

__all__ = ["ControlPlane", "NodeView"]

FEW = 4
"""Up to so many submissions at a time get an estimate by looking ahead; a crowd gets a rougher one."""


@dataclass(frozen=True, slots=True)
class _Submission:
    request: JobRequest
    owner: str
    key: str | None


class ControlPlane(Loop):
    """Admits jobs, answers for them, and takes orders. Methods are thread-safe."""

    @cached_property
    def _intake(self) -> Intake[_Submission, JobRecord]:
        return Intake(self._take_in)

    def submit(self, request: JobRequest, owner: str, idempotency_key: str | None = None) -> JobRecord:
        """Take a job in, or refuse its deadline. What is returned is on disk."""
        self._check(request)
        return self._intake(_Submission(request, owner, idempotency_key))

    def _take_in(self, tickets: Sequence[Ticket[_Submission, JobRecord]]) -> None:
        """Take in all that were submitted at about the same time, in one transaction."""
        accepted: list[tuple[JobRecord, Sequence[int], Sequence[Event]]] = []
        quick = len(tickets) > FEW
        with self._lock:
            try:
                with self.store.transaction():
                    for ticket in tickets:
                        try:
                            ticket.answer = self._accept(ticket.wish, accepted, quick)
                        except InputError as error:
                            ticket.refusal = error
            except BaseException:
                for record, _, _ in accepted:
                    self._forget(record.job_id)
                raise
            for record, seqs, events in accepted:
                self._book.publish(seqs, events)
                if record.phase.over:
                    self._forget(record.job_id)
                    continue
                self._decide = True
                if record.promise.pending:
                    self._scheduler.probe(record, record.submitted_s)
            self.wake()

    def _accept(
        self,
        wish: _Submission,
        accepted: list[tuple[JobRecord, Sequence[int], Sequence[Event]]],
        quick: bool,
    ) -> JobRecord:
        """Write one submission down, unless its key says that it was already."""
        if wish.key is not None:
            earlier = self.store.by_key(wish.owner, wish.key)
            if earlier is not None:
                return self._book.records.get(earlier.job_id, earlier)
        record = self._new_record(wish.request, wish.owner)
        self._add(record)
        try:
            record = replace(record, promise=self._promise(record, quick=quick))
            if not record.promise.admitted:
                record = replace(
                    record, phase=Phase.REFUSED, ended_s=record.submitted_s, reason=record.promise.reason
                )
            seqs = self.store.accept(record, wish.key, events := self._events_of(record))
        except BaseException:
            self._forget(record.job_id)
            raise
        self._book.records[record.job_id] = record
        accepted.append((record, seqs, events))
        return record

    def quote(self, request: JobRequest, owner: str) -> Promise:
        """What submitting would answer, without submitting."""
        self._check(request)
        with self._lock:
            record = self._new_record(request, owner)
            self._add(record)
            try:
                return self._promise(record)
            finally:
                self._forget(record.job_id)

    def jobs(
        self,
        owner: str | None = None,
        phase: Phase | None = None,
        limit: int = 1000,
        before: JobRecord | None = None,
    ) -> list[JobRecord]:
        """Jobs, newest first; `before` to go on after the last one of a page."""
        with self._lock:
            live = list(self._book.records.values())
        found = {
            r.job_id: r
            for r in live
            if (owner is None or r.owner == owner)
            and (phase is None or r.phase is phase)
            and (before is None or _age(r) < _age(before))
        }
        if phase is None or phase.over:
            ended = self.store.jobs(owner=owner, over=True, phase=phase, before=before, limit=limit)
            found |= {r.job_id: r for r in ended}
        return sorted(found.values(), key=_age, reverse=True)[:limit]

    def job(self, job_id: str) -> JobRecord:
        """One job."""
        with self._lock:
            record = self._book.records.get(job_id) or self.store.job(job_id)
        if record is None:
            raise NotFound(f"there is no job '{job_id}'")
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
            check_fits(self._scheduler.cluster, min_workers)
            return self._ask(job_id, lifecycle.BoundsAsked(min_workers, max_workers))

    def _ask(self, job_id: str, happening: lifecycle.Happening) -> JobRecord:
        with self._lock:
            record = self._book.records.get(job_id)
            if record is None:
                # It is over, or was never there: the state machine says which requests still make sense.
                return lifecycle.step(self.job(job_id), happening, self.clock())[0]
            self._happen(record, happening, self.clock())
            self.wake()
            return self._book.records.get(job_id) or self.job(job_id)

    def nodes(self) -> list[NodeView]:
        """The nodes and how many of their slots are in use."""
        with self._lock:
            return views.nodes(self.engine.cluster(), self._drained, self._book.records.values())

    def drain(self, node: str) -> None:
        """Move everything off a node and put nothing on it."""
        self._set_drained(node, True)

    def undrain(self, node: str) -> None:
        """Use a drained node again."""
        self._set_drained(node, False)

    def _set_drained(self, node: str, drained: bool) -> None:
        with self._lock:
            names = [n.name for n in self.engine.cluster().nodes]
            if node not in names:
                raise NotFound(f"there is no node '{node}'; nodes: {', '.join(names)}")
            changed = self._drained | {node} if drained else self._drained - {node}
            self.store.set_setting("drained", json.dumps(sorted(changed)))
            self._drained = changed
            self._decide = True
            self.wake()

    def policy(self) -> str:
        """The policy that decides now, as it was given."""
        with self._lock:
            return self._scheduler.policy_text

    def set_policy(self, text: str) -> None:
        """Decide by another policy from now on; kept across restarts."""
        make_policy(text)
        with self._lock:
            self.store.set_setting("policy", text)
            self._scheduler.set_policy(text, self._book.records.values())
            self._decide = True
            self.wake()

    def events(
        self, since_seq: int = 0, job_id: str | None = None, limit: int = 1000
    ) -> list[tuple[int, Event]]:
        """What happened after a number, oldest first."""
        return self.store.events(since_seq, job_id=job_id, limit=limit)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Be told of every event once it is on disk; call the result to stop. Callbacks must not block."""
        with self._lock:
            return self._book.subscribe(callback)

    def logs(self, job_id: str, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """A job's output from an offset, and where to go on."""
        self.job(job_id)
        return self.engine.logs(job_id, self._job_dir(job_id), offset=offset, limit=limit)

    def explain(self, job_id: str) -> dict[str, Any]:
        """Why a job is where it is, when it will be done, and what it went through."""
        events = [event for _, event in self.store.events(job_id=job_id, limit=10_000)]
        with self._lock:
            record = self.job(job_id)
            return views.explain(record, self._book, self._scheduler, events, self.clock(), self.trouble)

    def stats(self) -> dict[str, float]:
        """Figures for monitoring."""
        with self._lock:
            return views.stats(self._book, self._scheduler) | {
                "decisions": float(self.decisions),
                "decision_seconds": self.decision_s,
                "trouble": float(bool(self.trouble)),
            }

    def _check(self, request: JobRequest) -> None:
        script = Path(request.workdir, request.script)
        if not os.path.isfile(script):  # noqa: PTH113 - a name too long for the file system is not there
            raise InputError(f"script: there is no file '{script}'", field="script")
        if request.deadline_s is not None and request.deadline_s <= self.clock():
            raise InputError("deadline_s must be in the future", field="deadline_s")
        check_fits(self._scheduler.cluster, request.min_workers)
        self.engine.check(self._launch(self._new_record(request, "")))

    def _promise(self, record: JobRecord, *, quick: bool = False) -> Promise:
        return promises.promise(record, self._book, self._scheduler, self.clock(), quick=quick)

    def _new_record(self, request: JobRequest, owner: str) -> JobRecord:
        return JobRecord(
            job_id=f"{request.name}-{secrets.token_hex(5)}",
            owner=owner,
            request=request,
            submitted_s=self.clock(),
            phase=Phase.QUEUED,
            promise=Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None)),
        )

    def _events_of(self, record: JobRecord) -> list[Event]:
        return views.submission(record, self._book.known[record.job_id], self._scheduler.policy_text)


def _age(record: JobRecord) -> tuple[float, str]:
    """What jobs are listed by."""
    return record.submitted_s, record.job_id
