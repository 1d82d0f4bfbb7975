"""Admission with a promise: what a submission or a quote is answered.

A deadline job is admitted with a guaranteed finish, refused with the earliest deadline that would be
admitted, or, if nobody has ever seen its script run, profiled first and answered then. A best-effort job is
always admitted, with an estimate.
"""

from __future__ import annotations

from dataclasses import replace

from swell.control.book import Book
from swell.control.lookahead import estimate
from swell.control.model import Estimate, JobRecord, Promise
from swell.control.scheduler import Scheduler
from swell.policies import Policy

UNKNOWN = "first run of this script: it is profiled first; its deadline is decided in four minutes at most"
UNSEEN = "it trained no step in two minutes, so no finish can be promised; submit it without a deadline"
NO_ROOM = "first run of this script, and every slot is promised to others: there was none to profile it on"
NO_LENGTH = "the job did not say how long it trains, so no finish can be promised"


def likely(
    record: JobRecord, book: Book, scheduler: Scheduler, now_s: float, *, quick: bool = False
) -> Estimate:
    """When a job will be done, as far as is known; `quick` for a rougher answer when many wait for one."""
    knowledge = book.known[record.job_id]
    if not knowledge.known:
        return Estimate(finish_s=None, source=knowledge.source)
    policy, cluster = scheduler.policy_text, scheduler.cluster
    return estimate(record, book.active(), book.known, cluster, policy, now_s, quick=quick)


def promise(
    record: JobRecord, book: Book, scheduler: Scheduler, now_s: float, *, quick: bool = False
) -> Promise:
    """The answer to a job that is in the book and known to the scheduler.

    With `quick` its estimate is rougher; whether a deadline is admitted is decided with the same care.
    """
    knowledge = book.known[record.job_id]
    if record.request.deadline_s is None:
        return Promise(admitted=True, estimate=likely(record, book, scheduler, now_s, quick=quick))
    if type(scheduler.policy).admit is Policy.admit:
        reason = f"policy '{scheduler.policy.name}' gives no guarantees; see 'swell policy'"
        return Promise(
            admitted=True, estimate=likely(record, book, scheduler, now_s, quick=quick), reason=reason
        )
    if not knowledge.known:
        return Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None), reason=UNKNOWN)
    # The policy must see the deadline to decide on it, as if it had been promised already.
    asked = replace(record, promise=replace(record.promise, admitted=True, pending=False))
    book.records[record.job_id] = asked
    answer = scheduler.admit(asked, book.records, book.known, now_s)
    if answer.admitted:
        guess = likely(asked, book, scheduler, now_s, quick=quick)
        return Promise(admitted=True, guaranteed_s=record.request.deadline_s, estimate=guess)
    earliest_s = answer.earliest_deadline_s
    return Promise(
        admitted=False,
        estimate=Estimate(finish_s=None, source=knowledge.source),
        # Room for processes to start and to end, which no curve knows.
        earliest_deadline_s=None
        if earliest_s is None
        else earliest_s + knowledge.startup_s + knowledge.closing_s,
        reason=answer.reason or "the deadline cannot be kept beside what was promised to others",
    )


def after_profiling(record: JobRecord, book: Book, scheduler: Scheduler, now_s: float) -> Promise:
    """The answer that was put off until the job had been seen."""
    knowledge = book.known[record.job_id]
    if not knowledge.known:
        reason = NO_LENGTH if knowledge.seen else UNSEEN if record.started_s is not None else NO_ROOM
        return Promise(admitted=False, estimate=Estimate(finish_s=None), reason=reason)
    return promise(record, book, scheduler, now_s)
