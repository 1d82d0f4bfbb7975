"""tide on a live cluster: newcomers of unknown length, weights, and why a job waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.control.conftest import make_record
from tests.control.virtual import known_exactly

from swell.control import promises, views
from swell.control.book import Book
from swell.control.knowledge import Knowledge
from swell.control.plane import ControlPlane
from swell.control.scheduler import Scheduler
from swell.control.store import Store, connect
from swell.domain import Cluster
from swell.engines.null import NullEngine
from swell.policies import DEFAULT

NOW_S = 1000.0
RATES = np.array([0.0, 1.0, 1.9, 2.7, 3.4])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


@pytest.fixture
def desk(store: Store) -> Scheduler:
    return Scheduler(Book(store), DEFAULT, Cluster.parse("1x4"))


def hand_in(desk: Scheduler, job_id: str, work: float | None, **request: object) -> None:
    """A job of known length, or a script that nobody has seen."""
    known = Knowledge("new")
    if work is not None:
        known = known_exactly("kind", work, RATES, startup_s=1.0, pause_s=0.1)
    record = make_record(job_id, request=request, submitted_s=NOW_S)
    desk.book.add(record, known)
    desk.add(record, NOW_S)


def held(desk: Scheduler) -> dict[str, int]:
    return {job_id: int(desk.board.table.gpus[row]) for job_id, row in desk.roster.rows.items()}


def test_a_platform_that_was_told_no_policy_has_tide_and_keeps_to_its_answers(
    store: Store, tmp_path: Path
) -> None:
    plane = ControlPlane(store, NullEngine(Cluster.parse("1x4")), home=tmp_path)
    plane.come_up()
    assert plane.policy() == DEFAULT == "tide"
    scheduler, known = (
        plane._conductor.scheduler,
        known_exactly("kind", 340.0, RATES, startup_s=1.0, pause_s=0.1),
    )
    answers = [
        promises.promise(make_record(request={"deadline_s": NOW_S + in_s}), known, scheduler, NOW_S)[0]
        for in_s in (50.0, 1000.0)  # on four slots it takes 100 s
    ]
    assert [answer.admitted for answer in answers] == [False, True]
    assert answers[1].guaranteed_s is not None and answers[1].guaranteed_s <= NOW_S + 1000.0


def test_a_script_that_nobody_has_seen_starts_at_once(desk: Scheduler) -> None:
    for i in range(4):
        hand_in(desk, f"known-{i}", 20.0 + i)
    desk.decide(NOW_S)
    assert sum(held(desk).values()) == 4
    hand_in(desk, "new", None)
    desk.decide(NOW_S + 1)
    assert held(desk)["new"] == 1
    # It runs on and never says how long it is. When it has had more than the others need, it steps back.
    desk.decide(NOW_S + 500)
    assert held(desk)["new"] == 0


def test_the_heavier_of_two_equal_jobs_gets_more_slots(desk: Scheduler) -> None:
    hand_in(desk, "light", 1000.0)
    hand_in(desk, "heavy", 1000.0, weight=20)
    desk.decide(NOW_S)
    assert held(desk)["heavy"] > held(desk)["light"]


def test_a_job_that_waits_is_told_whom_the_policy_serves_first(desk: Scheduler) -> None:
    hand_in(desk, "short", 10.0, min_workers=4)
    hand_in(desk, "long", 10_000.0)
    for job_id, move in desk.decide(NOW_S):
        record = desk.book.records[job_id]
        desk.book.records[job_id] = make_record(job_id, request={}, wanted=move.after, owner=record.owner)
    why = views.why(desk.book.records["long"], desk, NOW_S, 0.0, "")
    assert why.startswith("waits: 4 of 4 slots are in use by a (4), as policy 'tide' decides")
    assert why.endswith(
        "which serves promised jobs first, then those with the least work left for their weight"
    )
