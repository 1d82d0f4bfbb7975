"""The slots that count for a question, and what is entered of the jobs before a policy is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.control.conftest import make_record
from tests.control.virtual import known_exactly

from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.roster import DECIDE, Question, Roster, costs_s, enter_bounds, slots_for
from swell.control.store import Store, connect
from swell.domain import NO_TEAMS, Calendar, Cluster, Reservation

NODES = Cluster.parse("2x4")


@pytest.fixture
def roster(tmp_path: Path) -> Iterator[Roster]:
    """Two jobs on a board, the second with a promised deadline."""
    store = Store(connect(str(tmp_path / "store.db")))
    roster = Roster(Book(store), NODES, "packed")
    for record in (
        make_record("a", submitted_s=0.0),
        make_record("b", submitted_s=1.0, request={"deadline_s": 500.0, "min_workers": 2, "max_workers": 3}),
    ):
        known = known_exactly(record.job_id, 100.0, np.arange(9.0), startup_s=3.0, pause_s=0.5, closing_s=2.0)
        roster.book.add(record, known)
        roster.add(record, NO_TEAMS)
    yield roster
    store.close()


def test_a_decision_counts_on_the_present_slots_but_those_of_profiling_runs(roster: Roster) -> None:
    slots = slots_for(DECIDE, roster.board, NODES, [0, 1], roster.listed().jobs, 10.0)
    assert (slots.cluster.capacity, slots.ahead, slots.widest) == (6, None, 6)


def test_another_calendar_takes_its_slots_out_and_shows_what_is_ahead(roster: Roster) -> None:
    away = Calendar((Reservation(name="night", nodes=(NODES.nodes[0].name,), start_s=0.0, end_s=100.0),))
    slots = slots_for(Question(calendar=away), roster.board, NODES, [], roster.listed().jobs, 10.0)
    assert slots.cluster.capacity == 4 and slots.ahead is not None
    assert slots.ahead.gpus.tolist() == [4, 8] and slots.widest == 8, "curves answer for what comes back"


def test_curves_answer_for_all_nodes_that_may_be_rented(roster: Roster) -> None:
    rented = Cluster.parse("4x4")
    slots = slots_for(Question(rentable=True), roster.board, rented, [0], roster.listed().jobs, 10.0)
    assert (slots.cluster.capacity, slots.widest) == (15, 16)


def test_bounds_and_deadlines_are_entered_for_the_last_step(roster: Roster) -> None:
    listed = roster.listed().apart()
    enter_bounds(listed, 8, {})
    table = listed.table
    assert table.min_gpus.tolist() == [1, 2] and table.max_gpus.tolist() == [8, 3]
    assert table.deadline_s.tolist() == [np.inf, 498.0], "processes take 2 s to end"
    enter_bounds(listed, 8, {"a": 300.0})
    assert table.deadline_s.tolist() == [298.0, 498.0]
    assert np.isinf(roster.board.table.deadline_s[roster.rows["a"]]), "a question changes nothing"


def test_a_job_that_is_asked_about_is_listed_whether_it_is_new_or_not(roster: Roster) -> None:
    record, known = make_record("c", submitted_s=2.0), Knowledge("c")
    listed, index = roster.listed_with(record, known, NO_TEAMS, without=("a",))
    assert [r.job_id for r, _ in listed.jobs] == ["b", "c"] and index == 1
    listed, index = roster.listed_with(roster.book.records["a"], known, NO_TEAMS, without=("a",))
    assert [r.job_id for r, _ in listed.jobs] == ["a", "b"] and listed.jobs[index][1] is known
    assert list(roster.rows) == ["a", "b"]


def test_costs_are_the_highest_of_all_jobs_with_a_round_and_a_rented_node(roster: Roster) -> None:
    assert costs_s(roster.listed().jobs, 60.0, 30.0) == (60.5, 93.0)
    assert costs_s([], 0.0, 0.0) == (0.0, 0.0)
