"""The board: the table of jobs, the placer's ledger, and the one way to carry out a decision.

Whoever runs the clock (the simulator or the control plane) tells the board which jobs are active, asks it for
a snapshot, and hands it the policy's decision. The board places the shares, keeps every number of the table
that a policy may read, and answers with the *moves*: which job goes from which GPUs to which, and how long it
stands still. To carry the moves out, in true or in virtual time, is up to the caller.

The rules of the table, which policies and callers rely on:
- a row belongs to one active job; it is given to another only after `remove`;
- `number` rises in order of submission and is never used twice;
- `active` lists rows by ascending number, so snapshots show the oldest job first;
- `gpus[row] == len(placement[row])`, and the placer's ledger says the same;
- `attained_gpu_s`, `run_s` and `left` are as of `since_s`; nothing is done before `paused_until_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from swell.domain import Cluster, InputError, IntArray, JobSpec, Placement
from swell.perf.curves import Curves
from swell.placement import NoRoom, Placer, make_placer
from swell.policies import Decision, JobTable, Snapshot

PauseOf = Callable[[int, int, int], float]
"""Seconds that the job in a row stands still when it goes from so many GPUs to so many (from 0: a start)."""

_EMPTY = JobSpec(job_id="-", submit_s=0.0, model="-", batch_size=1)
_FIRST_ROWS = 64


class Move(NamedTuple):
    """One job's change of GPUs."""

    row: int
    before: Placement
    after: Placement
    pause_s: float
    """How long it makes no progress; 0 for a job that lost all its GPUs."""
    ran_s: float
    """How long it made progress since its numbers were last brought up to date."""
    reason: str = ""
    """Why, if it was not the policy's choice alone."""


