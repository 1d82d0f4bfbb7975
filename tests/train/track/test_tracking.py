"""Experiment trackers get one continuous run per job; tested against the real libraries."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.train.track.process import FILE, Tracking, figures_of


def _needs(module: str) -> Any:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed (swell[track])")


def _report(step: int, **more: Any) -> dict[str, Any]:
    return {"rank": 0, "step": step, "done": step, "of": 20, "workers": 2, "loss": 1 / (step + 1), **more}


def _run_twice(tracker: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps 1 to 5, a death, then again from step 3, as from a checkpoint, to step 9 with other workers."""
    monkeypatch.chdir(path)
    said: list[str] = []
    first = Tracking([tracker], "digits", path / FILE, said.append)
    for step in range(1, 6):
        first.take(_report(step, metrics={"accuracy": 0.5}))
    first.end("stopped")  # or killed: nothing else is needed for what follows
    second = Tracking([tracker], "digits", path / FILE, said.append)
    for step in range(3, 10):
        second.take(_report(step, workers=3))
        second.take(_report(step + 5, rank=1))  # not the leader's
    second.end("finished")
    return said


def _scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: by name, the steps and values in the order they were written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("events.*"), key=lambda p: p.stat().st_ctime_ns):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


@_needs("tensorboard")
def test_tensorboard_gets_one_run_whose_steps_never_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run_twice("tensorboard:runs", tmp_path, monkeypatch) == []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]
    found = _scalars(tmp_path / "runs" / "digits")
    assert [step for step, _ in found["loss"]] == list(range(1, 10))
    assert found["loss"][3][1] == pytest.approx(1 / 5)
    assert found["accuracy"] == [(1, 0.5)], "computed once: one point"
    assert [(step, value) for step, value in found["swell/workers"]] == [(1, 2.0), (6, 3.0)]


@_needs("tensorboard")
def test_metrics_that_come_after_the_last_step_are_written_at_that_step(tmp_path: Path) -> None:
    tracking = Tracking([f"tensorboard:{tmp_path / 'runs'}"], "digits", tmp_path / FILE, print)
    for _ in range(3):  # as heartbeats repeat it
        tracking.take(_report(9))
    for _ in range(3):
        tracking.take(_report(9, metrics={"accuracy": 0.75}))
    tracking.end("finished")
    found = _scalars(tmp_path / "runs" / "digits")
    assert found["accuracy"] == [(9, 0.75)] and len(found["loss"]) == 1
    again = Tracking([f"tensorboard:{tmp_path / 'runs'}"], "digits", tmp_path / FILE, print)
    again.take(_report(9, metrics={"accuracy": 0.75}))  # of a job that repeats the step
    again.end("finished")
    assert _scalars(tmp_path / "runs" / "digits")["accuracy"] == [(9, 0.75)]


@_needs("mlflow")
def test_mlflow_gets_one_run_whose_steps_never_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run_twice("mlflow:mlruns", tmp_path, monkeypatch) == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("swell")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "digits" and run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == list(range(1, 10))


def _wandb_parts(directory: Path) -> list[str]:
    """The run that each part belongs to; a folder's name says it too, unless two began in one second."""
    files = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    return [file.stem.removeprefix("run-") for file in files]


@_needs("wandb")
@pytest.mark.slow
def test_wandb_gets_the_parts_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert _run_twice("wandb:swell-test", tmp_path, monkeypatch) == []
    key = json.loads((tmp_path / FILE).read_text())["wandb:swell-test"]["id"]
    assert _wandb_parts(tmp_path) == [key, key]


def test_a_tracker_that_fails_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    tracking = Tracking([f"tensorboard:{tmp_path / 'file'}"], "digits", tmp_path / FILE, said.append)
    tracking.take(_report(1))
    tracking.end("finished")
    assert len(said) == 1 and "was given up" in said[0] and str(tmp_path / "file") in said[0]


def test_a_share_of_the_whole_becomes_a_step() -> None:
    assert figures_of({"done": 0.25, "of": 1.0, "rank": 0}) == (
        250, {"swell/workers": 1.0, "swell/progress": 0.25}
    )  # fmt: skip
    assert figures_of({"done": 3, "rank": 1}) is None
    assert figures_of({"done": 3, "loss": float("nan"), "metrics": {"a": "b"}}) == (3, {"swell/workers": 1.0})


