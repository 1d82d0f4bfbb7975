"""Limits of each user, under any policy: slots and running jobs that one user may have. Ours; not in a paper.

`ByUser` turns a policy into one that obeys these limits. Of a user's jobs the policy is shown only those that
may run now, with bounds on their slots that add up to no more than the user's limit. So no policy has to know
of users, and all obey alike. Of a user's jobs, those that were promised a finish come first, then those that
run, then the others by age.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swell.domain import InputError, IntArray, JobSpec, many
from swell.policies.base import Admission, Decision, Policy, dressed_as, gives_promises
from swell.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """What one user may have at a time; None for no limit."""

    slots: int | None = None
    """Slots of all running jobs together."""
    running: int | None = None
    """Jobs that run at a time."""

    def __bool__(self) -> bool:
        return self.slots is not None or self.running is not None

    def check_fits(self, job: JobSpec) -> None:
        """Refuse a job that no user could ever run, because it needs more slots than a user may have."""
        if self.slots is not None and job.min_gpus > self.slots:
            raise InputError(
                f"job '{job.job_id}': min_gpus must be at most {self.slots}, the slots that one user may"
                f" have, got {job.min_gpus}",
                field="min_gpus",
            )


NO_USER_LIMITS = UserLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A job that wants slots of its user's limit."""

    user: str
    least: int
    most: int
    promised: bool = False
    """Whether it was promised a finish."""
    running: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """What a user has apart from the contenders: profiling runs."""

    jobs: int = 0
    slots: int = 0


