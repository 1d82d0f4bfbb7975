"""From records and knowledge to wanted placements, with the same policies and placers as the simulator.

The scheduler owns the live table and the placer's ledger. It is asked with the records of the active jobs and
answers with what each should have; it starts nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from swell.control.knowledge import Knowledge
from swell.control.ledger import Ledger
from swell.control.model import JobRecord, Phase
from swell.domain import Cluster, InputError, IntArray, JobSpec, Placement
from swell.perf.curves import Curves
from swell.placement import FREE, NoRoom, Placer, make_placer
from swell.policies import Admission, Policy, Snapshot, make_policy

UNKNOWN_WORK = 1e9
"""Iterations of a job that has not said how long it is: long, so that nobody waits for it."""


_DECIDED = (Phase.QUEUED, Phase.RUNNING)
"""Phases in which the policy has a say."""


@dataclass(slots=True)
class Probe:
    """A short profiling run: over-allocate, then shrink, a few steps at each size (CoDDL)."""

    sizes: list[int]
    """Sizes still to be measured, the present one first; none before it has slots."""
    asked_s: float
    since_s: float
    """When the present size began, or the job began to train."""
    least: int
    most: int | None

    @property
    def size(self) -> int:
        """Slots it holds, or is to get, now."""
        return self.sizes[0] if self.sizes else 0


class Scheduler:
    """Decides who gets which slots."""

    def __init__(self, policy: str, cluster: Cluster) -> None:
        self.policy_text = policy
        self.policy: Policy = make_policy(policy)
        self.cluster = cluster
        self.ledger = Ledger()
        self.placer: Placer = make_placer(self.policy.placer, cluster)
        self.probes: dict[str, Probe] = {}

    # -- what is there -----------------------------------------------------------------------------------

    def set_policy(self, text: str, records: Iterable[JobRecord]) -> None:
        """Switch to another policy; what runs stays where it is until that policy decides otherwise."""
        policy = make_policy(text)
        placer = make_placer(policy.placer, self.cluster)
        self.policy, self.policy_text, self.placer = policy, text, placer
        for record in records:
            if record.wanted:
                self._adopt(record)

    def set_cluster(self, cluster: Cluster, now_s: float) -> dict[str, Placement]:
        """Follow the nodes; returns what is left to the jobs that lost slots."""
        if cluster == self.cluster:
            return {}
        self.cluster = cluster
        names = {row: job_id for job_id, row in self.ledger.rows.items()}
        hurt = self.placer.set_cluster(cluster, keep_survivors=True)
        for row, placement in hurt.items():
            self._book(row, placement, now_s)
        return {names[row]: placement for row, placement in hurt.items() if row in names}

    def add(self, record: JobRecord) -> bool:
        """A job is active. False if slots it had are no more, or another's."""
        request = record.request
        self.ledger.add(
            JobSpec(
                job_id=record.job_id,
                submit_s=record.submitted_s,
                model=record.job_id,
                batch_size=1,
                gpus=request.workers,
                deadline_s=self._deadline(record),
                min_gpus=request.min_workers,
                max_gpus=request.max_workers,
            )
        )
        return not record.wanted or self._adopt(record)

    def remove(self, job_id: str) -> None:
        """A job is active no more."""
        if job_id in self.ledger.rows:
            self.placer.place({self.ledger.rows[job_id]: 0})
            self.ledger.remove(job_id)
        self.probes.pop(job_id, None)

    def _adopt(self, record: JobRecord) -> bool:
        """Put a job back into the books after a restart, on the slots it has, if they are still there."""
        row = self.ledger.rows.get(record.job_id)
        if row is None:
            return False
        try:
            self.placer.adopt(row, record.wanted)
        except (NoRoom, InputError):
            return False
        table = self.ledger.table
        table.gpus[row] = len(record.wanted)
        table.placement[row] = record.wanted
        table.first_start_s[row] = table.last_start_s[row] = record.started_s or record.submitted_s
        return True

    # -- decisions ---------------------------------------------------------------------------------------

    def admit(
        self,
        record: JobRecord,
        records: Mapping[str, JobRecord],
        known: Mapping[str, Knowledge],
        now_s: float,
    ) -> Admission:
        """May this job come in? It must have been added."""
        snapshot = self._snapshot(records, known, now_s, cautious=True)
        index = int(np.flatnonzero(snapshot.rows == self.ledger.rows[record.job_id])[0])
        order = np.concatenate([np.delete(snapshot.rows, index), snapshot.rows[index : index + 1]])
        return self.policy.admit(snapshot.with_rows(order), len(order) - 1)

    def decide(
        self, records: Mapping[str, JobRecord], known: Mapping[str, Knowledge], now_s: float
    ) -> tuple[dict[str, Placement], float]:
        """Placements that should change, and when the policy wants to be asked again if nothing happens."""
        self._begin_probes(records, now_s)
        wanted: dict[int, int] = {}
        for job_id, probe in self.probes.items():
            if job_id in self.ledger.rows and probe.size:
                wanted[self.ledger.rows[job_id]] = probe.size
        snapshot = self._snapshot(records, known, now_s)
        wake_s = np.inf
        table = self.ledger.table
        per_node: dict[int, IntArray] = {}
        if len(snapshot):
            decision = self.policy.allocate(snapshot)
            wake_s = self.policy.next_wakeup_s(snapshot, decision)
            for i, row in enumerate(snapshot.rows.tolist()):
                if decision.per_node is not None:
                    per_node[row] = decision.per_node[i]
                elif decision.gpus[i] != table.gpus[row]:
                    wanted[row] = int(decision.gpus[i])
        for row in self._waiting_rows(records):
            if table.gpus[row]:
                wanted[row] = 0
        self.ledger.decided()
        moved = self._place(wanted, per_node)
        names = {row: job_id for job_id, row in self.ledger.rows.items()}
        for row, placement in moved.items():
            self._book(row, placement, now_s)
        return {names[row]: p for row, p in moved.items() if row in names}, wake_s

    def _place(self, wanted: dict[int, int], per_node: dict[int, IntArray]) -> dict[int, Placement]:
        table = self.ledger.table
        changes = {row: gpus for row, gpus in wanted.items() if gpus != table.gpus[row]}
        # Shrink first: what is given back is there for whoever grows.
        shrink = {row: gpus for row, gpus in changes.items() if gpus < table.gpus[row]}
        moved = self.placer.place(shrink) if shrink else {}
        if per_node:
            moved |= self.placer.place_per_node(per_node)
        grow = {row: gpus for row, gpus in changes.items() if row not in shrink}
        if grow:
            moved |= self.placer.place(grow)
        return {row: p for row, p in moved.items() if p != table.placement[row]}

    def _book(self, row: int, placement: Placement, now_s: float) -> None:
        table = self.ledger.table
        held_s = now_s - table.since_s[row]
        table.attained_gpu_s[row] += table.gpus[row] * held_s
        table.run_s[row] += held_s if table.gpus[row] else 0.0
        table.since_s[row] = now_s
        if placement and not table.placement[row]:
            table.last_start_s[row] = now_s
            table.first_start_s[row] = min(table.first_start_s[row], now_s)
        elif placement:
            table.resizes[row] += 1
        table.placement[row], table.gpus[row] = placement, len(placement)

    # -- the snapshot ------------------------------------------------------------------------------------

    def _snapshot(
        self,
        records: Mapping[str, JobRecord],
        known: Mapping[str, Knowledge],
        now_s: float,
        *,
        cautious: bool = False,
    ) -> Snapshot:
        """The jobs the policy decides on: not those that are paused or on a profiling run."""
        ledger, table = self.ledger, self.ledger.table
        cluster = self.cluster.without(self._probed())
        widest = max(cluster.capacity, 1)
        rows, jobs = [], []
        for row in ledger.active().tolist():
            job_id = table.specs[row].job_id
            record = records[job_id]
            if record.phase in _DECIDED and job_id not in self.probes:
                rows.append(row)
                jobs.append((record, known[job_id]))
        # Column by column: there may be thousands of jobs, and people wait for the answer.
        active = np.array(rows, dtype=np.int64)
        rates = np.tile(np.arange(widest + 1, dtype=np.float64), (max(len(rows), 1), 1))
        for i, (_, knowledge) in enumerate(jobs):
            table.belief[rows[i]] = knowledge.belief
            if knowledge.belief is not None:
                rates[i] = knowledge.curve(widest, cluster.gpus_per_node, cautious=cautious)
        table.curve[active] = np.arange(len(rows))
        table.left[active] = [_left(record, knowledge) for record, knowledge in jobs]
        table.rate[active] = 0.0
        held_s = now_s - table.since_s[active]
        table.attained_gpu_s[active] += table.gpus[active] * held_s
        table.run_s[active] += np.where(table.gpus[active] > 0, held_s, 0.0)
        table.since_s[active] = now_s
        # Its last step must be done a little before: processes take their time to end.
        table.deadline_s[active] = [(self._deadline(r) or np.inf) - knows.closing_s for r, knows in jobs]
        table.min_gpus[active] = [record.request.min_workers for record, _ in jobs]
        table.max_gpus[active] = [
            max(_most(knowledge, record.request.max_workers or widest), record.request.min_workers)
            for record, knowledge in jobs
        ]
        pause_s = max((knowledge.pause_s for _, knowledge in jobs), default=0.0)
        start_s = max((knowledge.startup_s for _, knowledge in jobs), default=0.0)
        return Snapshot(now_s, cluster, table, active, Curves(rates), pause_s, start_s)

    def _deadline(self, record: JobRecord) -> float | None:
        """The deadline the policy must keep: only once it has been promised."""
        deadline_s = record.request.deadline_s
        promised = record.promise.admitted and not record.promise.pending
        if deadline_s is None or deadline_s <= record.submitted_s or not promised:
            return None
        return deadline_s

    def _waiting_rows(self, records: Mapping[str, JobRecord]) -> list[int]:
        return [row for job_id, row in self.ledger.rows.items() if records[job_id].phase is Phase.PAUSED]

    # -- profiling runs ----------------------------------------------------------------------------------

    def probe(self, record: JobRecord, now_s: float) -> None:
        """Have a profiling run as soon as there are slots for one."""
        request = record.request
        self.probes[record.job_id] = Probe([], now_s, now_s, request.min_workers, request.max_workers)

    def _begin_probes(self, records: Mapping[str, JobRecord], now_s: float) -> None:
        """Begin the first profiling run that waits: on all free slots, else on one of jobs without a promise.

        One at a time: the next of the same kind may need none. Whoever was promised a finish loses nothing.
        """
        waiting = [job_id for job_id, probe in self.probes.items() if not probe.sizes]
        if not waiting or len(waiting) < len(self.probes):
            return
        probe = self.probes[waiting[0]]
        free = int(self.placer.occupancy.free_gpus)
        yielding = sum(
            len(r.wanted)
            for r in records.values()
            if r.promise.guaranteed_s is None and r.job_id != waiting[0]
        )
        first = max(free, probe.least)
        if first > free + yielding:
            return
        first = min(first, probe.most or first)
        halvings = [1 << i for i in range(first.bit_length() - 1, -1, -1)]
        probe.sizes = [size for size in halvings if size >= probe.least] or [probe.least]
        probe.since_s = now_s

    def probe_step_over(self, job_id: str, now_s: float) -> bool:
        """The present size has been measured. True if that was the last."""
        probe = self.probes[job_id]
        probe.sizes.pop(0)
        probe.since_s = now_s
        if probe.sizes:
            return False
        del self.probes[job_id]
        return True

    def _probed(self) -> list[int]:
        """Slots that profiling runs hold or are to get: not the policy's to give."""
        taken: list[int] = []
        missing = 0
        for job_id, probe in self.probes.items():
            row = self.ledger.rows.get(job_id)
            if row is None:
                continue
            held = self.ledger.table.placement[row][: probe.size]
            taken += held
            missing += probe.size - len(held)
        if missing:  # from the free ones first, on the emptiest nodes
            owner, free = self.placer.occupancy.owner, self.placer.occupancy.free
            node_of = self.cluster.node_of_gpu
            usable = [int(g) for g in np.flatnonzero(self.cluster.in_service) if g not in set(taken)]
            usable.sort(key=lambda g: (owner[g] != FREE, -int(free[node_of[g]]), g))
            taken += usable[:missing]
        return taken


def _left(record: JobRecord, knowledge: Knowledge) -> float:
    """Iterations still to be done, as far as is known."""
    of = record.of if record.of is not None else knowledge.of
    return UNKNOWN_WORK if of is None else max(of - record.done, 0.0)


def _most(knowledge: Knowledge, bound: int) -> int:
    """The exploration bound: twice the workers ever seen, unless history knows better."""
    if knowledge.belief is None or not knowledge.belief.known:
        return 1
    return max(knowledge.belief.max_gpus(bound), 1)


def check_fits(cluster: Cluster, min_workers: int) -> None:
    """Refuse a job that could never run here."""
    total = sum(node.gpus for node in cluster.nodes)
    if min_workers > total:
        raise InputError(
            f"min_workers must be at most {total}, the slots of this cluster, got {min_workers}",
            field="min_workers",
        )
