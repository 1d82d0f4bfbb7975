"""Calls of trackers: the leader's are carried out, once; later workers go on with its runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swell.train.auto.trackers import Trackers


class Worker:
    """A worker that logs once after each step, as a script does."""

    def __init__(self, home: Path, *, leads: bool) -> None:
        self.leads, self.steps, self.kept = leads, 0, []  # type: ignore[var-annotated]
        self.trackers = Trackers(home / "trackers", lambda: self.leads, lambda: self.steps)

    def train(self, *steps: int) -> None:
        for self.steps in steps:
            self.kept += [self.steps] * self.trackers.admits()


def test_a_new_leader_and_a_restart_log_no_step_twice_and_leave_none_out(tmp_path: Path) -> None:
    leader, other = Worker(tmp_path, leads=True), Worker(tmp_path, leads=False)
    for step in (1, 2, 3):
        leader.train(step)
        other.train(step)
    assert leader.kept == [1, 2, 3] and other.kept == []
    other.leads = True  # the leader died
    other.train(4, 5)
    assert other.kept == [4, 5]
    restarted = Worker(tmp_path, leads=True)  # all died; the checkpoint is older
    restarted.train(2, 3, 4, 5, 6)
    assert restarted.kept == [6]


def test_several_calls_in_one_step_are_told_apart(tmp_path: Path) -> None:
    leader, other = Worker(tmp_path, leads=True), Worker(tmp_path, leads=False)
    leader.train(7)
    other.train(7)
    other.leads = True  # before the leader's second call
    other.train(7, 7)
    assert other.kept == [7, 7]


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.rows, self.ended = options, [], False  # type: ignore[var-annotated]

    def log(self, data: Any, step: int | None = None) -> None:
        self.rows.append((step, data))

    def finish(self) -> None:
        self.ended = True


def _wandb(started: list[Run]) -> Any:
    def init(**options: Any) -> Run:
        started.append(Run(options))
        return started[-1]

    return SimpleNamespace(init=init, log=None)


def test_a_worker_that_does_not_lead_has_a_run_that_begins_when_it_leads(tmp_path: Path) -> None:
    started: list[Run] = []
    leader, other = Worker(tmp_path, leads=True), Worker(tmp_path, leads=False)
    theirs, mine = _wandb(started), _wandb(started)
    leader.trackers.wandb(theirs)
    other.trackers.wandb(mine)
    run = theirs.init(project="p")
    late = mine.init(project="p")
    assert started[0].options["resume"] == "allow" and started[1].options["mode"] == "disabled"
    leader.steps = other.steps = 1
    run.log({"loss": 3})
    mine.log({"loss": 3})
    other.leads, other.steps = True, 2
    late.log({"loss": 2})
    mine.log({"loss": 1}, step=9)
    assert started[0].rows == [(1, {"loss": 3})] and started[1].rows == []
    assert started[2].rows == [(2, {"loss": 2}), (9, {"loss": 1})]
    assert started[2].options["id"] == started[0].options["id"], "one run of the job"
    other.trackers.close()
    assert started[2].ended
