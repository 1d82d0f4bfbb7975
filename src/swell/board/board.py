"""The board: the table of jobs, the placer's ledger, and the one way to carry out a decision.

The caller runs the clock: it is the simulator or the control plane. It passes the active jobs to
the board, takes a snapshot, and hands over the policy's decision. The board places the shares, updates the
columns that a policy may read, and returns the *moves*: for each changed job its GPUs before and after, and
how long the job makes no progress. The caller then follows the moves, in real or in virtual time.

The rules of the table, which policies and callers rely on:
- a row belongs to one active job; it is given to another only after `remove`;
- `number` rises in order of submission and is never used twice;
- `active` lists rows by ascending number, so snapshots show the oldest job first;
- `gpus[row] == len(placement[row])`, and the placer's ledger agrees;
- `attained_gpu_s`, `run_s` and `left` are as of `since_s`; a job makes no progress before `paused_until_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from swell.domain import (
    NO_RESERVATIONS,
    BoolArray,
    Calendar,
    Cluster,
    Event,
    EventKind,
    InputError,
    IntArray,
    JobSpec,
    Placement,
    Reservation,
    SlotsAhead,
)
from swell.perf.curves import Curves
from swell.placement import NoRoom, Placer, make_placer
from swell.policies import Decision, JobTable, Policy, Snapshot

# When a policy decides: at once, in rounds, or when it wanted to be woken. The same live and simulated.


_LEAST_WAIT_S = 1e-3
"""Least time until a policy is woken again: rounding may make it request a wake-up in the same moment."""
_ROUNDING = 1e-9


@dataclass(slots=True)
class DecisionRhythm:
    """The next moment at which the policy decides, kept as things happen."""

    policy: Policy
    interval_s: float | None = None
    """Length of the rounds, which begin at multiples of it; None or 0: decide whenever something happens."""
    due_s: float = math.inf
    """When the policy is to decide next; infinite while nothing calls for a decision."""

    def ask(self, now_s: float, *, urgent: bool = False) -> None:
        """Something happened: decide now, or at the next round unless it is `urgent` (GPUs were lost)."""
        at_s = now_s if urgent or not self.interval_s else self._round_from(now_s)
        self.due_s = min(self.due_s, at_s)

    def decided(self, now_s: float, wake_s: float) -> None:
        """The policy has decided and wants to decide again at `wake_s` if nothing happens before."""
        if self.interval_s:
            if self.policy.changes_with_time:
                wake_s = now_s + self.interval_s
            elif wake_s < math.inf:
                wake_s = max(self._round_from(wake_s), self.interval_s, now_s + self.interval_s)
        self.due_s = max(wake_s, now_s + _LEAST_WAIT_S)

    def _round_from(self, at_s: float) -> float:
        """The first beginning of a round not before a moment."""
        assert self.interval_s
        return math.ceil(at_s / self.interval_s - _ROUNDING) * self.interval_s


# Shares of jobs whose GPUs come in replicas: a decision is rounded to whole ones before it is placed.


def in_replicas(decision: Decision, size: IntArray, most: IntArray) -> Decision:
    """The decision with every share a multiple of its job's `size`, and in sum no larger than before.

    Shares are rounded down. What that frees completes a replica for those that lacked least, within `most`.
    A policy that names nodes takes the rest from the nodes on which a job has fewest.
    """
    rest = decision.gpus % size
    if not rest.any():
        return decision
    if decision.per_node is not None:
        per_node = decision.per_node.copy()
        for i in np.flatnonzero(rest).tolist():
            for node in np.argsort(np.where(per_node[i] > 0, per_node[i], np.iinfo(np.int64).max)).tolist():
                cut = min(int(rest[i]), int(per_node[i, node]))
                per_node[i, node] -= cut
                rest[i] -= cut
        return replace(decision, gpus=per_node.sum(axis=1), per_node=per_node)
    gpus, free = decision.gpus - rest, int(rest.sum())
    for i in np.argsort(size - rest, kind="stable").tolist():
        if rest[i] and size[i] <= free and gpus[i] + size[i] <= most[i]:
            gpus[i] += size[i]
            free -= int(size[i])
    return replace(decision, gpus=gpus)


# Which GPUs a reservation holds: those it has, then idle ones, then some that jobs must give back.


Held = dict[str, frozenset[int]]
"""By name of a reservation: the numbers of the GPUs that it holds."""


def hold(
    cluster: Cluster,
    wanting: Sequence[Reservation],
    before: Mapping[str, frozenset[int]],
    placements: Iterable[Placement],
    promised: Iterable[tuple[Placement, int]] = (),
) -> Held:
    """The GPUs of each reservation in `wanting`, which names reservations of whole nodes first.

    They take their GPUs out of `cluster`; `before` is what they held so far and `placements` is what jobs
    hold. `promised` is what jobs with a deadline hold, and how many GPUs of it are lent, in the order in
    which these jobs are to lose GPUs. A job that loses a GPU pays a pause, even if it gets another one at
    once. So a reservation keeps what it has, and then takes idle GPUs, those of the largest jobs, those that
    are lent to jobs with a deadline, the last one of each job, and only then all of jobs with a deadline.
    """
    if not wanting:
        return {}
    usable = cluster.in_service.copy()
    held: Held = {}
    for one in wanting:
        if one.nodes:
            mine = [gpu for gpu in _of_nodes(cluster, one.nodes) if usable[gpu]]
            usable[mine] = False
            held[one.name] = frozenset(mine)
    counted = [one for one in wanting if not one.nodes]
    for one in counted:  # all keep what they have before one of them takes more
        kept = _packed(cluster, [gpu for gpu in before.get(one.name, ()) if usable[gpu]])[: one.gpus]
        usable[kept] = False
        held[one.name] = frozenset(kept)
    if all(len(held[one.name]) == one.gpus for one in counted):
        return held
    rank = np.zeros(len(usable), dtype=np.int64)
    """The order in which GPUs are taken, the smallest first: 0 for an idle GPU."""
    most = len(usable)
    for gpus in placements:
        rank[list(gpus)] = most - len(gpus) + 1
        rank[list(gpus[:1])] = 2 * most + 1
    for i, (gpus, lent) in enumerate(promised):
        rank[list(gpus)] = 2 * most + 2 + i
        rank[list(gpus[len(gpus) - lent :])] = most + 1 + i
    idle = np.bincount(cluster.node_of_gpu[usable & (rank == 0)], minlength=len(cluster.nodes))
    for one in counted:
        missing = one.gpus - len(held[one.name])
        if missing <= 0:
            continue
        own = np.bincount(cluster.node_of_gpu[list(held[one.name])], minlength=len(cluster.nodes))
        free = np.flatnonzero(usable)
        node = cluster.node_of_gpu[free]
        order = np.lexsort((-free, -idle[node], -own[node], rank[free]))
        taken = free[order[:missing]]
        usable[taken] = False
        held[one.name] |= frozenset(taken.tolist())
    return held


def held_events(before: Held, now: Held, now_s: float) -> list[Event]:
    """Events for the reservations that hold other GPUs than before."""
    return [
        Event(
            now_s,
            EventKind.HELD,
            data={
                "reservation": name,
                "gpus": sorted(now.get(name, ())),
                "before": sorted(before.get(name, ())),
            },
        )
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _of_nodes(cluster: Cluster, names: Iterable[str]) -> list[int]:
    """All GPUs of the nodes with these names."""
    wanted = set(names)
    chosen = np.array([node.name in wanted for node in cluster.nodes])
    return [int(gpu) for gpu in np.flatnonzero(chosen[cluster.node_of_gpu])]


def _packed(cluster: Cluster, gpus: list[int]) -> list[int]:
    """GPUs in the order in which to keep them: those on nodes with many of them first."""
    if not gpus:
        return []
    on_node = np.bincount(cluster.node_of_gpu[gpus], minlength=len(cluster.nodes))
    return sorted(gpus, key=lambda gpu: (-on_node[cluster.node_of_gpu[gpu]], -gpu))


PauseOf = Callable[[int, int, int], float]
"""(row, GPUs before, GPUs after) -> seconds without progress that this change costs; 0 before is a start."""

_EMPTY = JobSpec(job_id="-", submit_s=0.0, model="-", batch_size=1)
_FIRST_ROWS = 64


class Move(NamedTuple):
    """One job's change of GPUs."""

    row: int
    before: Placement
    after: Placement
    pause_s: float
    """How long the job makes no progress; 0 if it lost all its GPUs."""
    ran_s: float
    """How long the job made progress between its last update in the table and this move."""
    reason: str = ""
    """Why the job moves, if the policy did not choose it (a node was lost), or why it lost GPUs."""


