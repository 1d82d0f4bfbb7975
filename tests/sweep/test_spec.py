"""What a sweep's file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swell.cli.sweep import read_sweep
from swell.domain import InputError
from swell.sweep.driver import arguments, measured
from swell.sweep.spec import Between, Choice, Sweep

SPACE = {
    "lr": {"low": 1e-4, "high": 0.1, "log": True},
    "width": {"low": 8, "high": 64},
    "act": ["relu", "tanh"],
}


def test_a_sweep_is_read_with_its_defaults() -> None:
    sweep = Sweep.of_tables({"metric": "accuracy", "direction": "maximize"}, SPACE)
    assert (sweep.trials, sweep.sampler, sweep.pruner, sweep.parallel) == (20, "tpe", "halving", None)
    assert sweep.parameters == {
        "lr": Between(1e-4, 0.1, None, True),
        "width": Between(8, 64),
        "act": Choice(("relu", "tanh")),
    }
    assert [p.whole for p in sweep.parameters.values() if isinstance(p, Between)] == [False, True]


@pytest.mark.parametrize(
    ("sweep", "space", "field"),
    [
        ({"trails": 3}, SPACE, "sweep.trails"),
        ({"trials": 0}, SPACE, "sweep.trials"),
        ({"trials": True}, SPACE, "sweep.trials"),
        ({"sampler": "magic"}, SPACE, "sweep.sampler"),
        ({"direction": "up"}, SPACE, "sweep.direction"),
        ({"metric": 3}, SPACE, "sweep.metric"),
        ({"sampler": "grid"}, SPACE, "sweep.sampler"),
        ([], SPACE, "sweep"),
        ({}, {}, "parameters"),
        ({}, None, "parameters"),
        ({}, {"lr": 3}, "parameters.lr"),
        ({}, {"lr": []}, "parameters.lr"),
        ({}, {"lr": {"low": 1}}, "parameters.lr"),
        ({}, {"lr": {"low": 2, "high": 1}}, "parameters.lr"),
        ({}, {"lr": {"low": "a", "high": 1}}, "parameters.lr.low"),
        ({}, {"lr": {"low": 0, "high": 1, "log": True}}, "parameters.lr.log"),
        ({}, {"lr": {"low": 0, "high": 1, "step": 5}}, "parameters.lr.step"),
    ],
)
def test_bad_input_names_its_field(sweep: Any, space: Any, field: str) -> None:
    with pytest.raises(InputError) as refused:
        Sweep.of_tables(sweep, space)
    assert refused.value.field == field
    assert str(refused.value).startswith(field)


def test_a_file_needs_a_job_and_no_deadline(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    for text, said in (
        ("[parameters]\nlr = [1, 2]", r"add a table \[job\]"),
        ('[job]\nscript = "t.py"\ndeadline = "2h"\n[parameters]\nlr = [1, 2]', "best-effort"),
        ('[job]\nscript = "t.py"\n[extra]\n', "no table 'extra'"),
        ('[job]\nscrpt = "t.py"\n', "script"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=said):
            read_sweep(file)
    file.write_text('[job]\nscript = "t.py"\n[parameters]\nlr = [1, 2]')
    script, options, sweep = read_sweep(file, trials=7)
    assert (Path(script).name, options["name"], sweep.trials) == ("t.py", "sweep", 7)


def test_parameters_become_arguments() -> None:
    given = {"lr": 1e-05, "width": 64, "act": "tanh", "big": True, "small": False}
    assert arguments(given) == ["--lr", "1e-05", "--width", "64", "--act", "tanh", "--big"]


def test_the_metric_is_what_the_script_logged() -> None:
    data = {"epoch": 2, "loss": 0.5, "metrics": {"accuracy": 0.9, "odd": True}}
    assert measured(data, "accuracy") == 0.9
    assert measured(data, "loss") == 0.5
    assert measured(data, "odd") is None
    assert measured(data | {"metrics": {"loss": 0.7}}, "loss") == 0.7  # the script's own word goes first
    assert measured({}, "accuracy") is None
