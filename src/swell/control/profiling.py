"""Profiling runs: a job with a deadline whose speed is unknown is measured before its deadline is decided.

As in CoDDL (AFS, NSDI'21) a run over-allocates and then shrinks: it begins on all free slots and halves them,
with a few steps at each size, so that the job's curve is known cheaply. There is one run at a time, because
after it the next job of the same kind may need none. Jobs with a guaranteed finish give up no slots for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swell.board import Board
from swell.control.book import Book
from swell.control.model import JobRecord, Phase
from swell.domain import Teams
from swell.placement import FREE
from swell.policies.by_user import NOTHING, Use

SIZE_LIMIT_S = 30.0
"""Longest that a run stays at one size, once the job trains, without steady steps."""
START_LIMIT_S = 120.0
"""Longest that a job may take to get slots and train its first step; then its deadline is refused. Where
nodes are rented, the time that they take to start comes on top."""


@dataclass(slots=True)
class ProfilingRun:
    """One job's profiling run."""

    replica: int
    """Workers of a replica: sizes are multiples of it."""
    least: int
    most: int | None
    asked_s: float
    since_s: float
    """When the job began to train at the present size."""
    sizes: list[int] | None = None
    """Sizes still to be measured, the present one first; None while the run waits for slots."""
    gpu_type: str = ""
    """The GPU type that the job is measured on; empty while the run waits for slots."""

    @property
    def size(self) -> int:
        """Slots that the job should have now; 0 while the run waits."""
        return self.sizes[0] if self.sizes else 0

    def next_size(self, now_s: float) -> bool:
        """Go on to the next size, since the present one has been measured; False if it was the last."""
        self.sizes, self.since_s = (self.sizes or [])[1:], now_s
        return bool(self.sizes)


