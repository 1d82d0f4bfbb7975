"""An unmodified script on changing workers against itself, alone: is the result as good?

    python -m benchmarks.runtime.auto [--runs 5] [--epochs 30]

`examples/plain_mnist_style.py` is run plainly with several seeds, which gives its own spread, and with the
same seeds under `swell run --auto` on 1 -> 2 -> 3 -> 1 workers. Prints one JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_mnist_style.py"
SCHEDULE = (2, 3, 1)
HOLD_STEPS = 100


def plain(arguments: list[str]) -> tuple[float, float]:
    """Test loss and accuracy of the script as it is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return _result(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def elastic(arguments: list[str]) -> tuple[float, float, list[dict[str, Any]]]:
    """Test loss and accuracy under `--auto` on changing workers, and what happened."""
    with tempfile.TemporaryDirectory(prefix="swell-auto-") as root:
        options = ["--auto", "--workers", "1:3", "--start", "1", "--threads", "1", "--name", "auto"]
        process = subprocess.Popen(
            [sys.executable, "-m", "swell", "run", *options, str(SCRIPT), *arguments],
            env={**os.environ, "SWELL_HOME": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            directory = JobDirectory(Path(root) / "jobs" / "auto")
            with contextlib.suppress(ConnectionError), JobClient(directory, wait_s=20.0) as client:
                client.wait_for(lambda s: s["step"] > 0)
                for count in SCHEDULE:
                    client.resize(count)
                    now = client.wait_for(lambda s, count=count: len(s["members"]) == count, 60.0)
                    client.wait_for(lambda s, begin=now["step"]: s["step"] >= begin + HOLD_STEPS, 60.0)
            output, _ = process.communicate(timeout=300)
            if process.returncode:
                raise RuntimeError(output)
            changes = [e for e in directory.events() if e["event"] in ("generation", "switch")]
            return *_result(output), changes
        finally:
            process.kill()


def _result(output: str) -> tuple[float, float]:
    found = re.findall(r"final loss (\S+) accuracy (\S+)", output)
    if len(found) != 1:
        raise RuntimeError(f"the script should say its result once: {output[-2000:]}")
    return float(found[0][0]), float(found[0][1])


def measure(runs: int, epochs: int) -> dict[str, Any]:
    """Both kinds of run for each seed."""
    begin = time.perf_counter()
    alone, changing, pauses, schedules = [], [], [], []
    for seed in range(1, runs + 1):
        arguments = ["--epochs", str(epochs), "--seed", str(seed), "--log-interval", "1000"]
        alone.append(plain(arguments))
        loss, accuracy, events = elastic(arguments)
        changing.append((loss, accuracy))
        print(f"seed {seed}: plain {alone[-1]}, auto {changing[-1]}", file=sys.stderr, flush=True)
        schedules.append([[len(e["members"]), e["step"]] for e in events if e["event"] == "generation"])
        pauses += [round(e["pause_s"] * 1e3, 2) for e in events if e["event"] == "switch"]
    result: dict[str, Any] = {"what": "unmodified script, 1 -> 2 -> 3 -> 1 workers", "epochs": epochs}
    for index, name in ((1, "accuracy"), (0, "loss")):
        ours, theirs = [run[index] for run in changing], [run[index] for run in alone]
        spread = max(theirs) - min(theirs)
        result[name] = {
            "plain": theirs,
            "auto": ours,
            "plain_mean": round(statistics.mean(theirs), 4),
            "auto_mean": round(statistics.mean(ours), 4),
            "plain_spread": round(spread, 4),
            "within_spread": abs(statistics.mean(ours) - statistics.mean(theirs)) <= spread,
        }
    result["workers_and_step"] = schedules
    result["switch_pause_ms"] = pauses
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    print(json.dumps(measure(args.runs, args.epochs), indent=1))


if __name__ == "__main__":
    main()
