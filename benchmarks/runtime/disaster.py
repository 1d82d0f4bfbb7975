"""The worst cases: everybody dead, a damaged checkpoint, a full disk, a coordinator that dies again and
again.

    python -m benchmarks.runtime.disaster [--quick] [--out FILE]

- all workers killed with -9 at random moments: training resumes from the last checkpoint. What is lost is at
most the interval
  (the checkpoint due last may still be being written; those steps are counted and shown too);
- the whole job killed and the newest checkpoint truncated: the next run says so and goes on from the one
before;
- the disk full while saving (a real one, a tiny tmpfs): training goes on to its end and says so;
- the coordinator killed and restarted: no step is lost.
Every run must end by itself, with the same number of steps as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runtime.session import Session, print_figures
from swell.train.agent.jobdir import JobDirectory
from swell.train.state.checkpoint import list_checkpoints

SCRIPT = Path(__file__).with_name("quality_task.py")
INTERVAL = 40
"""Steps between two checkpoints."""
WRITING = 20
"""Steps that may pass while a checkpoint is being written: until it is on disk the one before counts."""
PACE_S = 0.01
EPOCH_STEPS = 44


def _arguments(folder: Path, *, epochs: float, checkpoints: Path) -> list[str]:
    return [
        "--task", "digits", "--epochs", str(epochs / 12), "--pace", str(PACE_S),
        "--checkpoints", str(checkpoints), "--checkpoint-steps", str(INTERVAL),
        "--trace", str(folder / "steps"), "--out", str(folder / "result.json"),
    ]  # fmt: skip


def everybody_dies(times: int, seed: int = 0) -> dict[str, Any]:
    """Kill all workers `times` times at random moments of one run."""
    rng = random.Random(seed)
    deaths: list[tuple[float, int]] = []
    epochs = 12 + 3 * times  # every death costs up to an interval; there must be enough left to train
    with tempfile.TemporaryDirectory(prefix="swell-disaster-") as name:
        folder = Path(name)
        arguments = _arguments(folder, epochs=epochs, checkpoints=folder / "checkpoints")
        with Session(folder, SCRIPT, arguments, start=2) as job:
            for _ in range(times):
                # At a random moment after training has come further than before: a job that dies again and
                # again without doing so is given up, on purpose.
                reached = max(_trace(folder), default=0)
                if job.until(_further_than(folder, reached), 180) is None:
                    break
                time.sleep(rng.uniform(0.0, 3 * INTERVAL * PACE_S))
                status = job.status()
                if status is None or job.kill_workers(status) == 0:
                    break
                deaths.append((time.time(), _trace(folder)[-1]))
            code = job.wait(600)
            events = JobDirectory(job.directory).events()
        result, trace = _result(folder), _trace(folder)
    begun = [(e["time_s"], int(e["step"])) for e in events if e["event"] == "generation"]
    lost, downtime_s = [], []
    for at, step in deaths:
        resumed_at, resumed_step = next((b for b in begun if b[0] > at), (at, step))
        lost.append(step - resumed_step)
        downtime_s.append(round(resumed_at - at, 2))
    return {
        "times": len(deaths),
        "exit_code": code,
        "steps": result.get("steps"),
        "expected_steps": epochs * EPOCH_STEPS,
        "steps_done_twice": len(trace) - len(set(trace)),
        "score": result.get("score"),
        "interval_steps": INTERVAL,
        "lost_steps": lost,
        "lost_steps_median": statistics.median(lost) if lost else None,
        "lost_steps_max": max(lost, default=None),
        "downtime_s_median": statistics.median(downtime_s) if lost else None,
        "downtime_s_max": max(downtime_s, default=None),
        "passed": code == 0
        and len(deaths) == times
        and result.get("steps") == epochs * EPOCH_STEPS
        and set(trace) == set(range(1, epochs * EPOCH_STEPS + 1))
        and max(lost) <= INTERVAL + WRITING,
    }


def _further_than(folder: Path, step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda _status: max(_trace(folder), default=0) > step


def _trace(folder: Path) -> list[int]:
    """The committed steps in the order in which they were."""
    path = folder / "steps"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def truncated_newest() -> dict[str, Any]:
    """Kill the whole job, cut the newest checkpoint in half, start it again."""
    with tempfile.TemporaryDirectory(prefix="swell-disaster-") as name:
        folder, checkpoints = Path(name), Path(name) / "checkpoints"
        arguments = _arguments(folder, epochs=8, checkpoints=checkpoints)
        with Session(folder, SCRIPT, arguments, start=2, name="first") as job:
            job.until(lambda s: len(list_checkpoints(checkpoints)) >= 3, 120)
        newest, before = list_checkpoints(checkpoints)[-1], list_checkpoints(checkpoints)[-2]
        data = next(newest.glob("*.distcp"))
        os.truncate(data, data.stat().st_size // 2)
        with Session(folder, SCRIPT, arguments, start=2, name="second") as job:
            code = job.wait(300)
            output = job.output()
        result = _result(folder)
    said = f"{newest.name} cannot be used" in output and "falling back to the one before" in output
    resumed = f"resumed from {checkpoints / before.name}" in output
    return {
        "exit_code": code,
        "steps": result.get("steps"),
        "said_so": said,
        "resumed_from_the_one_before": resumed,
        "passed": code == 0 and said and resumed and result.get("steps") == 8 * EPOCH_STEPS,
    }


def disk_full() -> dict[str, Any]:
    """Checkpoints on a disk of 200 kB."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        return {"skipped": "no right to mount a tiny disk here", "passed": True}
    with tempfile.TemporaryDirectory(prefix="swell-disaster-") as name:
        folder, checkpoints = Path(name), Path(name) / "checkpoints"
        checkpoints.mkdir()
        mount = f'mount -t tmpfs -o size=200k tmpfs "{checkpoints}" && exec "$@"'
        arguments = _arguments(folder, epochs=6, checkpoints=checkpoints)
        prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
        with Session(folder, SCRIPT, arguments, start=2, prefix=prefix) as job:
            code = job.wait(300)
            output = job.output()
        result = _result(folder)
    said = output.count("not saved, training goes on: no space left")
    return {
        "exit_code": code,
        "steps": result.get("steps"),
        "score": result.get("score"),
        "said_so": said,
        "passed": code == 0 and said >= 1 and result.get("steps") == 6 * EPOCH_STEPS,
    }