@_needs("tensorboard")
def test_a_job_of_any_kind_is_tracked_through_a_resize_and_a_death(stage: Any, tmp_path: Path) -> None:
    script = tmp_path / "count.sh"
    script.write_text(
        '#!/bin/sh\n[ "$SWELL_RANK" -gt 0 ] && exec sleep 100\n'
        'i=0; [ -f "$SWELL_STATE/i" ] && i=$(cat "$SWELL_STATE/i")\n'
        'while [ "$i" -lt 12 ]; do\n'
        '  i=$((i + 1)); echo "swell: progress=$i of=12 loss=0.$i"\n'
        "  [ $i = 8 ] && [ $SWELL_GENERATION = 2 ] && kill -9 $$\n"  # after progress that is not saved
        '  [ $i = 6 ] && echo 6 > "$SWELL_STATE/i"\n'
        "  while [ $i = 6 ] && [ $SWELL_GENERATION = 1 ]; do\n"
        '    [ -e "$SWELL_SAVE_NOW" ] && exit 75; sleep 0.05\n'
        "  done\n"
        "  sleep 0.3\ndone\n"
    )
    script.chmod(0o755)
    runs = tmp_path / "runs"
    settings = {"command": True, "track": [f"tensorboard:{runs}"]}
    job = stage.run(script, settings=settings, workers=1, maximum=2, name="count")
    wait_until(lambda: "progress=6" in job.output(), 60, job.output)
    wait_until(lambda: "loss" in _scalars(runs / "count"), 120, "the tracker to begin")
    job.resize(2)
    assert job.wait(120) == 0, job.output()
    assert job.output().count("progress=7 ") == 2, "the death made it go back"
    found = _scalars(runs / "count")
    steps = [step for step, _ in found["loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == 12 and len(steps) >= 4, steps
    assert [value for _, value in found["swell/workers"]] == [1.0, 2.0]


@_needs("tensorboard")
def test_a_job_that_ends_before_its_tracker_is_ready_is_tracked(stage: Any, tmp_path: Path) -> None:
    script = tmp_path / "short.sh"
    script.write_text("#!/bin/sh\necho swell: progress=3 of=3 loss=0.5\necho swell: accuracy=0.75\n")
    script.chmod(0o755)
    settings = {"command": True, "track": [f"tensorboard:{tmp_path / 'runs'}"]}
    job = stage.run(script, settings=settings, workers=1, maximum=1, name="short")
    assert job.wait(120) == 0, job.output()
    found = _scalars(tmp_path / "runs" / "short")
    assert (found["loss"], found["accuracy"]) == ([(3, 0.5)], [(3, 0.75)])


@_needs("tensorboard")
@_needs("mlflow")
@_needs("wandb")
@pytest.mark.long  # its cheap form is in test_auto_trackers.py
def test_a_script_that_logs_by_itself_has_one_run_through_new_leaders_and_a_restart(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    hurry = tmp_path / "hurry"
    script = Path(__file__).parents[1] / "plain_scripts" / "tracked.py"
    settings = {"auto": True, "checkpoint_s": 0.5}
    arguments = ("60", f"0.05:{hurry}", str(tmp_path))
    job = stage.run(script, *arguments, settings=settings, workers=1, minimum=1, maximum=2)
    job.wait_for(lambda s: s["step"] > 3, 100.0)
    job.resize(2)
    grown = job.wait_for(lambda s: len(s["members"]) == 2 and s["step"] > 20, 100.0)
    first = job.kill(0)
    led = job.wait_for(lambda s: first not in s["members"] and s["step"] > grown["step"] + 20, 100.0)
    for _ in led["members"]:
        job.kill(0)
    job.wait_for(lambda s: not set(led["members"]) & set(s["members"]) and s["step"] > led["step"], 100.0)
    hurry.touch()
    assert job.wait(120.0) == 0, job.output()

    board = [step for step, _ in _scalars(tmp_path / "board")["loss"]]
    assert board == sorted(set(board)) and board[-1] >= 480 and len(board) > 400, board

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("plain")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "loss")]
    assert steps == sorted(set(steps)) and steps[-1] == board[-1] and len(steps) > 470, steps
    assert run.info.status == "FINISHED" and run.data.params == {"epochs": "60"}

    parts = _wandb_parts(tmp_path)
    assert 1 <= len(parts) <= 3 and len(set(parts)) == 1, "one for each leader, with one id"
