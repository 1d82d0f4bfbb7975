"""What `swell run` tells of a job."""

from __future__ import annotations

from typing import Any

from swell.cli.run import Story
from swell.cli.submit import misplaced

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
