"""What the control plane knows of jobs on each GPU type, and that promises stay on theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.control.conftest import make_record

from swell.control import promises
from swell.control.book import LEDGER, Book
from swell.control.knowledge import Knowledge, Speed
from swell.control.scheduler import Scheduler
from swell.control.store import Store, connect
from swell.domain import Cluster
from swell.engines.local import type_of_model
from swell.perf.belief import PRIOR_ERROR
from swell.perf.gpu_types import RatioLedger

MIXED = Cluster.parse("2x2:t4,1x4:a100")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


def timing(workers: int, step_s: float) -> dict[str, Any]:
    return {"workers": workers, "nodes": 1, "local_batch": 8, "step_s": step_s, "sync_s": 0.0}


def taught(knowledge: Knowledge, gpu_type: str, step_s: float, *sizes: int) -> Knowledge:
    """Have the job report a few steps at each size; a step of one worker takes `step_s`."""
    knowledge.length.of = 10_000.0
    for workers in sizes:
        for _ in range(3):
            knowledge.runs_on(gpu_type)
            knowledge.take("timing", 0.0, {**timing(workers, step_s / workers), "local_batch": 8 // workers})
    return knowledge


def test_each_type_has_a_belief_of_its_own_and_reports_go_to_the_one_the_job_is_on() -> None:
    knowledge = taught(Knowledge("kind"), "t4", 0.4, 1, 2)
    speed = knowledge.speed
    assert speed.measured_on("t4") and not speed.measured_on("a100")
    knowledge.runs_on("a100")
    assert speed.measured_on("t4") and not speed.measured_on("a100"), "it has reported nothing yet"
    assert speed.curve(4, 4)[1] == speed.curve_on("t4", 4, 4)[1]
    taught(knowledge, "a100", 0.1, 1, 2)
    assert speed.measured_on("t4") and speed.measured_on("a100")
    t4, a100 = (speed.curve_on(kind, 4, 4) for kind in ("t4", "a100"))
    assert t4[1] == pytest.approx(1 / 0.4, rel=0.05) and a100[1] == pytest.approx(1 / 0.1, rel=0.05)
    knowledge.runs_on("t4")
    assert speed.curve(4, 4)[1] == t4[1], "coming back, it is believed as it was left"


def test_a_type_that_the_job_has_not_run_on_is_believed_by_the_ratio_that_others_showed() -> None:
    ledger = RatioLedger()
    other = taught(Knowledge("other"), "t4", 0.8, 1)
    assert other.speed.belief is not None and ledger.note("other", "t4", other.speed.belief)
    taught(other, "a100", 0.2, 1)
    assert other.speed.belief is not None and ledger.note("other", "a100", other.speed.belief)
    knowledge = taught(Knowledge("kind", Speed(ledger=ledger)), "t4", 0.4, 1)
    assert knowledge.speed.curve_on("a100", 2, 2)[1] == pytest.approx(knowledge.speed.curve_on("t4", 2, 2)[1])
    assert not knowledge.speed.curve_on("a100", 2, 2, cautious=True).any(), "nothing to promise with"
    ledger.learn()
    assert knowledge.speed.curve_on("a100", 2, 2)[1] == pytest.approx(4 / 0.4, rel=0.05)
    careful = knowledge.speed.curve_on("a100", 2, 2, cautious=True)[1]
    assert careful == pytest.approx(4 / 0.4 / (1 + PRIOR_ERROR), rel=0.05)


def test_history_remembers_the_types_and_the_ratios(store: Store) -> None:
    book, record = Book(store), make_record("a-1")
    knowledge = Knowledge("kind")
    book.add(record, knowledge)
    for kind, step_s in (("t4", 0.4), ("a100", 0.1)):
        taught(knowledge, kind, step_s, 1)
        book.showed(knowledge)
    book.remember(record, 1.0)
    again = Book(store)
    recalled = again._recalled("kind", "").speed
    for kind in ("t4", "a100"):
        assert recalled.measured_on(kind)
        assert recalled.curve_on(kind, 2, 2) == pytest.approx(knowledge.speed.curve_on(kind, 2, 2), rel=1e-6)
    assert again.ledger.ratios.between("new", "t4", "a100").compute == pytest.approx(0.25, rel=0.05)


def test_an_entry_without_types_is_good_for_every_type() -> None:
    knowledge = taught(Knowledge("kind"), "", 0.4, 1)
    content = json.loads(json.dumps(knowledge.to_json()))
    del content["gpu_type"], content["types"]
    old = Knowledge.from_history("kind", content)
    assert np.array_equal(old.speed.curve_on("t4", 2, 2), old.speed.curve_on("a100", 2, 2))
    old.runs_on("t4")
    assert old.speed.measured_on("t4") and not old.speed.measured_on("a100")


@pytest.mark.parametrize(
    "written", ["{", "[[1]]", '{"a": 1}', '[["k", "t4", [0, 0, 0, 0, 0, 0, 0], 8, false]]']
)
def test_what_cannot_be_read_of_the_types_is_left_out(store: Store, written: str) -> None:
    store.set_setting(LEDGER, written)
    assert not Book(store).ledger.ratios.overall


def test_a_promised_job_stays_on_its_type_over_a_restart(store: Store) -> None:
    def come_up() -> tuple[Scheduler, Knowledge]:
        book = Book(store)
        knowledge = taught(Knowledge("kind"), "t4", 0.4, 1, 2, 4)
        return Scheduler(book, "elasticflow", MIXED), taught(knowledge, "a100", 0.1, 1, 2, 4)

    scheduler, knowledge = come_up()
    assert scheduler.gives_promises
    record = make_record("a-1", request={"deadline_s": 5_000.0}, submitted_s=0.0)
    answer, asked = promises.promise(record, knowledge, scheduler, 0.0)
    assert answer.admitted and answer.gpu_type == "a100" and asked is not None
    for on in ("a100", "t4"):  # whatever the record says is what a new control plane keeps to
        scheduler, knowledge = come_up()
        promised = promises.replace(record, promise=promises.replace(answer, gpu_type=on))
        scheduler.book.add(promised, knowledge)
        scheduler.add(promised, 1.0)
        for now_s in (1.0, 2.0):
            moves = dict(scheduler.decide(now_s))
            if now_s == 1.0:
                assert MIXED.types_of(moves["a-1"].after) == (on,)


def test_a_profiling_run_is_on_one_type(store: Store) -> None:
    scheduler = Scheduler(Book(store), "elasticflow", Cluster.parse("1x2:t4,1x3:a100"))
    record = make_record("a-1", submitted_s=0.0)
    scheduler.book.add(record, Knowledge("kind"))
    scheduler.add(record, 0.0)
    scheduler.profiling.ask(record, 0.0)
    ((_, move),) = scheduler.decide(1.0)
    assert scheduler.profiling.runs["a-1"].sizes == [2, 1]
    assert len(scheduler.cluster.types_of(move.after)) == 1


def test_a_second_type_that_joins_is_told_apart_at_once(store: Store) -> None:
    scheduler = Scheduler(Book(store), "max-min", Cluster.parse("1x2:t4"))
    for i in range(4):
        record = make_record(f"a-{i}", submitted_s=float(i))
        scheduler.book.add(record, Knowledge(f"kind {i}"))
        scheduler.add(record, 0.0)
    scheduler.set_cluster(Cluster.parse("1x2:t4,1x2:a100"), 1.0)
    placed = {job_id: scheduler.cluster.types_of(move.after) for job_id, move in scheduler.decide(1.0)}
    assert sorted(placed.values()) == [("a100",), ("a100",), ("t4",), ("t4",)]
    assert scheduler.tells_types_apart


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (" NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA H100 80GB HBM3", "h100"), ("", "gpu"),
    ],
)  # fmt: skip
def test_the_name_of_a_model_gives_its_type(model: str, kind: str) -> None:
    assert type_of_model(model) == kind
