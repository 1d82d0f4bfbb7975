"""Scripts in everyone's style, unchanged, on changing workers (tests/train/plain_scripts)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "plain_scripts"


def _run(stage: Any, name: str, *arguments: str, **config: Any) -> Any:
    settings = {"auto": True, **config.pop("settings", {})}
    return stage.run(SCRIPTS / name, *arguments, settings=settings, workers=1, minimum=1, **config)


def _resize(job: Any, *counts: int, timeout_s: float = 60.0) -> None:
    """Change the workers and wait until these have made some steps together.

    A newcomer whose script turns out to be at another place is replaced by another one.
    """
    for count in counts:
        job.resize(count)
        while True:
            status = job.wait_for(lambda s, n=count: len(s["members"]) == n and s["step"], timeout_s)
            there = job.wait_for(lambda s, begin=status["step"]: s["step"] >= begin + 3, timeout_s)
            if there["members"] == status["members"]:
                break


def _whole_schedule(job: Any, timeout_s: float = 60.0, victim: int = -1) -> None:
    """1 -> 2 -> 3 workers, a kill -9, 1 -> 3."""
    _resize(job, 2, 3, timeout_s=timeout_s)
    job.kill(victim)
    _resize(job, 1, 3, timeout_s=timeout_s)


def _result(job: Any, timeout_s: float = 120.0) -> dict[str, Any]:
    assert job.wait(timeout_s) == 0, job.output()
    found = [line for line in job.output().splitlines() if '{"' in line]
    assert len(found) == 1, f"only the leader speaks: {job.output()}"
    result: dict[str, Any] = json.loads(found[0][found[0].index('{"') :])
    return result


@pytest.mark.parametrize(
    "reduction", ["mean", pytest.param("sum", marks=[pytest.mark.long, pytest.mark.gallery])]
)
def test_files_own_checkpoints_packages_sums_and_layers_unfrozen_later(
    stage: Any, tmp_path: Path, reduction: str
) -> None:
    job = _run(stage, "everyday.py", "80", "0.008", str(tmp_path), reduction, maximum=3)
    lost = 0 if reduction == "mean" else 1  # what a leader was about to write when it was killed
    _whole_schedule(job, victim=0 if lost else -1)  # a leader's files move to another worker
    result = _result(job)
    assert result["final"] == result["best"] < 0.16, "plain runs in six orders: 0.013 to 0.108"
    assert 640 <= result["steps"] <= 644, "one more for each batch whose samples came again"
    rows = (tmp_path / "curve.csv").read_text().splitlines()[1:]
    logged = [line.removeprefix("epoch ") for line in (tmp_path / "train.log").read_text().splitlines()]
    for epochs in ([int(row.split(",")[0]) for row in rows], [int(epoch) for epoch in logged]):
        assert epochs == sorted(set(epochs)), "each epoch's line at most once, in order"
        assert set(epochs) <= set(range(80)) and len(epochs) >= 80 - lost
    assert (tmp_path / "best.pt").read_bytes() == (tmp_path / "copy.pt").read_bytes() != b""
    losses = [float(row.split(",")[1]) for row in rows]
    assert min(losses) == pytest.approx(result["best"])


def test_batches_drawn_ahead_from_an_endless_sampler(stage: Any) -> None:
    job = _run(stage, "prefetch.py", "500", "0.004", maximum=3)
    _whole_schedule(job)
    result = _result(job)
    assert result["steps"] == 500 and result["final"] < 0.06
    assert "could not follow" not in job.output()


@pytest.mark.long
@pytest.mark.gallery
def test_two_optimizers_of_a_gan_are_elastic(stage: Any) -> None:
    job = _run(stage, "gan.py", "60", "0.004", maximum=3)
    _whole_schedule(job)
    result = _result(job)
    assert 600 <= result["count"] <= 602 and result["off"] < 0.8


def _needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (pip install 'swell[frameworks]')")


def _brief_schedule(job: Any, timeout_s: float = 60.0) -> None:
    """1 -> 2 workers, a kill -9, and on with 1: every start of a worker imports its framework."""
    _resize(job, 2, timeout_s=timeout_s)
    job.kill(-1)
    _resize(job, 1, timeout_s=timeout_s)


_WHOLE = pytest.param(_whole_schedule, marks=pytest.mark.long)
_SCHEDULES = pytest.mark.parametrize("schedule", [_brief_schedule, _WHOLE])
_BESIDE = pytest.param(_brief_schedule, marks=[pytest.mark.long, pytest.mark.gallery])
_LONG_SCHEDULES = pytest.mark.parametrize("schedule", [_BESIDE, _WHOLE])
"""For frameworks that are imported for seconds: CI runs the brief one beside the suite."""


def _resumed(stage: Any, schedule: Any, name: str, folder: Path, epochs: int, pace: float) -> Any:
    """A plain run that is interrupted after two epochs, resumed from its own checkpoint as a job that goes
    through a schedule; the script's pauses end with the last resize."""
    first = [sys.executable, str(SCRIPTS / name), str(epochs), "0", str(folder), "stop=2"]
    done = subprocess.run(first, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hurry = folder / "hurry"
    job = _run(stage, name, str(epochs), f"{pace}:{hurry}", str(folder), "resume=1", maximum=3)
    job.wait_for(lambda s: s["step"], 250.0)
    hurry.with_suffix(".late").touch()
    schedule(job, 250.0)
    hurry.touch()
    return job


@pytest.mark.slow  # most of it waits: imports of the framework, and steps with a pause
@pytest.mark.timeout(900)
@_LONG_SCHEDULES
@_needs("transformers")
def test_the_trainer_of_hugging_face(stage: Any, tmp_path: Path, schedule: Any) -> None:
    job = _resumed(stage, schedule, "hugging_face.py", tmp_path, 20, 0.3)
    result = _result(job, 250.0)
    assert "could not follow" not in job.output()
    assert result["steps"] == 400 and result["counted"] == 400 - 2 * 20 and result["epoch"] == 20.0
    assert result["logged"] == list(range(5, 401, 5)), "the log history is continuous"
    assert result["evaluated"] == [*range(20, 401, 20), 400] and result["lr"] == pytest.approx(0.0, abs=1e-9)
    assert 0.09 < result["final"] < 0.125, "plain runs: 0.103 to 0.108; with gradients twice as large 0.04"
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2, "save_total_limit"


@pytest.mark.slow  # most of it waits: imports of the framework, and steps with a pause
@pytest.mark.timeout(900)
@_SCHEDULES
@_needs("accelerate")
def test_a_loop_with_accelerate(stage: Any, tmp_path: Path, schedule: Any) -> None:
    job = _resumed(stage, schedule, "accelerated.py", tmp_path, 60, 0.05)
    result = _result(job, 250.0)
    assert 58 * 16 <= result["steps"] <= 58 * 16 + 2, "one more for each batch whose samples came again"
    assert result["lr"] == pytest.approx(0.025), "the schedule went on where the first run ended"
    assert result["final"] < 0.04
    assert len(list(tmp_path.glob("state-*"))) == 60, "a folder for each epoch, of both runs"


@pytest.mark.slow  # most of it waits: imports of the framework, and steps with a pause
@pytest.mark.timeout(900)
@_LONG_SCHEDULES
@_needs("lightning")
def test_lightnings_trainer_fit(stage: Any, tmp_path: Path, schedule: Any) -> None:
    job = _resumed(stage, schedule, "lightning_fit.py", tmp_path, 150, 0.05)
    result = _result(job, 250.0)
    assert 148 * 8 <= result["batches"] <= 148 * 8 + 2, "one more for each batch whose samples came again"
    assert 600 <= result["steps"] <= 602 and result["epoch"] == 150, "of both runs together"
    assert result["lr"] == pytest.approx(0.05 * 0.7**15) and result["final"] < 0.06
    assert result["best"].startswith("best") and list(tmp_path.glob("best*.ckpt"))