class Profiling:
    """The profiling runs that are under way or wait for slots, oldest first."""

    def __init__(self) -> None:
        self.runs: dict[str, ProfilingRun] = {}
        self.start_limit_s = START_LIMIT_S

    def ask(self, record: JobRecord, now_s: float) -> None:
        """Have a job profiled as soon as there are slots for it."""
        request = record.request
        bounds = (request.workers_per_replica, request.min_workers, record.max_workers)
        self.runs[record.job_id] = ProfilingRun(*bounds, now_s, now_s)

    def bound(self, job_id: str, most: int) -> None:
        """Measure the job, if it has a run, with no more than `most` workers: it cannot use more."""
        run = self.runs.get(job_id)
        if run is not None:
            run.least, run.most = min(run.least, most), min(run.most or most, most)
            run.sizes = run.sizes and ([size for size in run.sizes if size <= most] or [most])

    def drop(self, job_id: str) -> None:
        """End the job's profiling run, if it has one."""
        self.runs.pop(job_id, None)

    def begin(
        self,
        records: Mapping[str, JobRecord],
        board: Board,
        now_s: float,
        quota: Callable[[str], int] = lambda _: sys.maxsize,
    ) -> None:
        """Begin the run that waits longest: on all free slots, else on slots of jobs without a guarantee.

        All these slots are of one GPU type, the one with the most free slots that has enough of them.
        `quota`: the most slots that a job's owner may use for a run; one without enough waits.
        """
        if not self.runs or any(run.sizes is not None for run in self.runs.values()):
            return
        allowed = ((job_id, run, quota(job_id)) for job_id, run in self.runs.items())
        job_id, run, most = next((one for one in allowed if one[2] >= one[1].least), ("", None, 0))
        if run is None:
            return
        others = (r for r in records.values() if r.promise.guaranteed_s is None and r.job_id != job_id)
        room = _room(board, [slot for other in others for slot in other.wanted])
        enough = [(free, kind) for kind, (free, yielding) in room.items() if free + yielding >= run.least]
        if not enough:
            return
        free, run.gpu_type = max(enough, key=lambda one: one[0])
        first = max(free, run.least)
        first = min(first, run.most or first, most)
        replicas = max(first // run.replica, 1)
        halvings = [run.replica << i for i in range(replicas.bit_length() - 1, -1, -1)]
        run.sizes = [size for size in halvings if size >= run.least] or [run.least]
        run.since_s = now_s

    def advance(self, book: Book, now_s: float) -> tuple[list[str], bool]:
        """Take the runs further; returns the jobs whose run is over, and whether any run changed its size."""
        over: list[str] = []
        changed = False
        for job_id, run in list(self.runs.items()):
            record = book.records[job_id]
            if record.phase not in (Phase.QUEUED, Phase.RUNNING):
                continue
            if run.sizes is None and book.known[job_id].source == "none":
                book.recall(job_id)  # another job of its kind may have been measured meanwhile
            knowledge = book.known[job_id]
            if knowledge.timings.seen:
                if run.size not in knowledge.timings.steady_with and now_s - run.since_s < SIZE_LIMIT_S:
                    continue
                done = not run.next_size(now_s)
            else:
                run.since_s = now_s
                done = knowledge.known or now_s - run.asked_s > self.start_limit_s
            changed = True
            if done:
                self.drop(job_id)
                over.append(job_id)
        return over, changed

    def begun(self, jobs: Container[str]) -> list[tuple[str, ProfilingRun]]:
        """Those of these jobs whose run has begun, with the run."""
        return [(job_id, run) for job_id, run in self.runs.items() if run.size and job_id in jobs]

    def shares(self, board: Board, rows: Mapping[str, int]) -> dict[int, int]:
        """The slots that each run should have, by the row of its job, as far as its GPU type has enough."""
        shares: dict[int, int] = {}
        nodes = list(zip(board.cluster.nodes, board.cluster.node_gpus.tolist()))
        for job_id, run in self.begun(rows):
            of_type = sum(gpus for node, gpus in nodes if node.gpu_type == run.gpu_type)
            free, row = of_type - sum(shares.values()), rows[job_id]
            shares[row] = min(run.size, free) if free >= board.table.min_gpus[row] else 0
        return shares

    def slots_by_team(self, records: Mapping[str, JobRecord], teams: Teams) -> dict[str, int]:
        """By team: the slots of its runs."""
        taken: dict[str, int] = {}
        for job_id, run in self.begun(records):
            team = teams.of(records[job_id].owner)
            taken[team] = taken.get(team, 0) + run.size
        return taken

    def use_by_user(self, records: Mapping[str, JobRecord], shown: Container[str]) -> dict[str, Use]:
        """By user: what runs of other jobs than those `shown` use."""
        used: dict[str, Use] = {}
        for job_id, run in self.begun(records):
            if job_id not in shown:
                owner = records[job_id].owner
                before = used.get(owner, NOTHING)
                used[owner] = Use(before.jobs + 1, before.slots + run.size)
        return used

    def reserved(self, board: Board, rows: Mapping[str, int]) -> list[int]:
        """Slots that runs hold or are about to get; the policy must not give them to other jobs."""
        taken: list[int] = []
        cluster, occupancy = board.cluster, board.placer.occupancy
        owner, free, node_of = occupancy.owner, occupancy.free, cluster.node_of_gpu
        for job_id, run in self.begun(rows):
            held = board.table.placement[rows[job_id]][: run.size]
            taken += held
            missing = run.size - len(held)
            if missing:  # from the free ones first, on the emptiest nodes
                mine = set(taken)
                usable = [
                    int(g)
                    for g in np.flatnonzero(cluster.in_service)
                    if g not in mine and cluster.nodes[node_of[g]].gpu_type == run.gpu_type
                ]
                usable.sort(key=lambda g: (owner[g] != FREE, -int(free[node_of[g]]), g))
                taken += usable[:missing]
        return taken


def _room(board: Board, yielding: Sequence[int]) -> dict[str, tuple[int, int]]:
    """By GPU type: how many slots are free, and how many of those `yielding` are of that type."""
    cluster, free = board.cluster, board.placer.occupancy.free
    yields = Counter(cluster.nodes[int(cluster.node_of_gpu[slot])].gpu_type for slot in yielding)
    return {
        kind: (
            sum(int(free[i]) for i, node in enumerate(cluster.nodes) if node.gpu_type == kind),
            yields[kind],
        )
        for kind in cluster.gpu_types
    }
