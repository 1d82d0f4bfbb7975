"""Made-up histories of many jobs, and books that keep them in tables whose rows are in order or in none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from swell.domain import Cluster, IntArray, JobSpec, Placement
from swell.perf.curves import Curves
from swell.placement import make_placer
from swell.policies import Admission, Decision, JobTable, Policy, Snapshot
from swell.policies.base import gives_promises

CLUSTER = Cluster.parse("32x8")
DECISIONS = 8


@dataclass(frozen=True)
class Arrival:
    """A job of the history. It leaves, done or not, before the decision `leaves`."""

    spec: JobSpec
    curve: int
    work: float
    leaves: int


@dataclass(frozen=True)
class History:
    """What happens, whatever is decided: who is there at first and who comes before each decision."""

    crowd: int
    arrivals: int
    curves: Curves
    steps: list[tuple[float, list[Arrival]]]


def make_history(crowd: int, arrivals: int, deadlines: float) -> History:
    """A history in which this part of the jobs has deadlines."""
    rng = np.random.default_rng(1)
    gpus = np.arange(CLUSTER.capacity + 1)
    bends = rng.uniform(0.3, 1.0, (6, 1))
    curves = Curves(gpus**bends / (1 + rng.uniform(0, 0.05, (6, 1)) * gpus))
    now_s, steps, made = 0.0, [], 0
    for step in range(DECISIONS):
        now_s += float(rng.choice([1.0, 60.0, 3600.0, 30_000.0]))
        newcomers = []
        for _ in range(arrivals if step else crowd):
            deadline_s = now_s + rng.uniform(10, 20_000) if rng.random() < deadlines else None
            spec = JobSpec(
                job_id=f"job-{made}",
                submit_s=now_s,
                model="made-up",
                batch_size=32,
                gpus=int(2 ** rng.integers(0, 5)),
                deadline_s=deadline_s,
                max_gpus=int(rng.choice([16, 64, 256])),
            )
            leaves = DECISIONS if rng.random() < 0.7 else step + int(rng.integers(1, DECISIONS))
            newcomers.append(Arrival(spec, int(rng.integers(6)), float(rng.uniform(1e3, 1e6)), leaves))
            made += 1
        steps.append((now_s, newcomers))
    return History(crowd, arrivals, curves, steps)


class Books:
    """A table and a placer for the jobs of a history. `rng` draws the rows; without it job i has row i."""

    def __init__(self, history: History, policy: Policy, rng: np.random.Generator | None) -> None:
        rows = history.crowd + (DECISIONS + 2) * history.arrivals  # room for jobs that only ask
        nobody = JobSpec(job_id="-", submit_s=0.0, model="-", batch_size=1)
        self.table = JobTable([nobody] * rows)
        self.table.number[:] = -1
        self.curves, self.policy, self.rng = history.curves, policy, rng
        self.placer = make_placer(policy.placer, CLUSTER)
        self.row: dict[int, int] = {}
        """Row of each active job by its number, in order of submission."""
        self.leaves: dict[int, int] = {}
        """The decision before which each active job leaves."""
        self.free = list(range(rows)) if rng is None else rng.permutation(rows).tolist()
        self.next_number = 0

    def add(self, job: Arrival) -> int:
        """Give a job a number, which is returned, and a row."""
        # Of the mixed rows one of the last to become free, so that rows are soon used again.
        row = self.free.pop(0 if self.rng is None else -int(self.rng.integers(1, min(5, len(self.free)) + 1)))
        fresh = JobTable([job.spec])
        for name, column in vars(self.table).items():
            column[row] = getattr(fresh, name)[0]
        self.table.number[row] = self.next_number
        self.table.curve[row], self.table.left[row] = job.curve, job.work
        self.row[self.next_number], self.leaves[self.next_number] = row, job.leaves
        self.next_number += 1
        return self.next_number - 1

    def remove(self, number: int) -> None:
        """Take a job out of the books."""
        del self.leaves[number]
        row = self.row.pop(number)
        self.placer.place({row: 0})
        if self.rng is not None:
            self.free.append(row)

    def let_in(self, now_s: float, job: Arrival) -> Admission | None:
        """Add a job if the policy does not refuse it; returns what the policy said, if it was asked."""
        number = self.add(job)
        if not gives_promises(self.policy):
            return None
        snapshot, index = self.snapshot(now_s), len(self.row) - 1
        answer = self.policy.admit(snapshot, index)
        if answer.admitted:
            self.policy.accepted(snapshot, index, answer)
        else:
            self.remove(number)
        return replace(answer, plan=None)

    def snapshot(self, now_s: float) -> Snapshot:
        """The active jobs, oldest first."""
        rows: IntArray = np.array(list(self.row.values()), dtype=np.int64)
        return Snapshot(now_s, CLUSTER, self.table, rows, self.curves, resize_cost_s=5.0)

    def pass_time(self, step: int, now_s: float) -> None:
        """Bring all active jobs up to this moment, and let those leave whose time has come."""
        moment, table = self.snapshot(now_s), self.table
        rows = moment.rows
        left, attained_gpu_s, run_s = moment.remaining, moment.attained_gpu_s, moment.run_s
        table.left[rows], table.attained_gpu_s[rows], table.run_s[rows] = left, attained_gpu_s, run_s
        np.maximum(table.left, 1.0, out=table.left)  # jobs leave when the history says so
        table.since_s[rows] = now_s
        for number in [n for n, last in self.leaves.items() if last == step]:
            self.remove(number)

    def carry_out(self, snapshot: Snapshot, decision: Decision) -> None:
        """Give the jobs their GPUs, as the simulator does."""
        table, rows, gpus = self.table, snapshot.rows, decision.gpus
        if decision.per_node is not None:
            moved = self.placer.place_per_node(dict(zip(rows.tolist(), decision.per_node)))
        else:
            order = decision.order if decision.order is not None else np.arange(len(rows))
            changed = order[gpus[order] != snapshot.gpus[order]]
            moved = self.placer.place({int(rows[i]): int(gpus[i]) for i in changed})
        for row, placement in moved.items():
            started = not table.placement[row] and placement
            if started and np.isfinite(table.first_start_s[row]):
                table.resizes[row] += 1
            if started:
                table.first_start_s[row] = min(table.first_start_s[row], snapshot.now_s)
                table.last_start_s[row] = snapshot.now_s
            table.placement[row] = placement
            table.gpus[row] = len(placement)
        table.rate[rows] = snapshot.rate_at(table.gpus[rows])

    def placements(self) -> list[Placement]:
        """The GPUs of each active job, oldest first."""
        return [self.table.placement[row] for row in self.row.values()]
