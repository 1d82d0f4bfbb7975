"""Clusters with several GPU types: any policy, once per type. Ours; not in a paper.

`ByType` turns a policy into one that places whole jobs on GPUs of one type. Jobs are assigned to types
(`assign`), and the policy plans the nodes of each type as a cluster of its own, with the jobs' curves on
that type. So no policy has to know of types, and all treat them alike.

A job that was promised a finish stays on the type that the promise was made for, as long as nodes of that
type are in service.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from swell.domain import BoolArray, Cluster, FloatArray, IntArray, Placement
from swell.policies.base import Admission, Decision, Policy, dressed_as
from swell.policies.snapshot import Snapshot

# Which jobs go to which GPU type: the assignment with the largest product of the jobs' speeds. Ours.
#
# Within one type every job is taken to get the same share, except that no job gets more than it can use
# (water level). The product of speeds, each to the power of the job's weight, rises if a job goes where it
# is faster compared with the other types, and falls if too many jobs crowd on one type. So it weighs
# comparative speed against load, and it depends on neither the unit of a job's work nor how much work is
# left.
#
# Jobs are moved one at a time, the best move first, and a running job moves only if that outweighs its
# pause.


LEAST_GAIN = 0.05
"""A job that has a type gets another one only if the logarithm of the product rises by more than this."""
MOST_MOVES = 8
"""How many jobs may get another type in one decision; newcomers are not counted."""
ENOUGH = 0.95
"""A job is taken to want the fewest GPUs that give it this part of its highest speed."""
NOWHERE = -1
_IMPOSSIBLE = -1e6
"""Logarithm of the speed of a job that cannot run on a type."""


class TypePools:
    """The speeds of jobs on each GPU type, in the form that the search needs."""

    def __init__(self, rates: FloatArray, most: IntArray, capacity: IntArray) -> None:
        """`rates`: types x jobs x GPUs; `most`: the most GPUs that each job may have, types x jobs."""
        kinds, jobs, columns = rates.shape
        self.capacity = capacity
        useful = np.maximum.accumulate(rates, axis=2)
        most = np.minimum(np.minimum(most, capacity[:, None]), columns - 1)
        beyond = np.arange(columns) > most[:, :, None]
        at_most = np.take_along_axis(useful, most[:, :, None], axis=2)
        useful = np.where(beyond, at_most, useful)
        # A share below the fewest GPUs that a job can run on counts as that part of the time on the fewest.
        least = np.maximum(np.argmax(useful > 0, axis=2), 1)
        at_least = np.take_along_axis(useful, least[:, :, None], axis=2)
        ramp = at_least * np.arange(columns) / least[:, :, None]
        self._speed = np.where(useful > 0, useful, ramp)
        self.cap = np.argmax(useful >= ENOUGH * at_most, axis=2).astype(np.float64)
        self.possible: BoolArray = at_most[:, :, 0] > 0
        self._kinds, self._jobs = np.arange(kinds)[:, None], np.arange(jobs)[None, :]

    def log_speed(self, level: FloatArray) -> FloatArray:
        """Logarithm of each job's speed on each type, if shares there rise to `level`; types x jobs."""
        share = np.minimum(np.broadcast_to(level[:, None], self.cap.shape), self.cap)
        low = np.minimum(share.astype(np.int64), self._speed.shape[2] - 2)
        below = self._speed[self._kinds, self._jobs, low]
        above = self._speed[self._kinds, self._jobs, low + 1]
        speed = below + (above - below) * (share - low)
        return np.log(speed, out=np.full(speed.shape, _IMPOSSIBLE), where=self.possible & (speed > 0))

    def levels(self, on: IntArray, more: int) -> FloatArray:
        """The water level of each type with the jobs that are `on` it, and with one more or fewer (-1)."""
        found = np.empty(len(self.capacity))
        for kind, capacity in enumerate(self.capacity.tolist()):
            caps = np.sort(self.cap[kind, on == kind])
            if more > 0:
                caps = np.append(caps, np.inf)
            elif more < 0:  # the one that wants the most leaves: the others' level depends on it the most
                caps = caps[:-1]
            found[kind] = _level(caps, capacity)
        return found


def _level(caps: FloatArray, capacity: float) -> float:
    """The highest common share that fits, if job i takes no more than `caps[i]` (ascending)."""
    left = float(capacity)
    for i, cap in enumerate(caps.tolist()):
        share = left / (len(caps) - i)
        if share <= cap:
            return share
        left -= cap
    return float(capacity)


