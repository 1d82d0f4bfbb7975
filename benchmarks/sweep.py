"""A sweep of elastic trials against trials of one slot each, on four CPU slots of this machine.

    python -m benchmarks.sweep [--trials 24] [--seeds 3] [--json]

Both make the same search (examples/sweep.toml) on a platform of their own, one after the other. To read a
sample takes a fixed time, as from slow storage, so that trials scale whatever the number of cores. On a quiet
machine a search takes about two minutes. `tests/sweep/test_driver.py` makes the same search in virtual time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

MOST_RATIO = 0.75
"""Elastic trials are to take at most this part of the time."""
NOISE = 0.01
"""By how much the best scores of the two searches may differ: three or four of the 360 test digits."""
SWEEP = Path(__file__).parents[1] / "examples" / "sweep.toml"


def swell(home: Path, *words: object) -> str:
    """Run a command to its end and return what it printed."""
    command = [sys.executable, "-m", "swell", *map(str, words)]
    env = os.environ | {"SWELL_HOME": str(home)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def search(trials: int, most_workers: int | None, seed: int, folder: Path) -> dict[str, Any]:
    """The whole sweep: its makespan in seconds, and what came of it."""
    home, file = folder / "home", folder / "sweep.toml"
    text = SWEEP.read_text()
    script = SWEEP.parent / tomllib.loads(text)["job"]["script"]
    text = text.replace(f'"{script.name}"', f'"{script}"')
    if most_workers is not None:
        text = text.replace("[job]", f"[job]\nmax_workers = {most_workers}", 1)
    file.write_text(text.replace("[sweep]", f"[sweep]\nseed = {seed}", 1))
    swell(home, "up", "--slots", 4, "--port", 0, "-d")
    try:
        began_s = time.monotonic()
        found = json.loads(swell(home, "sweep", file, "--trials", trials, "--json"))
        took_s = time.monotonic() - began_s
        states = [trial["state"] for trial in found["trials"]]
    finally:
        swell(home, "down")
    return {
        "makespan_s": round(took_s, 1),
        "best": found["best"],
        "trials": {state: states.count(state) for state in sorted(set(states))},
        "epochs": sum(trial["epochs"] for trial in found["trials"]),
    }


def verdict(ratio: float, results: dict[str, list[dict[str, Any]]]) -> str:
    """Whether elastic trials were fast enough and found as much, in words."""
    scores = {
        name: statistics.mean((one["best"] or {"value": math.nan})["value"] for one in found)
        for name, found in results.items()
    }
    faults = [f"more than {MOST_RATIO:g}x"] if ratio > MOST_RATIO else []
    if not scores["elastic"] >= scores["one slot each"] - NOISE:
        faults.append("a worse best score: " + ", ".join(f"{n} {score:.4f}" for n, score in scores.items()))
    return "failed, " + " and ".join(faults) if faults else "passed"


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"one slot each": [], "elastic": []}
    for seed in range(args.seeds):
        for name, most in (("one slot each", 1), ("elastic", None)):
            with tempfile.TemporaryDirectory(prefix="swell-sweep-") as folder:
                found = search(args.trials, most, seed, Path(folder))
            results[name].append(found)
            if not args.json:
                score = found["best"]["value"] if found["best"] else float("nan")
                print(
                    f"seed {seed}, {name:>13}: {found['makespan_s']:6.1f} s, {found['epochs']} epochs, "
                    f"best {score:.4f}, "
                    + ", ".join(f"{count} {state}" for state, count in found["trials"].items()),
                    flush=True,
                )
    total = {name: sum(one["makespan_s"] for one in found) for name, found in results.items()}
    ratio = total["elastic"] / total["one slot each"]
    said = verdict(ratio, results)
    if args.json:
        print(json.dumps(results | {"ratio": round(ratio, 3), "verdict": said}))
    else:
        print(f"elastic trials take {ratio:.2f}x of the time: {said}")


if __name__ == "__main__":
    main()
