"""The work of a batch divided where a script calls its model: the same numbers as on one worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "plain_scripts" / "whole_batch.py"
STEPS = 120
BESIDE = [pytest.mark.long, pytest.mark.gallery]
"""The wider forms, which CI runs beside the suite."""


def _plain(form: str, folder: Path) -> dict[str, Any]:
    subprocess.run([sys.executable, SCRIPT, form, str(STEPS), "0", folder], check=True, timeout=120)
    found: dict[str, Any] = json.loads((folder / "plain.json").read_text())
    return found


def _check(job: Any, folder: Path, expected: dict[str, Any], workers: int) -> None:
    assert job.wait() == 0, job.output()
    assert "cannot be shared" not in job.output(), job.output()
    odd = job.events("differs") + job.events("could_not_follow")
    assert not odd, str(odd)
    results = list(folder.glob("w*.json"))
    assert len(results) >= workers, "all of them ran the script to its end"
    for path in results:
        found = json.loads(path.read_text())
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-8, abs=1e-10)
        own = found["losses"]
        assert own == pytest.approx(expected["losses"][-len(own) :], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize(
    "form", ["gradients", *(pytest.param(form, marks=BESIDE) for form in ("clip", "triplets"))]
)
def test_losses_over_the_whole_batch_are_those_of_a_plain_run(stage: Any, tmp_path: Path, form: str) -> None:
    expected = _plain(form, tmp_path)
    arguments = [form, str(STEPS), "0.01", str(tmp_path)]
    job = stage.run(SCRIPT.read_text(), *arguments, workers=1, settings={"auto": True})
    job.members(1)
    job.resize(3)
    job.members(3)
    job.wait_for(lambda s: s["step"] >= 50)
    job.resize(2)
    job.members(2)
    _check(job, tmp_path, expected, 2)


PLACES = {
    "before the call": "clip",
    "after the call": "loss",
    "in its part": "two",
    "after backward": "penalized",
}


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("penalized", "as backward begins"),
        *(pytest.param(form, place, marks=BESIDE) for place, form in PLACES.items()),
    ],
)
def test_a_death_anywhere_in_a_step_changes_nothing(
    stage: Any, tmp_path: Path, form: str, place: str
) -> None:
    expected = _plain(form, tmp_path)
    arguments = [form, str(STEPS), "0.01", str(tmp_path), place]
    job = stage.run(SCRIPT.read_text(), *arguments, workers=3, settings={"auto": True})
    job.members(3)
    job.wait_for(lambda s: s["step"] >= 62)
    _check(job, tmp_path, expected, 2)


def test_a_death_while_a_model_is_tried_leaves_nothing_behind(stage: Any, tmp_path: Path) -> None:
    """What the one that is left has noted of that batch is of no concern to the next one that comes."""
    expected = _plain("two", tmp_path)
    arguments = ["two", str(STEPS), "0.01", str(tmp_path), "in a trial"]
    job = stage.run(SCRIPT.read_text(), *arguments, workers=2, settings={"auto": True})
    job.wait_for(lambda s: len(s["members"]) == 2 and "w1" not in s["members"])
    _check(job, tmp_path, expected, 2)
