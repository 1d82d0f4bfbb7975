"""Which slots a job counts as its own, so that the event log never shows a slot in two hands."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any, cast

import pytest

from swell.domain import JobRequest
from swell.engines import Launch, supervisor
from swell.engines.border import BadMessage, Confined, read_event, read_status
from swell.engines.local import LocalEngine
from swell.engines.supervised_job import SupervisedJob
from swell.engines.supervisor import STOPPED
from swell.train.agent.jobdir import JobDirectory
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


def test_a_job_whose_coordinator_is_new_takes_no_slot_that_another_one_still_has(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    other = SupervisedJob("other", tmp_path, told=(0,), alive=True)
    job = SupervisedJob("a", tmp_path, wanted=(0,), told=(1, 2), alive=True, target=1)
    engine._jobs |= {"other": other, "a": job}
    engine._connected(job)
    assert job.told == (1,), "slot 0 is wanted, but not free yet"
    job.target, job.logged = 4, (2,)
    engine._connected(job)
    assert job.told == (0, 1, 2, 3), "it has four workers, whatever that means for others"


def test_a_job_that_was_found_keeps_the_slots_of_the_log_until_its_workers_are_known(tmp_path: Path) -> None:
    job = SupervisedJob("a", tmp_path, wanted=(0,), told=(0,), logged=(2,), alive=True)
    assert job.slots == {0, 2}, "the earlier engine wanted it on slot 0, but it was still on 2"
    job.live, job.members = {"w0": 0}, {"w0"}
    assert job.slots == {0}


def test_a_job_of_replicas_uses_only_as_many_slots_as_whole_replicas_need(tmp_path: Path) -> None:
    request = JobRequest(name="big", script="train.py", workers_per_replica=2)
    job = SupervisedJob("a", tmp_path, wanted=(0, 1, 2, 3), told=(2, 3))
    job.launch = Launch(job_id="a", request=request, job_dir=tmp_path)
    assert job.whole_replicas((0, 2, 3)) == (2, 3)
    assert job.whole_replicas((0,)) == ()
    assert job.whole_replicas((0, 1, 2, 3)) == (0, 1, 2, 3)


def test_a_job_that_shrinks_keeps_its_slots_until_it_goes_on_without_them(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    job = SupervisedJob("a", tmp_path, wanted=(0, 1), told=(0, 1), alive=True, live={"w0": 0, "w1": 1})
    engine._add_report(job, "resized", {"pause_s": 0.0, "gpus": (0, 1)})
    job.told, job.told_s = (0,), time.monotonic()
    job.live = {"w0": 0}  # the other one has left
    assert job.slots == {0, 1}, "the log still shows it on both"
    engine._add_report(job, "resized", {"pause_s": 0.1, "gpus": (0,)})
    assert job.slots == {0}
    job.told_s, job.logged = float("-inf"), (0, 1)
    assert job.slots == {0}, "one that never says so does not keep them for ever"
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": ""}))
    job.gone()
    assert job.slots == {0, 1}, "until its end is noted"


def test_a_job_wanted_again_before_it_was_told_to_stop_is_reported_where_it_is(
    tmp_path: Path,
) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    job = SupervisedJob("a", tmp_path, wanted=(), told=(0, 1), alive=True)
    engine._jobs["a"] = job
    launch = Launch(job_id="a", request=JobRequest(name="a", script="train.py"), job_dir=tmp_path)
    engine.apply(launch, (1, 2))
    assert [(r.kind, r.data["gpus"]) for r in engine.reports()] == [("started", (0, 1))]
    engine.apply(launch, (2,))
    assert list(engine.reports()) == []


def test_a_job_that_can_use_one_worker_only_is_reported_as_it_says_so_and_when_it_is_taken_over(
    tmp_path: Path,
) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    job = SupervisedJob("a", tmp_path, wanted=(0,), told=(0,), alive=True)
    reason = "three workers could not follow it (KeyError:\n  'x')"
    engine._take_event(job, {"event": "confined", "workers": 1, "reason": reason})
    expected = {"workers": 1, "reason": "three workers could not follow it (KeyError: 'x')"}
    assert [(r.kind, r.data) for r in engine.reports()] == [("confined", expected)]
    status = {"workers": {}, "members": [], "target": 1, "maximum": 1}
    assert read_status(status | {"confined": ""}, 4).confined is None
    assert read_status(status | {"confined": reason}, 4).confined == Confined(1, expected["reason"])
    for bad in ({"workers": 0, "reason": "x"}, {"workers": 1}, {"workers": 1, "reason": ["x"]}):
        with pytest.raises(BadMessage):
            read_event({"event": "confined"} | bad, 4)


def test_a_job_that_was_resized_while_no_control_plane_listened_is_reported_when_one_does(
    tmp_path: Path,
) -> None:
    engine = LocalEngine(tmp_path, slots=4)
    other = SupervisedJob("other", tmp_path, wanted=(2,), told=(2,), alive=True)
    job = SupervisedJob(
        "a", tmp_path, wanted=(2,), told=(0, 1), alive=True, logged=(0, 1), told_s=time.monotonic()
    )
    engine._jobs |= {"other": other, "a": job}
    assert job.slots == {0, 1}, "until its coordinator says where its workers are"
    job.connection = cast(Connection, _Silent())
    job.fresh, job.target, job.members, job.live = True, 1, {"w0"}, {"w0": None}
    engine._send_target(job, 0.0)
    assert job.told == (0,), "it stays on a slot of its own, not on one that another job has"
    assert [(r.kind, r.data["gpus"]) for r in engine.reports()] == [("resized", (0,))]
    assert job.slots == {0}


def test_a_full_disk_at_the_start_of_a_job_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def write(self: JobDirectory, name: str, text: str) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(supervisor.time, "sleep", lambda _: None)
    monkeypatch.setattr(JobDirectory, "_write", write)
    made = supervisor._with_room(lambda: JobDirectory.create(tmp_path / "run", {}))
    assert made.path == tmp_path / "run" and tries == ["job.json"] * 3
    monkeypatch.setattr(supervisor, "_ROOM_S", -1.0)
    tries.clear()
    with pytest.raises(OSError, match="no space"):
        supervisor._with_room(lambda: JobDirectory.create(tmp_path / "next", {}))


class _Silent:
    """A connection to a coordinator that takes everything."""

    def send(self, message: object) -> None: ...
