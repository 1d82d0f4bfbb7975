"""The examples run as they are, alone and as elastic jobs, and learn what they promise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.runtime.examples import FINAL, STATED, run

EXAMPLES = Path(__file__).parents[2] / "examples"
BRIEF = {
    "digits_cnn": ["--epochs", "1"],
    "tiny_gpt": ["--epochs", "1", "--windows", "256", "--width", "32", "--layers", "1"],
    "recommender": ["--epochs", "1", "--batch-size", "2000"],
    "plain_mnist_style": ["--epochs", "1"],
    "nano_gpt": ["--steps", "6", "--width", "32", "--layers", "1", "--eval-every", "3"],
    "gan": ["--epochs", "2"],
}
FRAMEWORKS = {
    "trainer_reviews": ("transformers", ["--epochs", "1", "--reviews", "96"]),
    "lora_reviews": ("peft", ["--epochs", "1", "--reviews", "96"]),
    "lightning_digits": ("lightning", ["--epochs", "1"]),
    "accelerate_digits": ("accelerate", ["--epochs", "1"]),
}
"""Examples of a framework, which run under `--auto`, or say what to install where it is absent."""
ELSEWHERE = {"signals", "jax_digits", "xgboost_digits", "sharded_gpt"}
"""Examples that test_command.py, test_boosting.py and test_replicas.py run."""


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
        ("nano_gpt", ""),
        pytest.param("gan", "", marks=[pytest.mark.long, pytest.mark.gallery]),
    ],
)
def test_an_example_runs_on_two_workers_in_its_modes(stage: Any, name: str, mode: str) -> None:
    modes = ["--mode", mode] if mode else []
    job = stage.run(EXAMPLES / f"{name}.py", *BRIEF[name], *modes, workers=2)
    assert job.wait(120) == 0, job.output()
    assert _quality(job.output()) > 0


@pytest.mark.parametrize(
    "name",
    # test_plain_scripts.py has the other frameworks, on changing workers.
    [name if name == "lora_reviews" else pytest.param(name, marks=pytest.mark.long) for name in FRAMEWORKS],
)
def test_an_example_of_a_framework_runs_unchanged_or_says_what_is_missing(stage: Any, name: str) -> None:
    needs, brief = FRAMEWORKS[name]
    if importlib.util.find_spec(needs) is None:
        env = {"PYTHONPATH": "", "PATH": os.environ["PATH"]}
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1 and "pip install" in done.stderr and "Traceback" not in done.stderr
        return
    workers = 2 if name == "lora_reviews" else 1
    job = stage.run(EXAMPLES / f"{name}.py", *brief, workers=workers, settings={"auto": True})
    assert job.wait(250) == 0, job.output()
    assert 0 <= _quality(job.output()) <= 1


def test_every_example_is_tested_and_named_in_the_guide() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(BRIEF) | set(FRAMEWORKS) | ELSEWHERE
    guide = (EXAMPLES.parent / "docs" / "guides" / "training.md").read_text()
    assert all(f"{name}.py" in guide for name in names)


def test_the_index_states_what_is_checked() -> None:
    rows = (EXAMPLES / "README.md").read_text().splitlines()
    stated = {name: row for row in rows for name in STATED if row.startswith(f"| [{name}.py]")}
    assert set(stated) == set(STATED) == set(BRIEF) | set(FRAMEWORKS) | ELSEWHERE - {"signals"}
    assert [name for name, row in stated.items() if f"| {STATED[name]} |" not in row] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STATED)
def test_an_example_reaches_what_the_index_states(name: str) -> None:
    if importlib.util.find_spec(STATED[name].needs) is None:
        pytest.skip(f"{STATED[name].needs} is not installed")
    quality, _ = run(name, workers=2)
    assert STATED[name].is_reached(quality), f"{quality}, stated: {STATED[name]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "promised", "better"),
    [
        pytest.param("digits_cnn", [], 0.975, 1, marks=pytest.mark.long),
        ("recommender", ["--epochs", "4"], 0.5, -1),
    ],
)
def test_an_example_runs_alone_and_learns_what_it_promises(
    name: str, arguments: list[str], promised: float, better: int
) -> None:
    quality = _quality(_alone(name, *arguments))
    assert quality * better >= promised * better, f"{quality} against {promised}"