class Board:
    """Who is active, who holds what, and how a decision is carried out."""

    def __init__(
        self, cluster: Cluster, placer: str, pause_of: PauseOf, jobs: Sequence[JobSpec] = ()
    ) -> None:
        """`jobs` are known from the start, in order of submission: job i is in row i until it is removed."""
        self.cluster = cluster
        self.placer: Placer = make_placer(placer, cluster)
        self.table = JobTable(jobs or [_EMPTY] * _FIRST_ROWS)
        self._pause_of = pause_of
        self._active = np.empty(len(self.table), dtype=np.int64)
        self._count = 0
        self._next_number = len(jobs)
        self._free_rows = [] if jobs else list(range(_FIRST_ROWS - 1, -1, -1))
        self._node_counts: dict[int, IntArray] = {}
        """GPUs per node as a policy that names nodes last asked for them, for jobs that hold some."""
        self._losses: dict[int, tuple[Placement, str]] = {}
        """What jobs held before they lost GPUs, and why, until the next decision is carried out."""

    # -- who is active -----------------------------------------------------------------------------------

    @property
    def active(self) -> IntArray:
        """Rows of the active jobs, oldest first (a view: copy it to keep it)."""
        return self._active[: self._count]

    def add(self, spec: JobSpec) -> int:
        """Give a new job a row; the youngest of all from now on. Returns the row."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.table.write(row, spec, self._next_number)
        self._next_number += 1
        self.activate(row)
        return row

    @property
    def next_number(self) -> int:
        """The number that the next job will get."""
        return self._next_number

    def activate(self, row: int) -> None:
        """The job in this row, younger than all that are active, is active from now on."""
        self._active[self._count] = row
        self._count += 1

    def deactivate(self, row: int) -> None:
        """The job ended or was refused: it gives its GPUs back and is in no snapshot any more."""
        table, active = self.table, self.active
        if table.placement[row]:
            self.placer.place({row: 0})
            table.placement[row] = ()
        table.gpus[row] = 0
        table.rate[row] = 0.0
        self._node_counts.pop(row, None)
        self._losses.pop(row, None)
        index = int(np.searchsorted(table.number[active], table.number[row]))
        active[index:-1] = active[index + 1 :].copy()
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
        self._free_rows = list(range(2 * old - 1, old - 1, -1))

    # -- what policies see -------------------------------------------------------------------------------

    def snapshot(
        self,
        now_s: float,
        curves: Curves | Callable[[], Curves],
        resize_cost_s: float,
        start_cost_s: float,
        *,
        rows: IntArray | None = None,
        cluster: Cluster | None = None,
    ) -> Snapshot:
        """This moment for a policy; `rows` (oldest first) and `cluster` to show it a part only."""
        shown = self.active.copy() if rows is None else rows
        return Snapshot(
            now_s, cluster or self.cluster, self.table, shown, curves, resize_cost_s, start_cost_s
        )

    # -- decisions ---------------------------------------------------------------------------------------

    def carry_out(
        self, snapshot: Snapshot, decision: Decision, more: Mapping[int, int] | None = None
    ) -> list[Move]:
        """Do what a policy decided on a snapshot; `more` gives GPUs to rows that the policy did not see.

        Where the policy names nodes, those who are not its business are placed around what it named.
        """
        rows, now_s = snapshot.rows, snapshot.now_s
        more = more or {}
        if decision.per_node is not None:
            changes = {
                int(rows[i]): decision.per_node[i]
                for i in range(len(rows))
                if self._other_nodes(int(rows[i]), decision.per_node[i])
            }
            smaller = {row: gpus for row, gpus in more.items() if gpus < self.table.gpus[row]}
            moved = self.placer.place(smaller) if smaller else {}
            moved |= self.placer.place_per_node(changes) if changes else {}
            larger = {row: gpus for row, gpus in more.items() if row not in smaller}
            moved |= self.placer.place(larger) if larger else {}
        else:
            changed = np.flatnonzero(decision.gpus != snapshot.gpus)
            if decision.order is not None:
                rank = np.empty(len(rows), dtype=np.int64)
                rank[decision.order] = np.arange(len(rows))
                changed = changed[np.argsort(rank[changed], kind="stable")]
            wanted = dict(more) | {int(rows[i]): int(decision.gpus[i]) for i in changed}
            moved = self.placer.place(wanted) if wanted else {}
        for row in self._losses:  # those whom the policy left with what they have
            moved.setdefault(row, self.table.placement[row])
        return [
            self._move(row, placement, now_s)
            for row, placement in moved.items()
            if placement != self.table.placement[row] or row in self._losses
        ]

    def set_cluster(self, cluster: Cluster, now_s: float, reason: str = "") -> None:
        """Follow nodes that were lost, came back or were added.

        A job that lost GPUs holds those it has left. What becomes of it is among the moves of the next
        decision: most find other GPUs in it.
        """
        self.cluster = cluster
        for row, left in self.placer.set_cluster(cluster, keep_survivors=True).items():
            self._losses.setdefault(row, (self.table.placement[row], reason))
            self._node_counts.pop(row, None)
            self.table.settle(row, now_s)
            self.table.placement[row], self.table.gpus[row] = left, len(left)

    def set_placer(self, name: str) -> None:
        """Place by other rules from now on; whoever holds GPUs keeps them until the next decision."""
        placer = make_placer(name, self.cluster)
        for row in self.active.tolist():
            if self.table.placement[row]:
                placer.adopt(row, self.table.placement[row])
        self.placer = placer
        self._node_counts.clear()

    def adopt(self, row: int, placement: Placement, started_s: float) -> bool:
        """Enter what a job holds already, as after a restart; False if that is not to be had any more."""
        try:
            self.placer.adopt(row, placement)
        except (NoRoom, InputError):
            return False
        table = self.table
        table.placement[row], table.gpus[row] = placement, len(placement)
        table.first_start_s[row] = table.last_start_s[row] = started_s
        return True

    def _other_nodes(self, row: int, counts: IntArray) -> bool:
        """Whether a policy that names nodes wants others for a job than it last asked for."""
        last = self._node_counts.get(row)
        if not counts.any():
            self._node_counts.pop(row, None)
            return last is not None
        if last is not None and np.array_equal(last, counts):
            return False
        self._node_counts[row] = counts.copy()
        return True

    def _move(self, row: int, placement: Placement, now_s: float) -> Move:
        """Enter that a job has other GPUs, or none any more."""
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
        if not kept:
            table.last_start_s[row] = now_s
        return Move(row, before, placement, pause_s, ran_s, reason)
