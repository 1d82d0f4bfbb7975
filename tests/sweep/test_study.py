"""The trials of a sweep on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from swell.domain import SwellError
from swell.sweep.spec import Sweep
from swell.sweep.study import Study, TrialStanding, Verdict, verdicts

pytest.importorskip("optuna")

SPACE = {"lr": {"low": 0.0, "high": 1.0}}


def sweep(space: dict[str, Any] = SPACE, **fields: Any) -> Sweep:
    return Sweep.of_tables({"direction": "maximize", **fields}, space)


def test_everything_survives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "sweep.db"
    study = Study(path, sweep(), fresh=True)
    done, running = study.ask(), study.ask()
    study.started(done.number, "job-a")
    study.started(running.number, "job-b")
    study.report(done.number, 1, 0.4)
    study.report(done.number, 2, 0.6)
    study.tell(done.number, "complete")
    again = Study(path, sweep())
    assert again.key == study.key
    first, second = again.trials()
    assert (first.state, first.job_id, first.value, first.epochs) == ("complete", "job-a", 0.6, 2)
    assert (second.state, second.job_id, second.parameters) == ("running", "job-b", running.parameters)
    assert again.best() == first
    again.tell(done.number, "fail")  # an ended trial stays as it is
    assert again.trials()[0].state == "complete"
    assert again.curves() == {0: {1: 0.4, 2: 0.6}, 1: {}}


def test_a_study_is_not_mixed_with_another(tmp_path: Path) -> None:
    path = tmp_path / "sweep.db"
    Study(path, sweep(), fresh=True)
    with pytest.raises(SwellError, match="--resume"):
        Study(path, sweep(), fresh=True)
    with pytest.raises(SwellError, match="other parameters"):
        Study(path, sweep({"lr": [1, 2]}))


def test_verdicts_follow_what_was_reported(tmp_path: Path) -> None:
    study = Study(tmp_path / "sweep.db", sweep(trials=4), fresh=True)
    trials = [study.ask().number for _ in range(4)]
    for number in trials[:3]:
        study.report(number, 1, number / 10)
    assert [study.verdicts()[number].value for number in trials] == ["wait", "wait", "wait", "go"]
    study.report(trials[3], 1, float("nan"))  # no number to judge by
    study.report(trials[3], 2, 0.9)
    assert [study.verdicts()[number].value for number in trials] == ["give up", "give up", "go", "go"]
    study.tell(trials[0], "pruned")
    assert trials[0] not in study.verdicts()
    assert study.trials()[0].state == "pruned"


def test_other_pruners_are_optunas(tmp_path: Path) -> None:
    study = Study(tmp_path / "sweep.db", sweep(trials=9, pruner="median"), fresh=True)
    for _ in range(5):
        trial = study.ask().number
        for epoch in (1, 2, 3):
            study.report(trial, epoch, 0.5)
        study.tell(trial, "complete")
    bad, good = study.ask().number, study.ask().number
    for epoch in (1, 2, 3):
        study.report(bad, epoch, 0.1)
        study.report(good, epoch, 0.8)
    assert {number: verdict.value for number, verdict in study.verdicts().items()} == {
        bad: "give up",
        good: "go",
    }


def test_a_trial_without_a_value_has_failed(tmp_path: Path) -> None:
    study = Study(tmp_path / "sweep.db", sweep(), fresh=True)
    study.tell(study.ask().number, "complete")
    assert study.trials()[0].state == "fail"
    assert study.best() is None


def test_a_grid_is_gone_through_once(tmp_path: Path) -> None:
    space = {"width": {"low": 1, "high": 3}, "act": ["relu", "tanh"]}
    study = Study(tmp_path / "sweep.db", sweep(space, sampler="grid"), fresh=True)
    assert sweep(space, sampler="grid").trials == 6
    assert sweep(space, sampler="grid", trials=4).trials == 4
    seen = {tuple(study.ask().parameters.values()) for _ in range(6)}
    assert seen == {(w, a) for w in (1, 2, 3) for a in ("relu", "tanh")}


# Successive halving, as a function of what trials have reported.


GO, WAIT, GIVE_UP = Verdict.GO, Verdict.WAIT, Verdict.GIVE_UP


def of(*trials: TrialStanding, total: int | None = None, maximize: bool = True) -> dict[int, Verdict]:
    return verdicts(trials, total or len(trials), 1, maximize=maximize)


def test_nobody_goes_on_before_the_last_has_arrived() -> None:
    there, coming = TrialStanding(0, {1: 0.5}), TrialStanding(1, {})
    assert of(there, coming, total=3) == {0: WAIT, 1: GO}
    assert of(there, TrialStanding(1, {1: 0.4}), total=3) == {0: WAIT, 1: WAIT}, (
        "the third was not even started"
    )


def test_the_best_third_goes_on_and_the_last_one_to_its_end() -> None:
    trials = [TrialStanding(i, {1: i / 10}) for i in range(9)]
    assert of(*trials) == {i: GO if i >= 6 else GIVE_UP for i in range(9)}
    assert of(*trials, maximize=False) == {i: GO if i < 3 else GIVE_UP for i in range(9)}
    ended = [TrialStanding(i, {1: i / 10}, ended=True) for i in range(6)]
    later = [
        TrialStanding(6, {1: 0.6, 3: 0.9}),
        TrialStanding(7, {1: 0.7, 4: 0.8}),
        TrialStanding(8, {1: 0.8, 2: 0.9}),
    ]
    assert of(*ended, *later) == {6: WAIT, 7: WAIT, 8: GO}
    later[2] = TrialStanding(8, {1: 0.8, 3: 0.7})
    assert of(*ended, *later) == {6: GO, 7: GIVE_UP, 8: GIVE_UP}
    assert of(*ended, TrialStanding(6, {1: 0.6, 3: 0.9, 9: 0.1})) == {6: GO}


def test_failed_trials_keep_nobody_waiting_and_never_win() -> None:
    broken = [TrialStanding(i, ended=True, failed=True) for i in range(2)]
    assert of(*broken, TrialStanding(2, {1: 0.1})) == {2: GO}
    assert of(*broken) == {}


def test_whatever_the_values_one_survives_and_work_is_bounded() -> None:
    """Play whole sweeps: trials run to their rung, and 24 of them take as many epochs as the rule says."""
    rng = random.Random(0)
    for total in (1, 2, 3, 5, 24):
        curves: dict[int, dict[int, float]] = {i: {} for i in range(total)}
        ended: set[int] = set()
        for _ in range(200):
            standing = [TrialStanding(i, curves[i], ended=i in ended) for i in range(total)]
            found = verdicts(standing, total, 1, maximize=True)
            ended |= {i for i, verdict in found.items() if verdict is GIVE_UP}
            going = [i for i, verdict in found.items() if verdict is GO]
            if not going:
                break
            for i in going:
                curves[i][len(curves[i]) + 1] = rng.random()
                if len(curves[i]) == 27:
                    ended.add(i)
        assert [len(curve) for curve in curves.values()].count(27) == 1
        if total == 24:
            assert sum(map(len, curves.values())) == 24 * 1 + 8 * 2 + 3 * 6 + 1 * 18
