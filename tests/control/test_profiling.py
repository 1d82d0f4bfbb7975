"""Which profiling runs begin, on how many slots, and what is answered when one never could."""

from __future__ import annotations

from dataclasses import replace

from swell.control.knowledge import Knowledge
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.scheduler import Scheduler
from swell.domain import Cluster


def _record(job_id: str, **more: object) -> JobRecord:
    request = JobRequest(name="a", script="train.py", deadline_s=1000.0, **more)  # type: ignore[arg-type]
    unanswered = Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None))
    return JobRecord(
        job_id=job_id, owner="ann", request=request, submitted_s=0.0, phase=Phase.QUEUED, promise=unanswered
    )


class _Desk:
    """A scheduler and the records it is asked with."""

    def __init__(self, slots: int) -> None:
        self.scheduler = Scheduler("elasticflow", Cluster.parse(f"1x{slots}"))
        self.records: dict[str, JobRecord] = {}
        self.known: dict[str, Knowledge] = {}

    def add(self, record: JobRecord, *, probe: bool = True) -> None:
        self.records[record.job_id], self.known[record.job_id] = record, Knowledge("same")
        self.scheduler.add(record)
        if probe:
            self.scheduler.probe(record, 0.0)

    def decide(self) -> dict[str, int]:
        changed, _ = self.scheduler.decide(self.records, self.known, 1.0)
        for job_id, placement in changed.items():
            phase = Phase.RUNNING if placement else Phase.QUEUED
            self.records[job_id] = replace(self.records[job_id], wanted=placement, phase=phase)
        return {job_id: len(placement) for job_id, placement in changed.items()}


def test_a_profiling_run_takes_all_free_slots_and_shrinks_by_halves() -> None:
    desk = _Desk(4)
    desk.add(_record("a"))
    assert desk.decide() == {"a": 4}
    sizes = [4]
    while not desk.scheduler.probe_step_over("a", 2.0):
        sizes += desk.decide().values()
    assert sizes == [4, 2, 1]


def test_profiling_runs_wait_for_each_other() -> None:
    desk = _Desk(4)
    desk.add(_record("a"))
    desk.add(_record("b"))
    assert desk.decide() == {"a": 4}


def test_bounds_hold_in_a_profiling_run() -> None:
    desk = _Desk(8)
    desk.add(_record("a", min_workers=2, max_workers=4))
    assert desk.decide() == {"a": 4}
    assert desk.scheduler.probes["a"].sizes == [4, 2]


def test_a_profiling_run_takes_a_slot_from_those_without_a_promise_only() -> None:
    for guaranteed_s, sizes in ((None, {"free": 1, "a": 1}), (500.0, {})):
        desk = _Desk(2)
        kept = Promise(admitted=True, guaranteed_s=guaranteed_s, estimate=Estimate(finish_s=None))
        free = replace(_record("free"), promise=kept, wanted=(0, 1), phase=Phase.RUNNING)
        if guaranteed_s is None:
            free = replace(free, request=replace(free.request, deadline_s=None))
        desk.add(free, probe=False)
        desk.add(_record("a"))
        given = desk.decide()
        assert {n: given[n] for n in sizes} == sizes
        assert ("a" in given) == (guaranteed_s is None)


def test_a_deadline_counts_only_once_it_was_promised() -> None:
    desk = _Desk(2)
    desk.add(_record("a"), probe=False)
    assert desk.scheduler._deadline(desk.records["a"]) is None


def test_slots_in_other_hands_are_neither_profiled_on_nor_given_away() -> None:
    desk = _Desk(4)
    desk.scheduler.set_cluster(desk.scheduler.cluster.without([0, 3]), 0.0)
    desk.add(_record("a"))
    desk.add(_record("b"), probe=False)
    assert desk.decide() == {"a": 2}
    assert desk.records["a"].wanted == (1, 2)
    desk.scheduler.set_cluster(Cluster.parse("1x4"), 2.0)
    assert desk.decide() == {"b": 1}
    assert set(desk.records["b"].wanted) < {0, 3}


def test_a_job_that_nobody_knows_gets_as_many_slots_as_it_needs_at_least() -> None:
    desk = _Desk(8)
    record = _record("a", min_workers=4)
    desk.add(replace(record, request=replace(record.request, deadline_s=None)), probe=False)
    assert desk.decide() == {"a": 4}
