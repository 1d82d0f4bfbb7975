"""Which slots a job counts as its own, so that the event log never shows a slot in two hands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from swell.domain import JobRequest
from swell.engines.base import Launch
from swell.engines.local import LocalEngine
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import STOPPED
from swell.train.agent.wire import Connection


def _running(directory: Path) -> SupervisedJob:
    job = SupervisedJob("a", directory, wanted=(0, 1), told=(0, 1), alive=True)
    job.live = {"w0": 0, "w1": 2}
    return job


@pytest.mark.parametrize(
    ("exit_file", "kept"),
    [(None, {0, 1, 2}), ({"code": 0, "reason": ""}, {0, 1, 2}), ({"code": 0, "reason": STOPPED}, set())],
    ids=["killed", "finished", "stopped"],
)
def test_a_job_whose_processes_are_gone_keeps_its_slots_unless_it_gave_them_back(
    exit_file: dict[str, Any] | None, kept: set[int], tmp_path: Path
) -> None:
    job = _running(tmp_path)
    if exit_file is not None:
        job.wanted = ()
        (tmp_path / "exit.json").write_text(json.dumps(exit_file))
    job.gone()
    assert job.slots == kept and not job.live and not job.wanted
    job.kept_until_s = 0.0
    assert job.slots == set()


def test_a_job_that_moves_before_it_trains_is_reported_on_its_new_slot(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    job = SupervisedJob("a", tmp_path, wanted=(3,), told=(0,), alive=True)
    job.connection = cast(Connection, object())  # nothing is sent: the number of workers stays
    engine._jobs["a"] = job
    engine._send_target(job, 0.0)
    assert job.told == (3,)
    assert [(r.kind, r.data["gpus"]) for r in engine.reports()] == [("resized", (3,))]


def test_a_job_that_was_started_on_another_slot_than_it_wants_stays_there_until_that_is_free(
    tmp_path: Path,
) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    leaving = SupervisedJob("leaving", tmp_path, alive=True, live={"w0": 3})
    job = SupervisedJob("a", tmp_path, wanted=(3,), told=(0,), alive=True, target=1, fresh=True)
    job.connection = cast(Connection, object())
    engine._jobs |= {"leaving": leaving, "a": job}
    engine._send_target(job, 0.0)
    assert job.told == (0,) and list(engine.reports()) == []
    leaving.live = {}
    engine._send_target(job, 1.0)
    assert job.told == (3,) and len(list(engine.reports())) == 1


def test_a_job_of_replicas_uses_only_as_many_slots_as_whole_replicas_need(tmp_path: Path) -> None:
    request = JobRequest(name="big", script="train.py", workers_per_replica=2)
    job = SupervisedJob("a", tmp_path, wanted=(0, 1, 2, 3), told=(2, 3))
    job.launch = Launch(job_id="a", request=request, job_dir=tmp_path)
    assert job.whole_replicas((0, 2, 3)) == (2, 3)
    assert job.whole_replicas((0,)) == ()
    assert job.whole_replicas((0, 1, 2, 3)) == (0, 1, 2, 3)