def assign(
    pools: TypePools, on: IntArray, fixed: BoolArray, cost: FloatArray, weight: FloatArray
) -> IntArray:
    """The type of each job, from `on` (NOWHERE for newcomers); `fixed` jobs stay where they are.

    `cost` is what a move costs each job, as a logarithm of its speed. A job that can run on no type goes to
    the first.
    """
    on = on.copy()
    if not len(on):
        return on
    on[(on >= 0) & ~pools.possible[np.maximum(on, 0), np.arange(len(on))] & ~fixed] = NOWHERE
    moves = int((on == NOWHERE).sum()) + MOST_MOVES
    for _ in range(moves):
        to, gain = _gains(pools, on, fixed, cost, weight)
        job = int(np.argmax(gain))
        if gain[job] <= LEAST_GAIN:
            break
        on[job] = to[job]
    return np.maximum(on, 0)


def _gains(
    pools: TypePools, on: IntArray, fixed: BoolArray, cost: FloatArray, weight: FloatArray
) -> tuple[IntArray, FloatArray]:
    """The best other type of each job, and how much the logarithm of the product rises; newcomers first."""
    jobs = np.arange(len(on))
    now, joined, left = (pools.log_speed(pools.levels(on, more)) * weight for more in (0, 1, -1))
    member = on[None, :] == np.arange(len(pools.capacity))[:, None]
    others_lose = np.where(member, joined - now, 0.0).sum(axis=1)
    others_win = np.where(member, left - now, 0.0).sum(axis=1)
    here = np.maximum(on, 0)
    gain = joined + others_lose[:, None]
    stays = now[here, jobs] - others_win[here] + (left - now)[here, jobs] + cost * weight
    newcomer = on == NOWHERE
    gain = gain - np.where(newcomer, 0.0, stays)
    gain[member | ~pools.possible] = -np.inf
    gain[:, fixed] = -np.inf
    to = np.argmax(gain, axis=0)
    best = gain[to, jobs]
    # Newcomers are placed before anybody moves, the one with the clearest choice first.
    runner_up = np.partition(gain, -2, axis=0)[-2] if len(gain) > 1 else np.full(len(best), -np.inf)
    clear = np.minimum(best - np.maximum(runner_up, -1e9), 1e9)
    return to, np.where(newcomer & np.isfinite(best), 1e12 + clear, np.where(newcomer, -np.inf, best))


LASTS_S = 900.0
"""How long a job is taken to stay on a type, at most, when a move is weighed against its pause."""


