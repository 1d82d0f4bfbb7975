"""Any program as a job, with real processes: the examples of any-command.md, resized and killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
COMMAND = {"command": True}


def _progress(job: Any) -> int:
    """The last progress that the program reported."""
    found = re.findall(r"progress=(\d+)", job.output())
    return int(found[-1]) if found else 0


def _goes_on(job: Any, more: int = 3) -> None:
    """Wait until the program reports more progress than it has now."""
    reached = _progress(job) + more
    wait_until(lambda: _progress(job) >= reached, 120, lambda: f"progress: {job.output()[-2000:]}")


def _has(job: Any, workers: int) -> None:
    """Wait for a generation of so many workers, and for its first progress."""
    job.wait_for(lambda s: len(s["members"]) == workers and len(s["workers"]) == workers, 120)
    _goes_on(job)


def _pi(steps: int, points: int) -> float:
    """What examples/any_command.sh computes, without it."""
    n = np.arange(steps * points)
    x, y = n * 0.7548776662466927, n * 0.5698402909980532
    return 4 * float(((x % 1) ** 2 + (y % 1) ** 2 < 1).mean())


def test_the_shell_example_gives_the_same_result_whatever_is_resized_or_killed(stage: Any) -> None:
    job = stage.run(EXAMPLES / "any_command.sh", "300", "100", workers=1, maximum=3, settings=COMMAND)
    _goes_on(job)
    job.resize(3)
    _has(job, 3)
    pids = _programs(job)
    assert len(pids) == 3, "one program for each worker"
    before = _progress(job)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: job.events("recovery"), 120, lambda: job.output()[-2000:])
    assert _progress(job) >= before, "it went on from its last save"
    job.kill_coordinator()
    job.resize(2)
    _has(job, 2)
    assert job.wait(120) == 0, job.output()
    assert f"pi is about {_pi(300, 100):.6f}" in job.output()
    sizes = [len(e["members"]) for e in job.events("generation")]
    assert (sizes[0], sizes[-1]) == (1, 2) and set(sizes[1:-1]) == {3}
    assert len(job.events("switch")) == 2 and all(e["pause_s"] > 0 for e in job.events("switch"))
    assert [e["code"] for e in job.events("exited")].count(-9) == 1, "only the one that was killed was lost"
    job.leaves_nothing()


def _programs(job: Any) -> list[int]:
    """The process ids of the programs, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        given = dict(v.partition(b"=")[::2] for v in variables)
        if (
            given.get(b"SWELL_SAVE_NOW", b"").startswith(bytes(job.directory.path))
            and b"any_command" in command
        ):
            rank = int(given[b"SWELL_RANK"])
            found[rank] = min(found.get(rank, 1 << 30), int(process.name))  # a shell has children
    return [found[rank] for rank in sorted(found)]


def test_a_program_that_fails_ends_the_job_with_its_code_and_last_words(stage: Any, tmp_path: Path) -> None:
    script = tmp_path / "fails.sh"
    script.write_text("#!/bin/sh\necho no such data >&2\nexit 3\n")
    script.chmod(0o755)
    job = stage.run(script, settings=COMMAND)
    assert job.wait(60) == 3
    assert "no such data" in job.events("finish")[0]["reason"]
    script.chmod(0o644)
    job = stage.run(script, settings=COMMAND, workers=1)
    assert job.wait(60) == 126 and "is it executable?" in job.output()


def test_a_program_may_ask_for_a_signal_in_place_of_the_file(stage: Any, tmp_path: Path) -> None:
    script = tmp_path / "trap.sh"
    script.write_text(
        "#!/bin/sh\ntrap 'echo saved > $SWELL_STATE/s; exit 75' TERM\n"
        '[ -f $SWELL_STATE/s ] && echo "goes on with $SWELL_WORKERS" && exit 0\n'
        "echo swell: progress=1\nwhile :; do sleep 0.02; done\n"
    )
    script.chmod(0o755)
    job = stage.run(script, settings=COMMAND, workers=1, env={"SWELL_SAVE_SIGNAL": "TERM"})
    _goes_on(job, 1)
    job.resize(2)
    assert job.wait(60) == 0, job.output()
    assert "goes on with 2" in job.output()


def test_no_part_of_swell_that_such_a_job_needs_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a machine without torch')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "swell", "run", "--command", "--workers", "2", "--", "sh", "-c",
         'echo "rank $SWELL_RANK of $WORLD_SIZE meets at $SWELL_MEET"; echo "job ${SWELL_JOB_DIR:-hidden}"'],
        env=os.environ | {"PYTHONPATH": path, "SWELL_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    places = set(re.findall(r"rank \d of 2 meets at (127.0.0.1:\d+)", done.stdout))
    assert len(places) == 1 and "rank 0" in done.stdout and "rank 1" in done.stdout
    assert "job hidden" in done.stdout, "the program does not take itself for a worker of swell's runtime"


def _regression(steps: int) -> tuple[float, float]:
    """Accuracy and sum of weights of examples/jax_digits.py, in numpy."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    w, b = np.zeros((64, 10), np.float32), np.zeros(10, np.float32)
    for step in range(steps):
        chosen = np.random.default_rng(step).choice(len(labels), 240, replace=False)
        x, y = images[chosen], labels[chosen]
        logits = x @ w + b
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(240), y] -= 1
        w, b = w - 0.5 * x.T @ p / 240, b - 0.5 * p.mean(0)
    return float(((images @ w + b).argmax(1) == labels).mean()), float(np.abs(w).sum())


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_the_jax_example_resized_twice_gives_the_same_result_as_alone(stage: Any) -> None:
    """Two processes of JAX in the middle generation, so that its own collective is used."""
    job = stage.run(
        Path(sys.executable), str(EXAMPLES / "jax_digits.py"), "--steps", "400",
        "--step-ms",
        "10",
        workers=1, maximum=2, settings=COMMAND,
    )  # fmt: skip
    _goes_on(job, 10)
    for workers in (2, 1):
        job.resize(workers)
        _has(job, workers)
    assert job.wait(200) == 0, job.output()[-3000:]
    ((accuracy, weights),) = re.findall(r"final accuracy ([\d.]+) loss \S+ weights ([\d.]+)", job.output())
    expected = _regression(400)
    assert float(accuracy) == pytest.approx(expected[0], abs=0.002)
    assert float(weights) == pytest.approx(expected[1], rel=1e-3)
    assert [len(e["members"]) for e in job.events("generation")] == [1, 2, 1], "nothing died on the way"
