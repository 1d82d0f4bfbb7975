"""Admission with a promise: the answer to a submission or a quote. Pure: asking changes nothing.

A job with a deadline is admitted with a guaranteed finish, or refused with the earliest deadline that would
be admitted, or, if its script has never run here, profiled before its deadline is decided. A best-effort job
is always admitted, with an estimate.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swell.control.knowledge import ENOUGH_STEPS, Knowledge
from swell.control.model import Estimate, JobRecord, Promise
from swell.control.roster import gpu_type_of, main_type, spec_of, widest_nodes
from swell.control.scheduler import Asked, Scheduler
from swell.domain import NO_RESERVATIONS, NO_TEAMS, Calendar, Cluster, JobSpec, Teams
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.policies import make_policy
from swell.policies.by_user import NO_USER_LIMITS, UserLimits
from swell.sim import simulate

# When a job will be done, according to the simulator: the present jobs, the present policy, no new arrivals.
#
# The simulator runs the same policies, so a look ahead is one call of it, with the curves believed now.


MOST_JOBS = 60
"""With more active jobs a look ahead would take too long; the estimate then comes from the fair share."""
KIN_ERROR = 0.5
"""Least relative error of an estimate that is made from runs with other arguments: nobody knows theirs."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a change costs: a start takes the start-up time, a resize the pause last measured."""

    startup_s: float
    pause_s: float

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return self.pause_s if before else self.startup_s


def finishes(
    records: Sequence[JobRecord],
    known: Mapping[str, Knowledge],
    cluster: Cluster,
    policy: str,
    now_s: float,
    interval_s: float | None = None,
    calendar: Calendar = NO_RESERVATIONS,
    teams: Teams = NO_TEAMS,
    user_limits: UserLimits = NO_USER_LIMITS,
) -> dict[str, float]:
    """The finish of each job whose length and speed are known, if no other job is submitted.

    `interval_s` is the length of the policy's rounds. The simulated clock begins with the present round, so
    that simulated decisions fall on the moments of the real ones. The reservations of the `calendar` take
    their GPUs out of `cluster`; services are taken to want what they want now.
    """
    ready = [r for r in records if known[r.job_id].known and not r.phase.over]
    if not ready or cluster.capacity == 0:
        return {}
    cost = _Cost(
        startup_s=float(np.mean([known[r.job_id].startup_s for r in ready])),
        pause_s=float(np.mean([known[r.job_id].pause_s for r in ready])),
    )
    began_s = now_s - now_s % interval_s if interval_s else now_s
    asked = [
        _as_simulated(record, known[record.job_id], cluster, cost, began_s, now_s, teams) for record in ready
    ]
    nodes = tuple(  # the speeds were measured beside neighbours: slots that share a GPU count as GPUs
        replace(node, gpus=int(gpus), per_gpu=1)
        for node, gpus in zip(cluster.nodes, cluster.node_gpus, strict=True)
        if gpus
    )
    result = simulate(
        [job for job, _ in asked],
        ProfileSet([profile for _, profile in asked]),
        Cluster(nodes),
        make_policy(policy),
        interval_s=interval_s or 0.0,
        resize_cost=cost,
        calendar=calendar.shifted(-began_s),
        teams=teams.within(sum(node.gpus for node in nodes)),
        user_limits=user_limits,
    )
    return {
        job_id: began_s + float(finish_s)
        for job_id, finish_s in zip(result.job_ids, result.finish_s, strict=True)
        if not np.isnan(finish_s)
    }


