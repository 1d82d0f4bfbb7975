"""Which profiling runs begin, on how many slots, and what is answered when one never could."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.conftest import make_record

from swell.control import promises
from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.model import Estimate, JobRecord, Phase, Promise
from swell.control.scheduler import START_LIMIT_S, Scheduler
from swell.control.store import Store, connect
from swell.domain import Cluster

UNANSWERED = Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None))


def _record(job_id: str, **more: object) -> JobRecord:
    return make_record(job_id, request={"deadline_s": 1000.0} | more, submitted_s=0.0, promise=UNANSWERED)


class Desk:
    """A scheduler of a cluster with one node, and the book it decides by."""

    def __init__(self, store: Store, slots: int) -> None:
        self.book = Book(store)
        self.scheduler = Scheduler(self.book, "elasticflow", Cluster.parse(f"1x{slots}"))

    def add(self, record: JobRecord, *, profile: bool = True) -> None:
        self.book.add(record, Knowledge("same"))
        self.scheduler.add(record, 0.0)
        if profile:
            self.scheduler.profiling.ask(record, 0.0)

    def decide(self) -> dict[str, int]:
        moves = self.scheduler.decide(1.0)
        for job_id, move in moves:
            phase = Phase.RUNNING if move.after else Phase.QUEUED
            self.book.records[job_id] = replace(self.book.records[job_id], wanted=move.after, phase=phase)
        return {job_id: len(move.after) for job_id, move in moves}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


def test_a_profiling_run_takes_all_free_slots_and_shrinks_by_halves(store: Store) -> None:
    desk = Desk(store, 4)
    desk.add(_record("a"))
    assert desk.decide() == {"a": 4}
    run, sizes = desk.scheduler.profiling.runs["a"], [4]
    while run.next_size(2.0):
        sizes += desk.decide().values()
    assert sizes == [4, 2, 1]


def test_profiling_runs_wait_for_each_other(store: Store) -> None:
    desk = Desk(store, 4)
    desk.add(_record("a"))
    desk.add(_record("b"))
    assert desk.decide() == {"a": 4}


def test_bounds_hold_in_a_profiling_run(store: Store) -> None:
    desk = Desk(store, 8)
    desk.add(_record("a", min_workers=2, max_workers=4))
    assert desk.decide() == {"a": 4}
    assert desk.scheduler.profiling.runs["a"].sizes == [4, 2]


@pytest.mark.parametrize("guaranteed_s", [None, 500.0])
def test_a_profiling_run_takes_a_slot_from_those_without_a_promise_only(
    store: Store, guaranteed_s: float | None
) -> None:
    desk = Desk(store, 2)
    kept = Promise(admitted=True, guaranteed_s=guaranteed_s, estimate=Estimate(finish_s=None))
    other = replace(_record("other"), promise=kept, wanted=(0, 1), phase=Phase.RUNNING)
    if guaranteed_s is None:
        other = replace(other, request=replace(other.request, deadline_s=None))
    desk.add(other, profile=False)
    desk.add(_record("a"))
    given = desk.decide()
    assert given.get("a") == (1 if guaranteed_s is None else None)
    assert guaranteed_s is not None or given["other"] == 1


def test_a_job_that_never_got_a_slot_is_told_so(store: Store) -> None:
    desk = Desk(store, 1)
    desk.add(_record("a"))
    assert desk.scheduler.profiling.advance(desk.book, START_LIMIT_S - 1) == ([], True)
    over, _ = desk.scheduler.profiling.advance(desk.book, START_LIMIT_S + 1)
    assert over == ["a"]
    record, knowledge = desk.book.records["a"], desk.book.known["a"]
    answer, asked = promises.after_profiling(record, knowledge, desk.scheduler, 200.0)
    assert (answer.admitted, answer.reason, asked) == (False, promises.NO_ROOM, None)


def test_a_job_whose_kind_became_known_meanwhile_needs_no_profiling(store: Store) -> None:
    desk = Desk(store, 1)
    desk.add(_record("a"))
    earlier = {"params": [0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0], "of": 100.0, "batch_size": 8}
    store.remember("same", 0.0, earlier)
    over, _ = desk.scheduler.profiling.advance(desk.book, 1.0)
    assert over == ["a"]
    assert desk.book.known["a"].source == "history"


def test_a_deadline_counts_only_once_it_was_promised(store: Store) -> None:
    desk = Desk(store, 2)
    desk.add(_record("a"), profile=False)
    desk.decide()
    table, row = desk.scheduler.board.table, desk.scheduler.roster.rows["a"]
    assert table.deadline_s[row] == float("inf")
    promised = replace(UNANSWERED, pending=False, guaranteed_s=1000.0)
    desk.book.records["a"] = replace(desk.book.records["a"], promise=promised)
    desk.decide()
    assert table.deadline_s[row] == 1000.0 - desk.book.known["a"].closing_s


def test_slots_in_other_hands_are_neither_profiled_on_nor_given_away(store: Store) -> None:
    desk = Desk(store, 4)
    desk.scheduler.set_cluster(desk.scheduler.cluster.without([0, 3]), 0.0)
    desk.add(_record("a"))
    desk.add(_record("b"), profile=False)
    assert desk.decide() == {"a": 2}
    assert desk.book.records["a"].wanted == (1, 2)
    desk.scheduler.set_cluster(Cluster.parse("1x4"), 2.0)
    assert desk.decide() == {"b": 1}
    assert set(desk.book.records["b"].wanted) < {0, 3}


def test_a_job_that_nobody_knows_gets_as_many_slots_as_it_needs_at_least(store: Store) -> None:
    desk = Desk(store, 8)
    record = _record("a", min_workers=4)
    desk.add(replace(record, request=replace(record.request, deadline_s=None)), profile=False)
    assert desk.decide() == {"a": 4}
