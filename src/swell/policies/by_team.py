"""Teams and classes of priority, under any policy. Ours; not in a paper.

`ByTeam` turns a policy into one that obeys quotas of teams. How many slots each team may use now is computed
first (`share_slots`); the policy then plans the slots of each team as a cluster of its own, with the team's
jobs only. So no policy has to know of teams, and all obey alike.

- A team that can use its quota has it, so borrowed slots come back with the very next decision.
- A promise counts on the team's quota alone: `Snapshot.ahead` of a team never shows more. What a team borrows
  is shown to the policy as lent, like slots that a service may want back.
- Of one team's jobs, those of the highest class that is there are planned first, together with all jobs that
  were promised a finish. Each lower class is planned with the slots that are left.

Each of these groups has an instance of the policy of its own, so that what a policy remembers stays true.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swell.domain import (
    NO_TEAMS,
    OTHERS,
    PRIORITIES,
    BoolArray,
    IntArray,
    Placement,
    SlotsAhead,
    Teams,
    entitled,
)
from swell.policies.base import Admission, Decision, Policy, dressed_as, gives_promises
from swell.policies.baselines import water_fill
from swell.policies.by_type import ByType
from swell.policies.snapshot import Snapshot

# How many slots each team may use now: its own, and what others leave. Pure arithmetic on counts.
#
# Two rules give every answer. *Entitlement* (`swell.domain.entitled`): a team is entitled to its quota; if
# the cluster has fewer slots than all quotas together, to its part of them. *Borrowing*: slots that the
# entitled teams do not use go to the teams that can use more, the highest class of priority first, and
# inside a class in equal parts.


def share_slots(own: IntArray, demand: IntArray, capacity: int) -> IntArray:
    """The slots of each team.

    Args:
        own: what each team is entitled to, in sum no more than `capacity`.
        demand: teams x classes, the highest class first: the most slots that the jobs can use.
    """
    shares = np.minimum(own, demand.sum(axis=1))
    for wanted in np.cumsum(demand, axis=1).T:
        free = capacity - int(shares.sum())
        if free <= 0:
            break
        more = np.maximum(wanted - shares, 0)
        borrowed, level = water_fill(np.zeros(len(own), dtype=np.int64), more, free)
        rest = np.flatnonzero(more > level)[: free - int(borrowed.sum())]
        borrowed[rest] += 1
        shares = shares + borrowed
    return shares


def asking_order(own: IntArray, demand: IntArray) -> list[int]:
    """Teams in the order in which they are asked: those first that want the least of what is theirs.

    A team that is asked later can be given what those before it did not use after all.
    """
    pressure = demand.sum(axis=1) / np.maximum(own, 0.5)
    return [int(i) for i in np.argsort(pressure, kind="stable")]


FIRST = len(PRIORITIES)
"""The level of the group that is planned first in each team; other groups have the rank of their class."""


class TeamUse(NamedTuple):
    """What one team is entitled to, what it is given, and what of it is borrowed; for people."""

    own: int
    used: int
    demand: int = 0
    """The most slots that its jobs could use."""
    offered: int = 0
    """The most slots that the policy could give to its jobs."""

    @property
    def borrowed(self) -> int:
        """Slots of other teams that it has."""
        return max(self.used - self.own, 0)


@dataclass(kw_only=True)
class ByTeam(Policy):
    """A policy that decides for each team on its own, within the slots that are the team's now."""

    policy: Policy
    """A fresh instance of the policy; each group gets a copy."""
    teams: Teams = NO_TEAMS
    taken: dict[str, int] = field(default_factory=dict)
    """By team: slots that its jobs have outside the snapshot (profiling runs); they count as its own."""
    uses: dict[str, TeamUse] = field(default_factory=dict, init=False, repr=False)
    """By team: how the last decision shared the slots out. Empty while there are no teams."""

    _policies: dict[tuple[str, int], Policy] = field(default_factory=dict, init=False, repr=False)
    _parts: list[tuple[Policy, Snapshot, Decision]] = field(default_factory=list, init=False, repr=False)
    """The last decision, group by group."""
    _lent: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """By number of a promised job: how many of its GPUs no promise counts on, by the last decision."""

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Ask the job's team, with what is the team's own."""
        policy, part, at = self._asked(snapshot, index)
        return policy.admit(part, at)

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """Have the policy of the job's team remember what it promised."""
        policy, part, at = self._asked(snapshot, index)
        policy.accepted(part, at, admission)

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Promised jobs that the policy could not end in time within the slots of their team."""
        if not self._divides(snapshot):
            return self._policy_of(OTHERS, FIRST).endangered(snapshot)
        found = [np.empty(0, dtype=np.int64)]
        for team in dict.fromkeys(snapshot.team):
            members = self._first_group(snapshot, team)
            if np.isfinite(snapshot.deadline_s[members]).any():
                part = self._promising(snapshot, team, members)
                found.append(members[self._policy_of(team, FIRST).endangered(part)])
        return np.sort(np.concatenate(found))

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Share the slots out among the teams, then ask the policy for each group of jobs."""
        if not self._divides(snapshot):
            policy = self._policy_of(OTHERS, FIRST)
            decision = policy.allocate(snapshot)
            self._parts, self.uses = [(policy, snapshot, decision)], {}
            return decision
        return _Round(self, snapshot).decide()

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the policy has to decide again for the first of the groups."""
        return min((p.next_wakeup_s(part, made) for p, part, made in self._parts), default=math.inf)

    def set_teams(self, teams: Teams) -> None:
        """Obey these teams from now on."""
        gone = set(self.teams.quotas) - set(teams.quotas)
        self._policies = {key: policy for key, policy in self._policies.items() if key[0] not in gone}
        self.teams, self.uses = teams, {}

    def asked_with(self, teams: Teams) -> ByTeam:
        """The same policy with other teams, for a question; what is remembered is shared."""
        other = copy.copy(self)
        other.teams = teams
        return other

    def keep_promises(self, types: Mapping[int, str]) -> None:
        """Have jobs, by number, stay on the GPU type that their finish was promised on."""
        for policy in (self.policy, *self._policies.values()):
            if isinstance(policy, ByType):
                policy.keep_promises(types)

    # -- groups ------------------------------------------------------------------------------------------

    def _divides(self, snapshot: Snapshot) -> bool:
        """Whether there is anything to divide: teams, or jobs of several classes."""
        return bool(self.teams) or (len(snapshot) > 0 and bool(np.ptp(snapshot.priority)))

    def _promised(self, snapshot: Snapshot) -> BoolArray:
        """Jobs that were promised a finish."""
        if not gives_promises(self.policy):
            return np.zeros(len(snapshot), dtype=np.bool_)
        return np.isfinite(snapshot.deadline_s)

    def groups(self, snapshot: Snapshot, team: str) -> list[tuple[int, IntArray]]:
        """Level and members of each group of a team, in the order in which they are planned."""
        mine = np.array([name == team for name in snapshot.team], dtype=np.bool_)
        promised = self._promised(snapshot) & mine
        rest, rank = mine & ~promised, snapshot.priority
        ranks = sorted(set(rank[rest].tolist()), reverse=True)
        first = promised | (rest & (rank == ranks[0])) if ranks else promised
        lower = [(r, np.flatnonzero(rest & (rank == r))) for r in ranks[1:]]
        return [(FIRST, np.flatnonzero(first)), *lower]

    def _first_group(self, snapshot: Snapshot, team: str) -> IntArray:
        return self.groups(snapshot, team)[0][1]

    def _asked(self, snapshot: Snapshot, index: int) -> tuple[Policy, Snapshot, int]:
        """The policy to ask about a job, what it is shown, and where the job is in that."""
        if not self._divides(snapshot):
            return self._policy_of(OTHERS, FIRST), snapshot, index
        team = snapshot.team[index]
        level, members = next(
            (level, members) for level, members in self.groups(snapshot, team) if index in members
        )
        part = self._promising(snapshot, team, members)
        return self._policy_of(team, level), part, int(np.searchsorted(members, index))

    def _promising(self, snapshot: Snapshot, team: str, members: IntArray) -> Snapshot:
        """A group on all that its team can have at once: what it is entitled to, or holds now if more."""
        own = entitled(self.teams.quotas, snapshot.capacity + sum(self.taken.values()))
        held = sum(int(gpus) for name, gpus in zip(snapshot.team, snapshot.gpus) if name == team)
        count = min(max(own.get(team, 0) - self.taken.get(team, 0), held), snapshot.capacity)
        room = snapshot.cluster.in_service.copy()
        return self.part(snapshot, team, members, self.choose(snapshot, members, room, count))

    def choose(self, snapshot: Snapshot, members: IntArray, room: BoolArray, count: int) -> IntArray:
        """Which GPUs of `room` a group plans with: those that its jobs hold, then idle ones, then others'.

        A group that has to give some back keeps what promises count on, then one GPU of each other job, so
        that the largest jobs lose GPUs first. Of other teams' GPUs, a group takes those first that these
        teams would give up first, and of teams first that have more than their own.
        """
        most, cluster = len(room), snapshot.cluster
        rank, second = np.full(most, 2 * most), np.zeros(most, dtype=np.int64)
        mine = set(members.tolist())
        greedy = self._over(snapshot)
        for i, (placement, keep) in enumerate(zip(snapshot.placements, self._keep(snapshot))):
            held = list(placement)
            if i in mine:
                rank[held], second[held] = keep, i
            else:
                rank[held], second[held] = (4 if snapshot.team[i] in greedy else 6) * most - keep, -i
        idle = rank == 2 * most
        on_node = np.bincount(cluster.node_of_gpu[room & idle], minlength=len(cluster.nodes))
        second[idle] = -on_node[cluster.node_of_gpu[idle]]
        free = np.flatnonzero(room)
        return np.sort(free[np.lexsort((free, second[free], rank[free]))[:count]])

    def _keep(self, snapshot: Snapshot) -> list[IntArray]:
        """For the GPUs of each job: how soon they are given up, from 0 for those that promises count on."""
        ranks, promised = [], self._promised(snapshot)
        for i, placement in enumerate(snapshot.placements):
            keep = np.arange(1, len(placement) + 1)
            if promised[i]:
                lent = min(self._lent.get(int(snapshot.numbers[i]), 0), len(placement))
                keep = (np.arange(len(placement)) >= len(placement) - lent).astype(np.int64)
            ranks.append(keep)
        return ranks

    def _over(self, snapshot: Snapshot) -> set[str]:
        """Teams whose jobs hold more than is their own."""
        own = entitled(self.teams.quotas, snapshot.capacity)
        held: dict[str, int] = {}
        for name, gpus in zip(snapshot.team, snapshot.gpus.tolist()):
            held[name] = held.get(name, 0) + gpus
        return {name for name, gpus in held.items() if gpus > own.get(name, 0)}

    def part(self, snapshot: Snapshot, team: str, members: IntArray, gpus: IntArray) -> Snapshot:
        """What the policy sees of a group that plans with these GPUs."""
        mine = np.zeros(len(snapshot.cluster.in_service), dtype=np.bool_)
        mine[gpus] = True
        cluster = snapshot.cluster.without(np.flatnonzero(snapshot.cluster.in_service & ~mine).tolist())
        ahead = snapshot.given_ahead
        if self.teams:
            seen = snapshot.ahead if ahead is None else ahead
            taken = sum(self.taken.values())
            own = [entitled(self.teams.quotas, int(gpus) + taken).get(team, 0) for gpus in seen.gpus]
            left = np.array(own, dtype=np.int64) - self.taken.get(team, 0)
            ahead = SlotsAhead(seen.times, np.maximum(left, 0))
        part = snapshot.part(members, cluster, ahead)
        held = [snapshot.placements[i] for i in members.tolist()]
        kept = [_within(placement, mine) for placement in held]
        if kept != held:
            part.placements = kept
            part.gpus = np.array([len(placement) for placement in kept], dtype=np.int64)
        return part

    def _policy_of(self, team: str, level: int) -> Policy:
        if (team, level) not in self._policies:
            self._policies[team, level] = copy.deepcopy(self.policy)
        return self._policies[team, level]


class _Round:
    """One decision: teams are asked one after the other, and each leaves the next what it did not use."""

    def __init__(self, owner: ByTeam, snapshot: Snapshot) -> None:
        self.owner = owner
        self.snapshot = snapshot
        self.room = snapshot.cluster.in_service.copy()
        """GPUs that no group has been given yet."""
        self.gpus, self.lent = np.zeros((2, len(snapshot)), dtype=np.int64)
        self.stay = np.zeros(len(snapshot), dtype=np.bool_)
        self.per_node: IntArray | None = None
        self.kinds: list[str] | None = None
        self.orders: list[IntArray] = []
        self.parts: list[tuple[Policy, Snapshot, Decision]] = []

    def decide(self) -> Decision:
        """Ask for every group, and join the answers."""
        snapshot, owner = self.snapshot, self.owner
        names = sorted(set(snapshot.team) | set(owner.teams.quotas) | {OTHERS})
        demand = self._demand(names)
        taken = np.array([owner.taken.get(name, 0) for name in names])
        given = entitled(owner.teams.quotas, snapshot.capacity + int(taken.sum()))
        own = np.maximum(np.array([given.get(name, 0) for name in names]) - taken, 0)
        own = _fit(own, snapshot.capacity)
        left, waiting, uses = snapshot.capacity, asking_order(own, demand), dict[str, TeamUse]()
        while waiting:
            shares = share_slots(own[waiting], demand[waiting], left)
            team = waiting.pop(0)
            most = left - int(shares[1:].sum())
            used = self._ask_team(names[team], most)
            left -= used
            wanted = int(demand[team].sum())
            also = int(taken[team])
            uses[names[team]] = TeamUse(int(own[team]) + also, used + also, wanted, most + also)
        placed = np.concatenate(self.orders) if self.orders else np.empty(0, dtype=np.int64)
        order = np.concatenate([placed, np.setdiff1d(np.arange(len(snapshot)), placed)])
        owner.uses, owner._parts = uses if owner.teams else {}, self.parts
        owner._lent = {int(n): int(k) for n, k in zip(snapshot.numbers, self.lent) if k}
        kinds = None if self.kinds is None else tuple(self.kinds)
        return Decision(self.gpus, self.per_node, order, kinds, self.lent, self.stay)

    def _demand(self, names: list[str]) -> IntArray:
        """Teams x classes, the highest first: the most slots that the jobs can use."""
        snapshot, capacity = self.snapshot, self.snapshot.capacity
        bound = np.minimum(snapshot.table.max_gpus[snapshot.rows], capacity)
        if self.owner.policy.rigid:
            useful = snapshot.requested
        else:
            useful = snapshot.curves.best_gpus[snapshot.curve]
        wanted = np.where(snapshot.min_gpus > bound, 0, np.minimum(np.maximum(useful, 1), bound))
        demand = np.zeros((len(names), len(PRIORITIES)), dtype=np.int64)
        rows = np.array([names.index(name) for name in snapshot.team], dtype=np.int64)
        np.add.at(demand, (rows, len(PRIORITIES) - 1 - snapshot.priority), wanted)
        return demand

    def _ask_team(self, team: str, most: int) -> int:
        """Ask for each group of a team, within `most` slots; returns how many they use together."""
        used = 0
        for level, members in self.owner.groups(self.snapshot, team):
            if len(members):
                used += self._ask_group(team, level, members, most - used)
        return used

    def _ask_group(self, team: str, level: int, members: IntArray, most: int) -> int:
        snapshot, owner = self.snapshot, self.owner
        gpus = owner.choose(snapshot, members, self.room, most)
        part, policy = owner.part(snapshot, team, members, gpus), owner._policy_of(team, level)
        if not part.capacity:
            return 0
        decision = policy.allocate(part)
        self.parts.append((policy, part, decision))
        self._join(members, decision)
        self._take(gpus, part, decision)
        return int(decision.gpus.sum())

    def _join(self, members: IntArray, decision: Decision) -> None:
        """Enter the answer for a group into the answer for all."""
        self.gpus[members] = decision.gpus
        if decision.lent is not None:
            self.lent[members] = decision.lent
        if decision.stay is not None:
            self.stay[members] = decision.stay
        if decision.per_node is not None:
            if self.per_node is None:
                nodes = len(self.snapshot.cluster.nodes)
                self.per_node = np.zeros((len(self.snapshot), nodes), dtype=np.int64)
            self.per_node[members] = decision.per_node
        if decision.gpu_types is not None:
            if self.kinds is None:
                self.kinds = [self.snapshot.cluster.gpu_types[0]] * len(self.snapshot)
            for i, kind in zip(members.tolist(), decision.gpu_types):
                self.kinds[i] = kind
        order = np.arange(len(members)) if decision.order is None else decision.order
        self.orders.append(members[order])

    def _take(self, gpus: IntArray, part: Snapshot, decision: Decision) -> None:
        """Take what a group was given out of the room of the next ones."""
        held = {gpu for placement in part.placements for gpu in placement}
        mine = sorted(gpus.tolist(), key=lambda gpu: gpu not in held)
        if decision.per_node is None:
            self.room[mine[: int(decision.gpus.sum())]] = False
            return
        left = decision.per_node.sum(axis=0)
        nodes = part.cluster.node_of_gpu
        for gpu in mine:
            if left[nodes[gpu]] > 0:
                left[nodes[gpu]] -= 1
                self.room[gpu] = False


def _fit(own: IntArray, capacity: int) -> IntArray:
    """Entitlements cut so that their sum is no more than `capacity`: profiling runs may leave too little."""
    before = np.concatenate([[0], np.cumsum(own)[:-1]])
    return np.clip(capacity - before, 0, own)


def _within(placement: Placement, mine: BoolArray) -> Placement:
    """Those GPUs of a placement that are among `mine`."""
    return tuple(gpu for gpu in placement if mine[gpu])


def by_team(policy: Policy, teams: Teams = NO_TEAMS) -> ByTeam:
    """The policy, made to obey teams and classes of priority."""
    return dressed_as(policy, ByTeam)(policy=policy, teams=teams)