def _as_simulated(
    record: JobRecord,
    knowledge: Knowledge,
    cluster: Cluster,
    cost: _Cost,
    began_s: float,
    now_s: float,
    teams: Teams,
) -> tuple[JobSpec, MeasuredCounts]:
    """The rest of a job and its believed speed, in the simulator's terms; its clock is 0 at `began_s`."""
    request, deadline_s = record.request, record.request.deadline_s
    width, speed = widest_nodes(cluster), knowledge.speed
    curves = {kind: speed.curve_on(kind, cluster.capacity, width[kind]) for kind in cluster.gpu_types}
    curve = curves[gpu_type_of(cluster, record.wanted) or main_type(cluster)]
    work = knowledge.length.left(record.done)
    if record.wanted:
        # The job runs already, but the simulator charges it for a start: take that cost off its work.
        work -= cost.startup_s * curve[min(len(record.wanted), cluster.capacity)]
    spec = replace(
        spec_of(record, cluster, teams),
        submit_s=now_s - began_s,
        gpus=request.workers,
        work=max(work, 1e-6),
        deadline_s=None if deadline_s is None or deadline_s <= now_s + 1 else deadline_s - began_s,
    )
    counts = np.arange(1.0, cluster.capacity + 1)
    measured = {kind: (counts, {1: curve[1:]}) for kind, curve in curves.items()}
    return spec, MeasuredCounts(record.job_id, measured, 1e6)


def estimate(
    record: JobRecord,
    records: Sequence[JobRecord],
    known: Mapping[str, Knowledge],
    cluster: Cluster,
    policy: str,
    now_s: float,
    interval_s: float | None = None,
    calendar: Calendar = NO_RESERVATIONS,
    teams: Teams = NO_TEAMS,
    user_limits: UserLimits = NO_USER_LIMITS,
    *,
    quick: bool = False,
) -> Estimate:
    """The likely finish of one job, with a range of two standard deviations of the model's own error.

    `quick` estimates by the fair share, without a look ahead, for when many callers wait.
    """
    knowledge = known[record.job_id]
    if not knowledge.known or cluster.capacity == 0:
        return Estimate(finish_s=None, source=knowledge.source)
    if len(records) <= MOST_JOBS and not quick:
        ends = finishes(records, known, cluster, policy, now_s, interval_s, calendar, teams, user_limits)
        finish_s = ends.get(record.job_id)
    else:
        capacity = max(int(calendar.ahead(cluster, now_s).gpus[0]), 1)
        share = max(capacity // len(records), 1)
        on = gpu_type_of(cluster, record.wanted) or main_type(cluster)
        rate = float(knowledge.speed.curve_on(on, share, cluster.gpus_per_node)[share])
        wait = max(len(records) / capacity, 1.0)
        left_s = knowledge.length.left(record.done) / rate if rate > 0 else np.inf
        finish_s = now_s + knowledge.startup_s + wait * left_s if np.isfinite(left_s) else None
    return _with_range(record, knowledge, finish_s, now_s)


def estimates(
    records: Sequence[JobRecord],
    known: Mapping[str, Knowledge],
    cluster: Cluster,
    policy: str,
    now_s: float,
    interval_s: float | None,
    calendar: Calendar,
    teams: Teams,
    user_limits: UserLimits,
) -> dict[str, Estimate]:
    """The likely finish of each of these jobs, by one look ahead; empty if there are too many for it."""
    if len(records) > MOST_JOBS:
        return {}
    ends = finishes(records, known, cluster, policy, now_s, interval_s, calendar, teams, user_limits)
    return {r.job_id: _with_range(r, known[r.job_id], ends.get(r.job_id), now_s) for r in records}


def _with_range(record: JobRecord, knowledge: Knowledge, finish_s: float | None, now_s: float) -> Estimate:
    """The estimate of a job that ends its training then, with the error of what is known of it."""
    if finish_s is None:
        return Estimate(finish_s=None, source=knowledge.source)
    finish_s += knowledge.closing_s
    error = knowledge.error(len(record.wanted))
    if knowledge.source == "kin":
        error = max(error, KIN_ERROR)
    spread_s = 2 * error * (finish_s - now_s)
    return Estimate(
        finish_s=finish_s,
        earliest_s=max(now_s, finish_s - spread_s),
        latest_s=finish_s + spread_s,
        source=knowledge.source,
    )


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