class TypeNodes:
    """The nodes of one GPU type as a cluster of their own, and the numbers they have in the whole one."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self.kind = kind
        self.nodes = np.array([i for i, n in enumerate(cluster.nodes) if n.gpu_type == kind], dtype=np.int64)
        whole = np.flatnonzero(np.isin(cluster.node_of_gpu, self.nodes))
        self._number = {gpu: i for i, gpu in enumerate(whole.tolist())}
        held = frozenset(self._number[gpu] for gpu in cluster.held if gpu in self._number)
        self.cluster = Cluster(tuple(cluster.nodes[i] for i in self.nodes.tolist()), held)

    def holds(self, placement: Placement) -> bool:
        """Whether all these GPUs are of this type, and there are some."""
        return bool(placement) and all(gpu in self._number for gpu in placement)

    def local(self, placement: Placement) -> Placement:
        """The same GPUs by the numbers they have in this part; () unless all of them are here."""
        return tuple(self._number[gpu] for gpu in placement) if self.holds(placement) else ()

    def snapshot(self, whole: Snapshot, members: IntArray) -> Snapshot:
        """What the policy sees of this part: these jobs of the whole snapshot, on this type."""
        curves = whole.curves.on(self.kind)
        costs = (whole.resize_cost_s, whole.start_cost_s)
        part = Snapshot(
            whole.now_s,
            self.cluster,
            whole.table,
            whole.rows[members],
            curves,
            *costs,
            whole.numbers[members],
            whole.ahead_on(self.nodes.tolist()),
        )
        held = whole.placements
        part.placements = [self.local(held[i]) for i in members.tolist()]
        part.gpus = np.array([len(placement) for placement in part.placements], dtype=np.int64)
        part.beliefs = [whole.belief_on(i, self.kind) for i in members.tolist()]
        return part


@dataclass(kw_only=True)
class ByType(Policy):
    """A policy that decides for each GPU type on its own, after jobs were assigned to types."""

    policy: Policy
    """A fresh instance of the policy; each type gets a copy."""

    _policies: dict[str, Policy] = field(default_factory=dict, init=False, repr=False)
    _type_of: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    """The GPU type of each active job, by the job's number."""
    _promised: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    """The type that a job's finish was promised on, by the job's number."""
    _parts: list[tuple[Policy, Snapshot, Decision]] = field(default_factory=list, init=False, repr=False)
    """The last decision, type by type."""
    _nodes_of: tuple[Cluster, list[TypeNodes]] | None = field(default=None, init=False, repr=False)

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Admit the job if the policy admits it on some type; the best type for it is asked first."""
        refusals: list[Admission] = []
        number = int(snapshot.numbers[index])
        for nodes in self._by_preference(snapshot, index):
            members = self._members(snapshot, nodes.kind, newcomer=number)
            part = nodes.snapshot(snapshot, members)
            answer = self._policy_of(nodes.kind).admit(part, int(np.searchsorted(part.numbers, number)))
            if answer.admitted:
                on = nodes.kind if answer.finish_s is not None else None
                return Admission(True, finish_s=answer.finish_s, plan=(nodes, members, answer), gpu_type=on)
            refusals.append(answer)
        offers = [a for a in refusals if a.earliest_deadline_s is not None]
        if offers:
            return min(offers, key=lambda answer: answer.earliest_deadline_s or math.inf)
        return (
            refusals[0] if refusals else Admission(False, reason="no GPU type is in service that it can use")
        )

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """Remember the type that the job was admitted on."""
        nodes, members, answer = cast(tuple[TypeNodes, IntArray, Admission], admission.plan)
        number = int(snapshot.numbers[index])
        part = nodes.snapshot(snapshot, members)
        self._policy_of(nodes.kind).accepted(part, int(np.searchsorted(part.numbers, number)), answer)
        if answer.finish_s is not None:
            self._type_of[number] = self._promised[number] = nodes.kind

    def keep_promises(self, types: Mapping[int, str]) -> None:
        """Have jobs, by number, stay on the type that their finish was promised on.

        A policy that was just made, or that was not shown a job for some time, does not remember that itself.
        """
        self._promised.update(types)

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Promised jobs that the policy could not end in time on their type."""
        found = [np.empty(0, dtype=np.int64)]
        for kind in self._types(snapshot.cluster):
            members = self._members(snapshot, kind.kind)
            if len(members):
                part = kind.snapshot(snapshot, members)
                found.append(members[self._policy_of(kind.kind).endangered(part)])
        return np.sort(np.concatenate(found))

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Assign the jobs to types, then ask the policy for each type."""
        self._assign(snapshot)
        nodes = len(snapshot.cluster.nodes)
        gpus, lent = np.zeros((2, len(snapshot)), dtype=np.int64)
        stay = np.zeros(len(snapshot), dtype=np.bool_)
        per_node: IntArray | None = None
        orders: list[IntArray] = []
        self._parts = []
        for kind in self._types(snapshot.cluster):
            members = self._members(snapshot, kind.kind)
            if not len(members) or not kind.cluster.capacity:
                continue
            policy, part = self._policy_of(kind.kind), kind.snapshot(snapshot, members)
            decision = policy.allocate(part)
            self._parts.append((policy, part, decision))
            gpus[members] = decision.gpus
            if decision.lent is not None:
                lent[members] = decision.lent
            if decision.stay is not None:
                stay[members] = decision.stay
            if decision.per_node is not None:
                per_node = np.zeros((len(snapshot), nodes), dtype=np.int64) if per_node is None else per_node
                per_node[members[:, None], kind.nodes[None, :]] = decision.per_node
            order = np.arange(len(members)) if decision.order is None else decision.order
            orders.append(members[order])
        placed = np.concatenate(orders) if orders else np.empty(0, dtype=np.int64)
        order = np.concatenate([placed, np.setdiff1d(np.arange(len(snapshot)), placed)])
        kinds = tuple(self._type_of[number] for number in snapshot.numbers.tolist())
        return Decision(gpus, per_node, order, kinds, lent, stay)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the policy has to decide again for the first of the types."""
        return min((p.next_wakeup_s(part, made) for p, part, made in self._parts), default=math.inf)

    def _assign(self, snapshot: Snapshot) -> None:
        """Give every job a type, and forget the jobs that are gone."""
        types = self._types(snapshot.cluster)
        numbers = snapshot.numbers.tolist()
        on = self._on(snapshot, types)
        capacity = np.array([nodes.cluster.capacity for nodes in types], dtype=np.int64)
        self._promised = {n: self._promised[n] for n in numbers if n in self._promised}
        fixed = np.array([n in self._promised for n in numbers], dtype=np.bool_) & (on != NOWHERE)
        fixed &= capacity[np.maximum(on, 0)] > 0
        pools = self._pools(snapshot, types, capacity)
        to = assign(pools, on, fixed, self._move_cost(snapshot, pools, on), snapshot.weight)
        self._type_of = {number: types[kind].kind for number, kind in zip(numbers, to.tolist())}

    def _pools(self, snapshot: Snapshot, types: list[TypeNodes], capacity: IntArray) -> TypePools:
        rates = np.stack([snapshot.curves.on(nodes.kind).rates[snapshot.curve] for nodes in types])
        most = np.minimum(snapshot.table.max_gpus[snapshot.rows], capacity[:, None])
        most = np.where(snapshot.min_gpus > capacity[:, None], 0, most)
        return TypePools(rates, most, capacity)

    def _move_cost(self, snapshot: Snapshot, pools: TypePools, on: IntArray) -> np.ndarray[Any, Any]:
        """What a move to another type costs each job: the part of the time ahead that its pause takes."""
        speed = np.exp(pools.log_speed(pools.levels(on, 0))).max(axis=0)
        lasts_s = np.divide(snapshot.remaining, speed, out=np.full(len(on), LASTS_S), where=speed > 0)
        lasts_s = np.clip(np.where(snapshot.known, lasts_s, LASTS_S), 1.0, LASTS_S)
        return np.where(snapshot.gpus > 0, np.log1p(snapshot.start_cost_s / lasts_s), 0.0)

    def _by_preference(self, snapshot: Snapshot, index: int) -> list[TypeNodes]:
        """The types that a newcomer can run on, the one first that raises the product of speeds the most."""
        types = self._types(snapshot.cluster)
        capacity = np.array([nodes.cluster.capacity for nodes in types], dtype=np.int64)
        on = self._on(snapshot, types)
        pools = self._pools(snapshot, types, capacity)
        joined, now = (pools.log_speed(pools.levels(on, more)) for more in (1, 0))
        member = on[None, :] == np.arange(len(types))[:, None]
        score = joined[:, index] + np.where(member, joined - now, 0.0).sum(axis=1)
        return [types[i] for i in np.argsort(-score, kind="stable").tolist() if pools.possible[i, index]]

    def _members(self, snapshot: Snapshot, kind: str, newcomer: int | None = None) -> IntArray:
        """Indices of the jobs on a type, and of the newcomer."""
        types = self._types(snapshot.cluster)
        index = next(i for i, nodes in enumerate(types) if nodes.kind == kind)
        mine = self._on(snapshot, types) == index
        return np.flatnonzero(mine | (snapshot.numbers == newcomer) if newcomer is not None else mine)

    def _on(self, snapshot: Snapshot, types: list[TypeNodes]) -> IntArray:
        """The index of the type that each job is on; NOWHERE for newcomers.

        A job that this policy does not know, because the control plane was restarted, is on the type that it
        was promised, or whose GPUs it holds.
        """
        index = {nodes.kind: i for i, nodes in enumerate(types)}
        found = np.full(len(snapshot), NOWHERE)
        for i, number in enumerate(snapshot.numbers.tolist()):
            kind = self._type_of.get(number) or self._promised.get(number)
            if kind is not None:
                found[i] = index.get(kind, NOWHERE)
            elif snapshot.placements[i]:
                holding = (k for k, nodes in enumerate(types) if nodes.holds(snapshot.placements[i]))
                found[i] = next(holding, NOWHERE)
        return found

    def _policy_of(self, kind: str) -> Policy:
        if kind not in self._policies:
            self._policies[kind] = copy.deepcopy(self.policy)
        return self._policies[kind]

    def _types(self, cluster: Cluster) -> list[TypeNodes]:
        if self._nodes_of is None or self._nodes_of[0] is not cluster:
            self._nodes_of = (cluster, [TypeNodes(cluster, kind) for kind in cluster.gpu_types])
        return self._nodes_of[1]


def by_type(policy: Policy, cluster: Cluster) -> Policy:
    """The policy for this cluster: type by type if there are several types and it knows the jobs' speed."""
    if len(cluster.gpu_types) == 1 or policy.knows == "nothing":
        return policy
    return dressed_as(policy, ByType)(policy=policy)
