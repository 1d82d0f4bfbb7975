"""What `swell run` tells of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swell.cli import main
from swell.cli.run import Story
from swell.cli.submit import misplaced
from swell.train.agent.jobdir import JobDirectory

HISTORY: list[dict[str, Any]] = [
    {"time_s": 9.0, "event": "spawn", "worker": "w0"},
    {"time_s": 10.0, "event": "generation", "number": 1, "members": ["w0"], "step": 0},
    {"time_s": 12.0, "event": "generation", "number": 2, "members": ["w0", "w1"], "step": 80},
    {"time_s": 12.0, "event": "switch", "worker": "w0", "step": 80, "world": 2, "pause_s": 0.009},
    {"time_s": 14.0, "event": "exited", "worker": "w1", "code": -9},
    {"time_s": 14.0, "event": "generation", "number": 3, "members": ["w0"], "step": 99},
    {"time_s": 14.0, "event": "recovery", "worker": "w0", "step": 99, "world": 1, "pause_s": 0.021},
    {"time_s": 16.0, "event": "confined", "worker": "w0", "workers": 1, "reason": "of its loss"},
]


def test_joins_deaths_and_the_end_are_told() -> None:
    story = Story("digits")
    lines = [line for event in HISTORY if (line := story.tell(event))]
    assert lines == [
        "training with 1 worker: w0",
        "w1 joined; paused for 9 ms, 2 workers at step 80",
        "w1 died; recovered in 21 ms, 1 worker at step 99",
    ]
    assert story.summary(18.0, 0) == (
        "done after 8.0 s of training, 1 to 2 workers (1.2 on average), 2 changes of membership, "
        "1 death survived, 30 ms paused in all"
    )


def test_a_job_that_never_trained_says_so() -> None:
    assert Story("digits").summary(1.0, 1) == "it never trained"


def test_options_behind_the_script_are_noticed() -> None:
    assert misplaced(["--epochs", "3", "--workers=1:3"], ["--workers", "--auto"]) == ["--workers"]
    assert misplaced(["workers"], ["--workers"]) == []


def test_a_job_whose_only_worker_died_says_that_it_begins_again() -> None:
    story = Story("digits")
    assert story.tell({"time_s": 1.0, "event": "generation", "number": 1, "members": ["w0"], "step": 0})
    again = {"time_s": 3.0, "event": "generation", "number": 2, "members": ["w1"]}
    assert story.tell(again | {"step": 0}) == "w0 died; training begins again with w1"
    again |= {"number": 3, "members": ["w2"]}
    assert story.tell(again | {"step": 7}) == "w1 died; training goes on from step 7 with w2"
    assert story.summary(5.0, 0) == (
        "done after 4.0 s of training, 1 worker, 2 changes of membership, 2 deaths survived"
    )


# What `swell run` and `swell resize` say when something is not as meant.


def test_options_after_the_script_go_to_the_script_and_that_is_said(tmp_path: Path) -> None:
    missing = str(tmp_path / "train.py")
    done = CliRunner().invoke(main, ["run", "--auto", missing, "--workers=2", "--epochs", "3"])
    assert done.exit_code, "there is no such script"
    assert (
        done.output.count("--workers stands after") == 1 and "put options of swell before it" in done.output
    )
    assert "--epochs" not in done.output, "that is the script's own"
    assert misplaced(["--lr", "1"], ["--workers"]) == []


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(True, "is over: training is over"), (False, "does not answer; it is starting, or was killed")],
)
def test_a_job_that_does_not_run_says_so_when_it_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, expected: str
) -> None:
    monkeypatch.setenv("SWELL_HOME", str(tmp_path))
    job = JobDirectory.create(tmp_path / "jobs" / "digits", {"launch": "1"})
    if ended:
        job.append_event({"event": "finish", "reason": "training is over"})
    done = CliRunner().invoke(main, ["resize", "digits", "2"])
    assert done.exit_code == 1 and expected in done.output
    assert "swell run --name digits" in done.output and "Errno" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["resize", "digits"],
            "--min, --max or --no-max for a submitted job, or WORKERS for a job of `swell run`",
        ),
        (["resize", "digits", "3", "--max", "4"], "not both"),
        (["resize", "digits", "3"], "bound a submitted job with --min and --max"),
        (["resize", "digits", "--max", "2", "--no-max"], "either --max or --no-max"),
    ],
)
def test_a_resize_that_is_not_clear_is_told_what_to_give(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWELL_HOME", str(tmp_path))
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (1, 2) and said in done.output


def test_the_former_name_of_resize_still_works_and_no_help_shows_it() -> None:
    former, now = (CliRunner().invoke(main, [name, "--help"]) for name in ("scale", "resize"))
    assert former.exit_code == 0 and former.output.partition("\n")[2] == now.output.partition("\n")[2]
    assert "  scale " not in CliRunner().invoke(main, ["--help"]).output