TO_OTHERS, INSTEAD = "its slots went to other jobs", "other jobs got slots instead"
BY_POLICY = "the policy gives it fewer slots"


def with_reasons(moves: Sequence[Move]) -> list[Move]:
    """The moves of one decision; those that take GPUs from a job have the reason, if the moves show it."""
    taken = {gpu: move.row for move in moves for gpu in set(move.after).difference(move.before)}
    growing = {move.row for move in moves if len(move.after) > len(move.before)}

    def reason(move: Move) -> str:
        lost = set(move.before).difference(move.after)
        if move.reason or not lost:
            return move.reason
        if any(taken.get(gpu, move.row) != move.row for gpu in lost):
            return TO_OTHERS
        if growing - {move.row}:
            return INSTEAD
        return BY_POLICY if len(move.after) < len(move.before) else ""

    return [move._replace(reason=reason(move)) for move in moves]


class Board:
    """Keeps the active jobs and the GPUs they hold, and carries out decisions."""

    def __init__(
        self, cluster: Cluster, placer: str, pause_of: PauseOf, jobs: Sequence[JobSpec] = ()
    ) -> None:
        """`jobs`, in order of submission, are known in advance: job i is in row i. A live board has none."""
        self.base = cluster
        """The cluster, before reservations take their GPUs out of it."""
        self.calendar = NO_RESERVATIONS
        self.reserved: Held = {}
        """By name of a reservation: the GPUs that it holds now."""
        self.cluster = cluster
        """The cluster that jobs can be given: `base` without what is reserved now."""
        self.placer: Placer = make_placer(placer, cluster)
        self.table = JobTable(jobs or [_EMPTY] * _FIRST_ROWS)
        self._replicas = bool((self.table.per_replica > 1).any())
        """Whether there was a job whose GPUs come in replicas."""
        self._pause_of = pause_of
        self._active = np.empty(len(self.table), dtype=np.int64)
        self._numbers = np.empty(len(self.table), dtype=np.int64)
        """The numbers of the jobs in `_active`, in the same order."""
        self._count = 0
        self._next_number = len(jobs)
        self._free_rows = [] if jobs else list(reversed(range(_FIRST_ROWS)))
        self._node_counts: dict[int, IntArray] = {}
        """By row: GPUs per node in the last decision of a policy that names nodes, for jobs that hold any."""
        self._lent: dict[int, int] = {}
        """By row: how many GPUs of the job's placement are lent, by the last decision."""
        self._losses: dict[int, tuple[Placement, str]] = {}
        """By row: the placement before the job lost GPUs, and why. Emptied by the next decision."""

    # -- who is active -----------------------------------------------------------------------------------

    @property
    def active(self) -> IntArray:
        """Rows of the active jobs, oldest first (a view: copy it to keep it)."""
        return self._active[: self._count]

    def add(self, spec: JobSpec) -> int:
        """Enter a new job, which is now the youngest; returns its row."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.table.write(row, spec, self._next_number)
        self._replicas = self._replicas or spec.gpus_per_replica > 1
        self._next_number += 1
        self.activate(row)
        return row

    @property
    def next_number(self) -> int:
        """The number that the next job will get."""
        return self._next_number

    def activate(self, row: int) -> None:
        """Show the job in this row to the policy from now on. It must be younger than all active jobs."""
        self._active[self._count] = row
        self._numbers[self._count] = self.table.number[row]
        self._count += 1

    def deactivate(self, row: int) -> None:
        """Take a job that ended or was refused out of the snapshots, and free its GPUs."""
        table, count = self.table, self._count
        if table.placement[row]:
            self.placer.place({row: 0})
            table.placement[row] = ()
        table.gpus[row] = 0
        table.rate[row] = 0.0
        self._node_counts.pop(row, None)
        self._losses.pop(row, None)
        index = self._numbers[:count].searchsorted(table.number[row])
        for listed in (self._active, self._numbers):
            listed[index : count - 1] = listed[index + 1 : count]
        self._count -= 1

    def remove(self, row: int) -> None:
        """Deactivate a job and let another have its row."""
        self.deactivate(row)
        self.table.specs[row] = _EMPTY
        self.table.belief[row] = None
        self._free_rows.append(row)

    def _grow(self) -> None:
        old = len(self.table)
        self.table.grow([_EMPTY] * old)
        self._active = np.concatenate([self._active, np.empty(old, dtype=np.int64)])
        self._numbers = np.concatenate([self._numbers, np.empty(old, dtype=np.int64)])
        self._free_rows = list(range(2 * old - 1, old - 1, -1))

    # -- what policies see -------------------------------------------------------------------------------

    def snapshot(
        self,
        now_s: float,
        curves: Curves | Callable[[], Curves],
        resize_cost_s: float,
        start_cost_s: float,
    ) -> Snapshot:
        """All active jobs at this moment, as a policy sees them."""
        rows, numbers = self.active.copy(), self._numbers[: self._count].copy()
        ahead = self.ahead(now_s) if self.calendar else None
        costs = (resize_cost_s, start_cost_s)
        return Snapshot(now_s, self.cluster, self.table, rows, curves, *costs, numbers, ahead)

    def ahead(self, now_s: float) -> SlotsAhead:
        """The GPUs that promises may count on, from now until all deadlines at least."""
        deadlines_s = self.table.deadline_s[self.active]
        last_s = float(deadlines_s[np.isfinite(deadlines_s)].max(initial=now_s))
        return self.calendar.ahead(self.base, now_s, last_s)

    # -- decisions ---------------------------------------------------------------------------------------

    def carry_out(
        self, snapshot: Snapshot, decision: Decision, more: Mapping[int, int] | None = None
    ) -> list[Move]:
        """Carry out a policy's decision on a snapshot; returns the moves.

        `more` maps rows of jobs outside the snapshot to the GPUs they are to have. If the policy names nodes,
        its jobs are placed there first, and the jobs in `more` that grow get GPUs from the rest.
        """
        rows, now_s = snapshot.rows, snapshot.now_s
        lent = [] if decision.lent is None else decision.lent.tolist()
        self._lent = {row: count for row, count in zip(rows.tolist(), lent) if count}
        more = more or {}
        if self._replicas and len(rows):
            decision = in_replicas(decision, snapshot.per_replica, snapshot.max_gpus)
        if decision.per_node is not None:
            by_node = {
                int(rows[i]): decision.per_node[i]
                for i in range(len(rows))
                if self._other_nodes(int(rows[i]), decision.per_node[i])
            }
            smaller = {row: gpus for row, gpus in more.items() if gpus < self.table.gpus[row]}
            moved = self.placer.place(smaller) if smaller else {}
            moved |= self.placer.place_per_node(by_node) if by_node else {}
            larger = {row: gpus for row, gpus in more.items() if row not in smaller}
            moved |= self.placer.place(larger) if larger else {}
        else:
            kinds, changes = decision.gpu_types, decision.gpus != snapshot.gpus
            if kinds is not None:
                changes |= self._on_other_types(snapshot, kinds)
            changed = changes.nonzero()[0]
            if decision.order is not None:
                rank = np.empty(len(rows), dtype=np.int64)
                rank[decision.order] = np.arange(len(rows))
                changed = changed[np.argsort(rank[changed], kind="stable")]
            wanted = dict(more) | dict(zip(rows[changed].tolist(), decision.gpus[changed].tolist()))
            types = None if kinds is None else {int(rows[i]): kinds[i] for i in changed.tolist()}
            stay = () if decision.stay is None else rows[decision.stay].tolist()
            self.placer.stay = frozenset(stay)
            moved = self.placer.place(wanted, types) if wanted else {}
        for row in self._losses:  # a job that the policy leaves with its remaining GPUs moves too
            moved.setdefault(row, self.table.placement[row])
        return [
            self._move(row, placement, now_s)
            for row, placement in moved.items()
            if placement != self.table.placement[row] or row in self._losses
        ]

    def release(self, row: int, now_s: float) -> None:
        """Enter that a job has given all its GPUs back without a decision, as after a pause."""
        if self.table.placement[row]:
            self.placer.place({row: 0})
            self.table.settle(row, now_s)
            self.table.placement[row], self.table.gpus[row], self.table.rate[row] = (), 0, 0.0
        self._node_counts.pop(row, None)
        self._losses.pop(row, None)

    def set_cluster(self, cluster: Cluster, now_s: float, reason: str = "") -> None:
        """Use this cluster from now on, after nodes were lost, came back or were added.

        A job on a lost node keeps its remaining GPUs. It moves with the next decision, which usually gives it
        other GPUs, so that the loss and the decision cost it one pause and not two.
        """
        self.base = cluster
        self.reserved = self.held_by(cluster, self.calendar.at(now_s))
        self._use(cluster.without(self._reserved_gpus()), now_s, reason)

    def reserve(self, calendar: Calendar, now_s: float) -> bool:
        """Give reservations the GPUs that they want now; returns whether that changed anything.

        Jobs lose GPUs as with a node: they move with the next decision.
        """
        self.calendar = calendar
        wanting = calendar.at(now_s)
        if not wanting and not self.reserved:
            return False
        before, self.reserved = self.reserved, self.held_by(self.base, wanting)
        if self.reserved == before:
            return False
        names = [name for name, gpus in self.reserved.items() if gpus - before.get(name, frozenset())]
        reason = f"slots are reserved for {', '.join(names)}" if names else ""
        self._use(self.base.without(self._reserved_gpus()), now_s, reason)
        return True

    def _reserved_gpus(self) -> frozenset[int]:
        return frozenset[int]().union(*self.reserved.values())

    def held_by(self, cluster: Cluster, wanting: Sequence[Reservation]) -> Held:
        """The GPUs of a cluster that these reservations would hold, if they were given them now."""
        if not wanting:
            return {}
        deadline_s = self.table.deadline_s[self.active]
        sure = np.flatnonzero(np.isfinite(deadline_s))
        sure = sure[np.argsort(-deadline_s[sure], kind="stable")]  # the one with the most time left first
        held = self.table.placement
        others = [held[row] for row in self.active[np.isinf(deadline_s)].tolist()]
        promised = [
            (held[row], min(self._lent.get(row, 0), len(held[row])))
            for row in self.active[sure].tolist()
            if held[row]
        ]
        return hold(cluster, wanting, self.reserved, others, promised)

    def _use(self, cluster: Cluster, now_s: float, reason: str) -> None:
        """Give jobs the GPUs of this cluster from now on."""
        self.cluster = cluster
        for row, left in self.placer.set_cluster(cluster, keep_survivors=True).items():
            self._losses.setdefault(row, (self.table.placement[row], reason))
            self._node_counts.pop(row, None)
            lost = len(self.table.placement[row]) - len(left)
            self._lent[row] = max(self._lent.get(row, 0) - lost, 0)
            self.table.settle(row, now_s)
            self.table.placement[row], self.table.gpus[row] = left, len(left)

    def set_placer(self, name: str) -> None:
        """Use another placer from now on; all jobs keep their GPUs until the next decision."""
        placer = make_placer(name, self.cluster)
        for row in self.active.tolist():
            if self.table.placement[row]:
                placer.adopt(row, self.table.placement[row])
        self.placer = placer
        self._node_counts.clear()

    def adopt(self, row: int, placement: Placement, started_s: float) -> bool:
        """Enter the GPUs that a job held before a restart; False if they are gone or another job's."""
        try:
            self.placer.adopt(row, placement)
        except (NoRoom, InputError):
            return False
        table = self.table
        table.placement[row], table.gpus[row] = placement, len(placement)
        table.first_start_s[row] = table.last_start_s[row] = started_s
        return True

    def _on_other_types(self, snapshot: Snapshot, kinds: Sequence[str]) -> BoolArray:
        """For each job whether it holds GPUs of another type than in the decision."""
        nodes = self.cluster.nodes
        return np.array(
            [
                any(nodes[node].gpu_type != kind for node in self.cluster.nodes_of(placement))
                for placement, kind in zip(snapshot.placements, kinds)
            ],
            dtype=np.bool_,
        )

    def _other_nodes(self, row: int, counts: IntArray) -> bool:
        """Whether a policy that names nodes names other ones for this job than in its last decision."""
        last = self._node_counts.get(row)
        if not counts.any():
            self._node_counts.pop(row, None)
            return last is not None
        if last is not None and np.array_equal(last, counts):
            return False
        self._node_counts[row] = counts.copy()
        return True

    def _move(self, row: int, placement: Placement, now_s: float) -> Move:
        """Enter a job's new GPUs, or that it has none now, and what that costs it."""
        table, kept = self.table, self.table.placement[row]
        before, reason = self._losses.pop(row, (kept, ""))
        ran_s = self.table.settle(row, now_s)
        table.placement[row], table.gpus[row] = placement, len(placement)
        if not placement:
            table.rate[row] = 0.0
            return Move(row, before, placement, 0.0, ran_s, reason)
        pause_s = self._pause_of(row, len(kept), len(placement))
        # A resize during start-up does not cut it short.
        table.paused_until_s[row] = max(float(table.paused_until_s[row]), now_s + pause_s)
        if math.isinf(table.first_start_s[row]):
            table.first_start_s[row] = now_s
        else:
            table.resizes[row] += 1
            table.returns[row] += not before
        if not kept:
            table.last_start_s[row] = now_s
        return Move(row, before, placement, pause_s, ran_s, reason)
