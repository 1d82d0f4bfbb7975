"""The examples run as they are, alone and as elastic jobs, and learn what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BRIEF = {
    "digits_cnn": ["--epochs", "1"],
    "tiny_gpt": ["--epochs", "1", "--windows", "256", "--width", "32", "--layers", "1"],
    "recommender": ["--epochs", "1", "--batch-size", "2000"],
    "plain_mnist_style": ["--epochs", "1"],
}
ELSEWHERE = {"signals", "jax_digits", "xgboost_digits", "sharded_gpt"}
"""Examples that test_command.py, test_boosting.py and test_replicas.py run."""
FINAL = re.compile(r"final (?:accuracy|validation loss|test error|loss \S+ accuracy) (\d+\.\d+)")


def _alone(name: str, *arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _quality(output: str) -> float:
    found = FINAL.findall(output)
    assert len(found) == 1, f"one worker says the result, once: {output}"
    return float(found[0])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("digits_cnn", "fixed"),
        ("tiny_gpt", "adaptive"),
        ("recommender", "fixed"),
        ("digits_cnn", "consistent"),
    ],
)
def test_an_example_runs_on_two_workers_in_its_modes(stage: Any, name: str, mode: str) -> None:
    job = stage.run(EXAMPLES / f"{name}.py", *BRIEF[name], "--mode", mode, workers=2)
    assert job.wait(120) == 0, job.output()
    assert _quality(job.output()) > 0


def test_every_example_is_tested_and_named_in_the_guide() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(BRIEF) | ELSEWHERE
    guide = (EXAMPLES.parent / "docs" / "training.md").read_text()
    assert all(f"{name}.py" in guide for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "promised", "better"),
    [
        ("digits_cnn", [], 0.975, 1),
        ("recommender", ["--epochs", "4"], 0.5, -1),
    ],
)
def test_an_example_runs_alone_and_learns_what_it_promises(
    name: str, arguments: list[str], promised: float, better: int
) -> None:
    quality = _quality(_alone(name, *arguments))
    assert quality * better >= promised * better, f"{quality} against {promised}"
