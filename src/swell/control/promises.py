"""Admission with a promise: the answer to a submission or a quote. Pure: asking changes nothing.

A job with a deadline is admitted with a guaranteed finish, or refused with the earliest deadline that would
be admitted, or, if its script has never run here, profiled before its deadline is decided. A best-effort job
is always admitted, with an estimate.
"""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import replace

from swell.control.knowledge import ENOUGH_STEPS, Knowledge
from swell.control.lookahead import MOST_JOBS, estimate, estimates
from swell.control.model import Estimate, JobRecord, Promise
from swell.control.scheduler import Asked, Scheduler

DECIDED_S = 240.0
"""Longest that a deadline stays undecided, in seconds."""
REPORT_S = 0.5
"""Jobs report about this often, in seconds."""
UNKNOWN = (
    "first run of this script with these arguments: the job is profiled first, and its deadline decided "
    "within four minutes"
)
SOON = (
    "first run of this script with these arguments: the job is profiled first, and its deadline is nearer "
    "than the four minutes that the decision may take"
)
TOO_SOON = (
    "first run of this script with these arguments: its deadline can only be decided after a profiling run, "
    "which takes {least_s:.0f} s at least and so ends too late; give a later deadline, or none"
)
UNSEEN = "the job trained no step in two minutes, so no finish can be promised; submit it without a deadline"
NO_ROOM = (
    "first run of this script with these arguments, and all slots are promised to other jobs, so it could "
    "not be profiled; submit it again later, or without a deadline"
)
PREDICTED = (
    "the job trains until its loss is low enough, so its finish can be estimated but not promised; "
    "submit it without a deadline"
)
TEACH = (
    "the script does not say how long it trains, so no finish can be promised yet; run it once without a "
    "deadline, which teaches the platform its length, and the next run can have one"
)
NO_LENGTH = (
    "the job did not say how long it trains, so no finish can be promised; "
    "let it run once without a deadline, or say its length with job.epochs"
)


def estimated(
    record: JobRecord, knowledge: Knowledge, scheduler: Scheduler, now_s: float, *, quick: bool = False
) -> Estimate:
    """When a job will probably be done; `quick` for a rougher answer when many callers wait."""
    basis = knowledge.basis(record.done)
    if basis is None:
        return Estimate(finish_s=None, source=knowledge.source)
    book = scheduler.book
    others = [other for other in book.active() if other.job_id != record.job_id]
    known = ChainMap({record.job_id: basis}, book.known)
    jobs = [*others, record]

    def by_present_policy() -> Estimate:
        policy, board, round_s = scheduler.policy_text, scheduler.board, scheduler.rhythm.interval_s
        beside = (board.calendar, scheduler.teams, scheduler.limits.of_policy)
        return estimate(record, jobs, known, board.base, policy, now_s, round_s, *beside, quick=quick)

    try:
        return by_present_policy()
    except Exception as error:
        scheduler.replace_failed(error)
        return by_present_policy()


def all_estimated(scheduler: Scheduler, now_s: float) -> dict[str, Estimate]:
    """When each active job will probably be done; jobs of which too little is known are left out.

    Everybody who shows an estimate of a job that was taken in shows this one.
    """
    records = list(scheduler.book.active())
    found = {r.job_id: (scheduler.book.known[r.job_id].basis(r.done), r) for r in records}
    ready = {job_id: (basis, record) for job_id, (basis, record) in found.items() if basis is not None}
    if not ready or len(records) > MOST_JOBS:
        return {}
    known = {job_id: basis for job_id, (basis, _) in ready.items()}

    def by_present_policy() -> dict[str, Estimate]:
        board, round_s = scheduler.board, scheduler.rhythm.interval_s
        beside = (board.calendar, scheduler.teams, scheduler.limits.of_policy)
        jobs = [record for _, record in ready.values()]
        return estimates(jobs, known, board.base, scheduler.policy_text, now_s, round_s, *beside)

    try:
        return by_present_policy()
    except Exception as error:
        scheduler.replace_failed(error)
        return by_present_policy()


def promise(
    record: JobRecord, knowledge: Knowledge, scheduler: Scheduler, now_s: float, *, quick: bool = False
) -> tuple[Promise, Asked | None]:
    """The answer to a job, new or active already, and what to give to `Scheduler.accepted` if it is taken in.

    With `quick` the estimate is rougher; the decision on a deadline is the same.
    """
    deadline_s = record.request.deadline_s
    if not scheduler.gives_promises or (deadline_s is None and not knowledge.known):
        guess = estimated(record, knowledge, scheduler, now_s, quick=quick)
        reason = ""
        if deadline_s is not None:
            reason = f"policy '{scheduler.policy.name}' gives no guarantees; see 'swell policy'"
        return Promise(admitted=True, estimate=guess, reason=reason), None
    if not knowledge.known:
        guess = estimated(record, knowledge, scheduler, now_s, quick=quick)
        left_s = math.inf if deadline_s is None else deadline_s - now_s
        least_s = knowledge.startup_s + ENOUGH_STEPS * REPORT_S
        if left_s < least_s and record.started_s is None:
            return Promise(admitted=False, estimate=guess, reason=TOO_SOON.format(least_s=least_s)), None
        reason = UNKNOWN if left_s >= DECIDED_S else SOON
        return Promise(admitted=True, pending=True, estimate=guess, reason=reason), None
    if deadline_s is not None and knowledge.length.is_predicted:
        guess = estimated(record, knowledge, scheduler, now_s, quick=quick)
        return Promise(admitted=False, estimate=guess, reason=PREDICTED), None
    asked = scheduler.admission(record, knowledge, now_s)
    answer = asked.admission
    if answer.admitted:
        admitted = replace(record, promise=replace(record.promise, admitted=True, pending=False))
        guess = estimated(admitted, knowledge, scheduler, now_s, quick=quick)
        on = None if deadline_s is None else answer.gpu_type
        return Promise(admitted=True, guaranteed_s=deadline_s, estimate=guess, gpu_type=on), asked
    earliest_s = answer.earliest_deadline_s
    if earliest_s is not None:  # add the time that processes take to start and end, which no curve has
        earliest_s += knowledge.startup_s + knowledge.closing_s
    refusal = Promise(
        admitted=False,
        estimate=Estimate(finish_s=None, source=knowledge.source),
        earliest_deadline_s=earliest_s,
        reason=answer.reason or "the deadline cannot be kept beside what was promised to other jobs",
    )
    return refusal, None


def after_profiling(
    record: JobRecord, knowledge: Knowledge, scheduler: Scheduler, now_s: float
) -> tuple[Promise, Asked | None]:
    """The answer to a job whose profiling run is over."""
    if not knowledge.known:
        unsaid = TEACH if record.request.auto or record.request.command else NO_LENGTH
        reason = unsaid if knowledge.timings.seen else UNSEEN if record.started_s is not None else NO_ROOM
        return Promise(admitted=False, estimate=Estimate(finish_s=None), reason=reason), None
    return promise(record, knowledge, scheduler, now_s)