def coordinator_dies(times: int, seed: int = 0) -> dict[str, Any]:
    """Kill the coordinator `times` times while training goes on, resizing in between."""
    rng = random.Random(seed)
    steps: list[int] = []
    epochs = 6 + 2 * times
    with tempfile.TemporaryDirectory(prefix="swell-disaster-") as name:
        folder = Path(name)
        arguments = _arguments(folder, epochs=epochs, checkpoints=folder / "checkpoints")
        killed = 0
        with Session(folder, SCRIPT, arguments, start=2) as job:
            job.until(lambda s: s["step"] > 0, 120)
            for i in range(times):
                time.sleep(rng.uniform(0.1, 0.4))
                status = job.status()
                if status is None:
                    break
                steps.append(status["step"])
                pid = json.loads((job.directory / "coordinator.json").read_text())["pid"]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                if i % 3 == 2:
                    job.resize(1 + i % 2 + 1)
            code = job.wait(600)
            output = job.output()
        result = _result(folder)
    return {
        "killed": killed,
        "exit_code": code,
        "steps": result.get("steps"),
        "expected_steps": epochs * EPOCH_STEPS,
        "steps_seen": steps,
        "never_resumed": "resumed from" not in output,
        "passed": code == 0
        and killed == times
        and result.get("steps") == epochs * EPOCH_STEPS
        and steps == sorted(steps)
        and "resumed from" not in output,
    }


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def run(*, quick: bool = False) -> dict[str, Any]:
    """All disasters; `quick` is the size of a test."""
    begin = time.monotonic()
    figures: dict[str, Any] = {
        "everybody_dies": everybody_dies(2 if quick else 20),
        "truncated_newest": truncated_newest(),
        "disk_full": disk_full(),
        "coordinator_dies": coordinator_dies(2 if quick else 10),
    }
    figures["passed"] = all(figure["passed"] for figure in figures.values())
    figures["wall_s"] = round(time.monotonic() - begin, 1)
    return figures


if __name__ == "__main__":
    print_figures(__doc__ or "", lambda quick: run(quick=quick))
