"""A whole sweep in virtual time: real driver, study, control plane and policy, and jobs that only pretend.

A trial takes 2.9 s for an epoch on one slot and nearly a quarter of that on four. To start or to resume it
takes 1.5 s, and a join 0.1 s. Jobs report twice a second, as real ones do.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.control.virtual import Exact, Trace, VirtualPlatform, known_exactly

from swell.api.schemas import EventView
from swell.control.model import JobRequest, Phase
from swell.domain import Cluster, Placement
from swell.domain.errors import SwellError
from swell.engines import EngineReport
from swell.sweep import driver
from swell.sweep.driver import Driver
from swell.sweep.spec import Sweep
from swell.sweep.study import Study

pytest.importorskip("optuna")

SLOTS, EPOCHS, EPOCH_S = 4, 27, 2.9
RATES = np.arange(SLOTS + 1) / (1.0 + 0.04 * np.arange(-1, SLOTS)) / EPOCH_S
"""Epochs per second on 0, 1, 2 ... slots."""
STEP_S, REPORT_S = 0.25, 0.5
SWEEP = Sweep.of_tables(
    {"metric": "accuracy", "direction": "maximize", "trials": 24}, {"lr": {"low": 0.0, "high": 1.0}}
)


class Pretended(VirtualPlatform):
    """A platform whose clock goes on whenever the sweep asks for news."""

    def __init__(self, home: Path) -> None:
        super().__init__(Trace([], {}, Cluster.parse(f"1x{SLOTS}")), "tide", home, cost_s=1.5, round_s=None)
        self.plane.come_up()

    def recall(self, request: JobRequest) -> Exact:
        return known_exactly(request.name, float(EPOCHS), RATES, startup_s=1.5, pause_s=0.1)

    def work(self, job_id: str) -> float:
        return float(EPOCHS)

    def speed(self, job_id: str, placement: Placement) -> float:
        return float(RATES[len(placement)])

    def pause_s(self, job_id: str, before: int, after: int) -> float:
        return 0.1 if before else 1.5

    # -- as the driver's client --------------------------------------------------------------------------

    def submit(self, script: str, *, idempotency_key: str, **options: Any) -> Any:
        request = JobRequest(script=script, workdir=str(self.home), **options)
        return self.plane.jobs.submit(request, "ann", idempotency_key)

    def pause(self, job_id: str) -> None:
        self.plane.jobs.pause(job_id)

    def resume(self, job_id: str) -> None:
        self.plane.jobs.resume(job_id)

    def cancel(self, job_id: str) -> None:
        self.plane.jobs.cancel(job_id)

    def events(self, *, since: int, follow: bool) -> list[EventView]:
        before, self.now_s = self.now_s, self.now_s + STEP_S
        for job_id, run in self.engine._runs.items():
            trained_s = max(self.now_s - max(run.since_s, run.paused_until_s), 0.0)
            if run.placement and before // REPORT_S < self.now_s // REPORT_S:
                self._report(job_id, min(EPOCHS - run.left + run.speed * trained_s, float(EPOCHS)))
        self.plane.turn()
        return [EventView.of_event(seq, event) for seq, event in self.plane.events(since, limit=1000)]

    def _report(self, job_id: str, done: float) -> None:
        number = int(job_id.split("-")[1])
        score = {"accuracy": (number * 7 % 24) / 24 + done / 1000}
        data = {"done": done, "of": float(EPOCHS), "epoch": int(done), "metrics": score, "batch_size": 1}
        self.engine._reports.append(
            EngineReport(job_id=job_id, time_s=self.now_s, kind="progress", data=data)
        )


def search(home: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> SimpleNamespace:
    """Make the whole sweep; its makespan, its trials and the best of them."""
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: None)
    home.mkdir()
    platform, study = Pretended(home), Study(home / "sweep.db", SWEEP, fresh=True)
    fields = {"name": "trial", "args": (), **options}
    Driver(platform, study, SWEEP, "train.py", fields, parallel=SLOTS).run()  # type: ignore[arg-type]
    platform.store.close()
    return SimpleNamespace(makespan_s=platform.now_s, trials=study.trials(), best=study.best())


def test_elastic_trials_save_a_quarter_of_the_makespan_and_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = search(tmp_path / "fixed", monkeypatch, max_workers=1)
    elastic = search(tmp_path / "elastic", monkeypatch)
    assert len(elastic.trials) == len(fixed.trials) == SWEEP.trials
    assert [t.parameters for t in elastic.trials] == [t.parameters for t in fixed.trials]
    assert elastic.best.number == fixed.best.number, "both find the same"
    assert elastic.makespan_s <= 0.75 * fixed.makespan_s, (elastic.makespan_s, fixed.makespan_s)


class Scripted:
    """A client whose jobs have reported these events already."""

    def __init__(self, *progress: dict[str, Any]) -> None:
        events = [("progress", data) for data in progress] + [("finished", {})]
        self._events = [
            EventView(seq=seq, time_s=float(seq), kind=kind, job_id="job-0", data=data)
            for seq, (kind, data) in enumerate(events, 1)
        ]

    def submit(self, script: str, *, idempotency_key: str, **options: Any) -> Any:
        return SimpleNamespace(job_id="job-0")

    def events(self, *, since: int, follow: bool) -> list[EventView]:
        return [event for event in self._events if event.seq > since]


@pytest.mark.parametrize(
    ("progress", "value"),
    [
        (({"epoch": 1, "metrics": {"accuracy": 0.5}}, {"epoch": 2, "metrics": {"accuracy": 0.8}}), 0.8),
        (({"epoch": 1, "metrics": {"accuracy": 0.5}}, {"epoch": 1, "metrics": {"accuracy": 0.8}}), 0.8),
        (({"epoch": 0, "metrics": {"accuracy": 0.8}},), 0.8),  # a single pass, or a program without epochs
        (({"metrics": {"accuracy": 0.8}},), 0.8),
    ],
)
def test_a_trial_is_judged_by_what_its_job_logged_last(
    tmp_path: Path, progress: tuple[dict[str, Any], ...], value: float
) -> None:
    sweep = Sweep.of_tables(
        {"metric": "accuracy", "direction": "maximize", "trials": 1}, {"lr": {"low": 0.0, "high": 1.0}}
    )
    study = Study(tmp_path / "sweep.db", sweep, fresh=True)
    client = Scripted(*progress)
    Driver(client, study, sweep, "train.py", {"name": "trial"}, parallel=1).run()  # type: ignore[arg-type]
    (trial,) = study.trials()
    assert (trial.state, trial.value) == ("complete", value)


class TooLate:
    """A client whose jobs are over whenever the driver wants to pause, resume or cancel them, or soon."""

    def __init__(self) -> None:
        self.events_: list[EventView] = []
        self.over: set[str] = set()
        self.refused = self.looks = 0

    def submit(self, script: str, *, idempotency_key: str, **options: Any) -> Any:
        job_id = f"job-{len({event.job_id for event in self.events_})}"
        self._say(job_id, "progress", {"epoch": 1, "metrics": {"accuracy": 0.1 * len(self.events_)}})
        return SimpleNamespace(job_id=job_id)

    def _say(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        seq = len(self.events_) + 1
        self.events_.append(EventView(seq=seq, time_s=float(seq), kind=kind, job_id=job_id, data=data))

    def events(self, *, since: int, follow: bool) -> list[EventView]:
        self.looks += 1
        if self.looks % 5 == 0:
            for job_id in {str(event.job_id) for event in self.events_} - self.over:
                self._finish(job_id)
        return [event for event in self.events_ if event.seq > since]

    def _finish(self, job_id: str) -> None:
        self._say(job_id, "finished", {})
        self.over.add(job_id)

    def job(self, job_id: str) -> Any:
        return SimpleNamespace(over=job_id in self.over)

    def pause(self, job_id: str) -> None:
        self._finish(job_id)
        self.refused += 1
        raise SwellError(f"job '{job_id}' is finished: there is nothing to do")

    resume = cancel = pause


def test_a_trial_that_ends_just_when_it_is_to_wait_or_to_be_given_up_is_complete(tmp_path: Path) -> None:
    sweep = Sweep.of_tables(
        {"metric": "accuracy", "direction": "maximize", "trials": 3}, {"lr": {"low": 0.0, "high": 1.0}}
    )
    study, client = Study(tmp_path / "sweep.db", sweep, fresh=True), TooLate()
    Driver(client, study, sweep, "train.py", {"name": "trial"}, parallel=2).run()  # type: ignore[arg-type]
    assert client.refused and [trial.state for trial in study.trials()] == ["complete"] * 3

    client = TooLate()
    # What the platform refuses for another reason is said
    client.job = lambda job_id: SimpleNamespace(over=False)  # type: ignore[method-assign]
    study = Study(tmp_path / "other.db", sweep, fresh=True)
    with pytest.raises(SwellError, match="nothing to do"):
        Driver(client, study, sweep, "train.py", {"name": "trial"}, parallel=2).run()  # type: ignore[arg-type]


class Killed(TooLate):
    """A client whose driver is killed as soon as it has cancelled a job."""

    killed = False

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Any] = {}

    def submit(self, script: str, *, idempotency_key: str, **options: Any) -> Any:
        if idempotency_key not in self.jobs:
            self.jobs[idempotency_key] = super().submit(script, idempotency_key=idempotency_key, **options)
        return self.jobs[idempotency_key]

    def events(self, *, since: int, follow: bool) -> list[EventView]:
        return super().events(since=since, follow=follow) if self.killed else self.events_[since:]

    def pause(self, job_id: str) -> None:
        """It works."""

    resume = pause

    def job(self, job_id: str) -> Any:
        return SimpleNamespace(job_id=job_id, over=job_id in self.over, phase=Phase.CANCELLED)

    def cancel(self, job_id: str) -> None:
        self._say(job_id, "cancelled", {})
        self.over.add(job_id)
        if not self.killed:
            self.killed = True
            raise KeyboardInterrupt


def test_a_trial_that_a_killed_driver_had_given_up_is_pruned_and_has_not_failed(tmp_path: Path) -> None:
    sweep = Sweep.of_tables(
        {"metric": "accuracy", "direction": "maximize", "trials": 3}, {"lr": {"low": 0.0, "high": 1.0}}
    )
    client: Any = Killed()
    with pytest.raises(KeyboardInterrupt):
        study = Study(tmp_path / "sweep.db", sweep, fresh=True)
        Driver(client, study, sweep, "train.py", {"name": "trial"}, parallel=2).run()
    study = Study(tmp_path / "sweep.db", sweep, fresh=False)
    Driver(client, study, sweep, "train.py", {"name": "trial"}, parallel=2).run()
    assert sorted({trial.state for trial in study.trials()}) == ["complete", "pruned"]