NOTHING = Use()


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the limits allow, by the place of a job among the contenders."""

    most: Mapping[int, int]
    """The most slots of each job that may run now."""
    why_not: Mapping[int, str]
    """For each job that may not: which limit keeps it waiting."""


def share_out(jobs: Sequence[Contender], limits: UserLimits, used: Mapping[str, Use]) -> Allowed:
    """Share out each user's limit among the user's jobs, which are given oldest first."""
    by_user: dict[str, list[int]] = {}
    for i, job in enumerate(jobs):
        by_user.setdefault(job.user, []).append(i)
    most: dict[int, int] = {}
    why_not: dict[int, str] = {}
    for user, mine in by_user.items():
        mine.sort(key=lambda i: (not jobs[i].promised, not jobs[i].running))
        use = used.get(user, NOTHING)
        count, reason = _choose(user, [jobs[i] for i in mine], limits, use)
        why_not |= dict.fromkeys(mine[count:], reason)
        slots = None if limits.slots is None else limits.slots - use.slots
        most |= zip(mine, _divide([jobs[i] for i in mine[:count]], slots))
    return Allowed(most, why_not)


def within(decision: Decision, most: IntArray) -> Decision:
    """The decision with no job above its bound: some policies keep to plans made when it was higher."""
    if not (decision.gpus > most).any():
        return decision
    per_node = decision.per_node
    if per_node is not None:
        # From the left, as many as are still allowed on each node.
        before = np.cumsum(per_node, axis=1) - per_node
        per_node = np.clip(most[:, None] - before, 0, per_node)
    return replace(decision, gpus=np.minimum(decision.gpus, most), per_node=per_node)


def _choose(user: str, jobs: Sequence[Contender], limits: UserLimits, use: Use) -> tuple[int, str]:
    """How many of these jobs, the first ones, may run together, and why the next one may not."""
    slots, who = use.slots, user or "one user"
    for count, job in enumerate(jobs):
        if limits.running is not None and use.jobs + count >= limits.running:
            return count, f"{who} may have {many(limits.running, 'running job')} at most"
        slots += job.least
        if limits.slots is not None and slots > limits.slots:
            return count, f"{who} may have {many(limits.slots, 'slot')} at most"
    return len(jobs), ""


def _divide(jobs: Sequence[Contender], slots: int | None) -> list[int]:
    """Bounds that add up to no more than `slots`; jobs with a promise get all that they can use first."""
    if slots is None:
        return [job.most for job in jobs]
    bounds = [job.least for job in jobs]
    spare = slots - sum(bounds)
    for i, job in enumerate(jobs):
        if job.promised:
            more = min(max(job.most - job.least, 0), spare)
            bounds[i] += more
            spare -= more
    # One slot at a time, always to the job with the lowest bound.
    open_ = [(job.least, i) for i, job in enumerate(jobs) if not job.promised and job.most > job.least]
    heapq.heapify(open_)
    while spare > 0 and open_:
        bound, i = heapq.heappop(open_)
        bounds[i] = bound + 1
        spare -= 1
        if bound + 1 < jobs[i].most:
            heapq.heappush(open_, (bound + 1, i))
    return bounds


@dataclass(frozen=True, slots=True)
class Shown:
    """What the policy sees of a snapshot."""

    part: Snapshot
    members: IntArray
    """The indices of its jobs in the whole snapshot."""
    most: IntArray | None
    """The bounds of its jobs; None where there are no limits, and the part is the whole."""
    why_not: Mapping[int, str]
    """By index of each other job: which limit keeps it waiting."""

    def at(self, index: int) -> int:
        """Where a job of the whole snapshot is in the part."""
        return int(np.searchsorted(self.members, index))


@dataclass(kw_only=True)
class ByUser(Policy):
    """A policy that decides within the limits of each user."""

    policy: Policy
    limits: UserLimits = NO_USER_LIMITS
    used: dict[str, Use] = field(default_factory=dict)
    """By user: what the user's jobs have outside the snapshot (profiling runs)."""
    why_not: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    """By number of a job: the limit that kept it from running in the last decision."""

    _last: tuple[Snapshot, Decision] | None = field(default=None, init=False, repr=False)
    """What the policy was shown last, and its decision on that; None if there was nothing to show."""

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Refuse a deadline that the limits of the job's user do not allow, otherwise ask the policy."""
        shown = self.shown(snapshot)
        if index in shown.why_not:
            if np.isfinite(snapshot.deadline_s[index]):
                reason = f"{shown.why_not[index]}, and jobs with a promised finish need them"
                return Admission(False, reason=reason)
            shown = self.shown(snapshot, asked=index)
        return self.policy.admit(shown.part, shown.at(index))

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """Have the policy remember what it promised."""
        shown = self.shown(snapshot, asked=index)
        self.policy.accepted(shown.part, shown.at(index), admission)

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Promised jobs that may run now and that the policy could not end in time."""
        shown = self.shown(snapshot)
        return shown.members[self.policy.endangered(shown.part)]

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Ask the policy for the jobs that may run; the others get nothing."""
        shown = self.shown(snapshot)
        self.why_not = {int(snapshot.numbers[i]): reason for i, reason in shown.why_not.items()}
        if shown.most is None:
            decision = self.policy.allocate(snapshot)
            self._last = snapshot, decision
            return decision
        if not len(shown.part):
            self._last = None
            return Decision(np.zeros(len(snapshot), dtype=np.int64))
        decision = within(self.policy.allocate(shown.part), shown.most)
        self._last = shown.part, decision
        return _among_all(decision, shown.members, snapshot)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the policy has to decide again on the jobs that it was shown."""
        return math.inf if self._last is None else self.policy.next_wakeup_s(*self._last)

    def shown(self, snapshot: Snapshot, asked: int | None = None) -> Shown:
        """What the policy sees of this snapshot. The job at the index `asked` is shown in any case."""
        everyone = np.arange(len(snapshot))
        if not self.limits:
            return Shown(snapshot, everyone, None, {})
        contenders = self._contenders(snapshot)
        allowed = share_out(contenders, self.limits, self.used)
        most = dict(allowed.most)
        if asked is not None:
            most.setdefault(asked, contenders[asked].most)
        members = np.array(sorted(most), dtype=np.int64)
        bounds = np.array([most[i] for i in members.tolist()], dtype=np.int64)
        bounds -= bounds % snapshot.per_replica[members]
        table = snapshot.table.copy(snapshot.rows[members])
        table.team = [snapshot.team[i] for i in members.tolist()]
        table.max_gpus = bounds
        # What a job asks for may be beyond its bound; a policy of rigid jobs would let it wait for ever.
        table.requested = np.clip(table.requested, table.min_gpus, bounds)
        return Shown(snapshot.of_table(table, snapshot.numbers[members]), members, bounds, allowed.why_not)

    def _contenders(self, snapshot: Snapshot) -> list[Contender]:
        least = snapshot.min_gpus
        most = np.maximum(np.minimum(snapshot.table.max_gpus[snapshot.rows], snapshot.widest), least)
        promised = np.isfinite(snapshot.deadline_s) & gives_promises(self.policy)
        facts = zip(
            snapshot.user, least.tolist(), most.tolist(), promised.tolist(), (snapshot.gpus > 0).tolist()
        )
        return [
            Contender(user=user, least=low, most=high, promised=sure, running=runs)
            for user, low, high, sure, runs in facts
        ]


def _among_all(decision: Decision, members: IntArray, snapshot: Snapshot) -> Decision:
    """A decision on some jobs as one on all: the others get nothing, and are placed last."""
    gpus, lent = np.zeros((2, len(snapshot)), dtype=np.int64)
    stay = np.zeros(len(snapshot), dtype=np.bool_)
    gpus[members] = decision.gpus
    if decision.lent is not None:
        lent[members] = decision.lent
    if decision.stay is not None:
        stay[members] = decision.stay
    per_node, order, kinds = None, None, None
    if decision.per_node is not None:
        per_node = np.zeros((len(snapshot), decision.per_node.shape[1]), dtype=np.int64)
        per_node[members] = decision.per_node
    if decision.order is not None:
        hidden = np.setdiff1d(np.arange(len(snapshot)), members)
        order = np.concatenate([members[decision.order], hidden])
    if decision.gpu_types is not None:
        every = [snapshot.cluster.gpu_types[0]] * len(snapshot)
        for i, kind in zip(members.tolist(), decision.gpu_types):
            every[i] = kind
        kinds = tuple(every)
    return Decision(gpus, per_node, order, kinds, lent, stay)


def by_user(policy: Policy, limits: UserLimits) -> ByUser:
    """The policy, made to obey the limits of each user."""
    return dressed_as(policy, ByUser)(policy=policy, limits=limits)
