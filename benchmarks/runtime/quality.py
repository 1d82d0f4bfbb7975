"""Does elasticity change the model? Scores under changing workers against the spread of undisturbed runs.

    python -m benchmarks.runtime.quality [--quick] [--out FILE]

For each task (a CNN on digits with SGD, a small GPT with AdamW):
- five undisturbed runs on one worker at the tuned batch give the spread;
- *fixed*, *adaptive* and *consistent* runs go through 1 -> 3 -> 2 -> kill -9 -> 1 -> 3 workers; each must end
within the
  spread: not below the mean minus two standard deviations (a deviation counts at least `FLOOR`);
- *adaptive* on 1 and on 3 workers: more workers, fewer optimizer steps;
- its noise scale against many gradients at fixed weights: within 20%.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.session import Session, print_figures

SCRIPT = Path(__file__).with_name("quality_task.py")
TASKS = ("digits", "gpt")
MODES = ("fixed", "adaptive", "consistent")
FLOOR = {"digits": 0.005, "gpt": 0.01}
"""Two images of the test set, or a hundredth of a nat: below that a difference means nothing."""
SCHEDULE: tuple[tuple[float, int | str], ...] = ((0.1, 3), (0.3, 2), (0.45, "kill"), (0.6, 1), (0.75, 3))
"""What happens after which part of the training."""


def undisturbed(task: str, seed: int, epochs: float) -> dict[str, Any]:
    """One plain run: a single process, no coordinator."""
    with tempfile.TemporaryDirectory(prefix="swell-quality-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(SCRIPT), "--task", task, "--seed", str(seed), "--epochs", str(epochs)]
        subprocess.run([*command, "--out", str(out)], check=True, timeout=600)
        return _read(out)


def elastic(
    task: str,
    mode: str,
    *,
    seed: int = 0,
    epochs: float = 1.0,
    start: int = 1,
    whole_steps: int = 0,
    extra: tuple[str, ...] = (),
    pace_s: float = 0.0,
) -> dict[str, Any]:
    """One run under `swell run`; through SCHEDULE if `whole_steps` says how long an undisturbed run is."""
    with tempfile.TemporaryDirectory(prefix="swell-quality-") as folder:
        out = Path(folder) / "result.json"
        arguments = ["--task", task, "--mode", mode, "--seed", str(seed), "--epochs", str(epochs)]
        arguments += ["--pace", str(pace_s), "--out", str(out), *extra]
        with Session(Path(folder), SCRIPT, arguments, start=start, spares=1 if whole_steps else 0) as job:
            done = [_play(job, at * whole_steps, what) for at, what in SCHEDULE] if whole_steps else []
            code = job.wait(600)
            if code != 0:
                raise RuntimeError(f"{task} in {mode} mode ended with code {code}:\n{job.output()[-4000:]}")
        return _read(out) | {"events": [event for event in done if event]}


def _play(job: Session, at: float, what: int | str) -> str | None:
    """One event, once training has come to `at` steps (of the tuned batch); None if it was over before."""
    status = job.until(lambda s: _progress(s) >= at, 300)
    if status is None:
        return None
    if what == "kill":
        job.kill_workers(status, one=True)
    elif isinstance(what, int):
        job.resize(what)
        job.until(lambda s: len(s["members"]) == what, 60)
    return f"{what} at {_progress(status):.0f}"


def _progress(status: dict[str, Any]) -> float:
    worth = [r["adaptive"]["progress"] for r in status["reports"].values() if "adaptive" in r]
    return float(max(worth, default=status["step"]))


def measure(task: str, *, seeds: int, epochs: float, elastic_seeds: int, pace_s: float) -> dict[str, Any]:
    """All figures of one task."""
    plain = [undisturbed(task, seed, epochs) for seed in range(seeds)]
    scores = [run["score"] for run in plain]
    mean, spread = statistics.fmean(scores), max(statistics.stdev(scores), FLOOR[task])
    figures: dict[str, Any] = {"undisturbed": scores, "mean": mean, "deviation": spread, "modes": {}}
    for mode in MODES:
        runs = [
            elastic(task, mode, seed=seed, epochs=epochs, whole_steps=plain[0]["steps"], pace_s=pace_s)
            for seed in range(elastic_seeds)
        ]
        found = [run["score"] for run in runs]
        figures["modes"][mode] = {
            "scores": found,
            "deviations": round((statistics.fmean(found) - mean) / spread, 2),
            "within_spread": statistics.fmean(found) >= mean - 2 * spread,
            "steps": [run["steps"] for run in runs],
            "passes": [run["passes"] for run in runs],
            "worlds": [run["worlds"] for run in runs],
            "events": [run["events"] for run in runs],
        }
    figures["adaptive_steps"] = {
        str(workers): elastic(task, "adaptive", epochs=epochs, start=workers)["steps"] for workers in (1, 3)
    }
    figures["fewer_steps_with_more_workers"] = figures["adaptive_steps"]["3"] < figures["adaptive_steps"]["1"]
    frozen = elastic(task, "adaptive", epochs=0.5 * epochs, start=2, extra=("--measure-noise", "400"))
    online, direct = frozen["noise_scale"], frozen["direct_noise_scale"]
    figures["noise_scale"] = {
        "online": round(online, 1),
        "direct": round(direct, 1),
        "error": round(online / direct - 1, 3),
        "within_20_percent": abs(online / direct - 1) <= 0.2,
    }
    return figures


def run(*, quick: bool = False) -> dict[str, Any]:
    """Both tasks; `quick` is the size of a test."""
    begin = time.monotonic()
    tasks = TASKS[:1] if quick else TASKS
    figures: dict[str, Any] = {
        task: measure(
            task,
            seeds=3 if quick else 5,
            epochs=0.5 if quick else 1.0,
            elastic_seeds=1 if quick else 2,
            pace_s=0.01,
        )
        for task in tasks
    }
    figures["passed"] = all(
        all(mode["within_spread"] for mode in figures[task]["modes"].values())
        and figures[task]["fewer_steps_with_more_workers"]
        and figures[task]["noise_scale"]["within_20_percent"]
        for task in tasks
    )
    figures["wall_s"] = round(time.monotonic() - begin, 1)
    return figures


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


if __name__ == "__main__":
    print_figures(__doc__ or "", lambda quick: run(quick=quick))
