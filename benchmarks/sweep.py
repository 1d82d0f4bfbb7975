"""A sweep of elastic trials against trials of one slot each, on four CPU slots of this machine.

    python -m benchmarks.sweep [--trials 24] [--seeds 3] [--json]
    python -m benchmarks.sweep --killed [--trials 24]      # is a finished trial lost if the sweep is killed?

Both make the same search (examples/sweep.toml) on a platform of their own, one after the other. To read a
sample takes a fixed time, as from slow storage, so that trials scale whatever the number of cores. On a quiet
machine a search takes about two minutes. `tests/sweep/test_driver.py` makes the same search in virtual time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
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


def sweep_file(folder: Path, most_workers: int | None, seed: int) -> Path:
    """The example's sweep as a file in a folder, with this seed."""
    text = SWEEP.read_text()
    script = SWEEP.parent / tomllib.loads(text)["job"]["script"]
    text = text.replace(f'"{script.name}"', f'"{script}"')
    if most_workers is not None:
        text = text.replace("[job]", f"[job]\nmax_workers = {most_workers}", 1)
    file = folder / "sweep.toml"
    file.write_text(text.replace("[sweep]", f"[sweep]\nseed = {seed}", 1))
    return file


def search(trials: int, most_workers: int | None, seed: int, folder: Path) -> dict[str, Any]:
    """The whole sweep: its makespan in seconds, and what came of it."""
    home, file = folder / "home", sweep_file(folder, most_workers, seed)
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


def killed_and_resumed(trials: int, folder: Path) -> dict[str, Any]:
    """Kill the command of a sweep once trials have ended, and resume it: is any trial lost, or run twice?"""
    home, file = folder / "home", sweep_file(folder, None, seed=0)
    swell(home, "up", "--slots", 4, "--port", 0, "-d")
    try:
        command = [sys.executable, "-m", "swell", "sweep", str(file), "--trials", str(trials)]
        env = os.environ | {"SWELL_HOME": str(home)}
        ended = set[int]()
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            for line in first.stdout:
                if found := re.match(r"trial (\d+): (?:given up|complete)", line):
                    ended.add(int(found[1]))
                if len(ended) >= max(trials // 4, 1):
                    break
            first.kill()
        done = json.loads(swell(home, "sweep", file, "--trials", trials, "--resume", "--json"))
        jobs = [job["job_id"] for job in json.loads(swell(home, "queue", "--all", "--json"))]
    finally:
        swell(home, "down")
    over = {trial["number"] for trial in done["trials"] if trial["state"] in ("complete", "pruned")}
    return {
        "trials": len(over),
        "ended_before": len(ended),
        "lost": len(ended - over),
        "jobs": len(jobs),
        "jobs_beyond_trials": len(set(jobs) ^ {trial["job_id"] for trial in done["trials"]}),
        "best": done["best"],
    }


def verdict(ratio: float, results: dict[str, list[dict[str, Any]]]) -> str:
    """Whether elastic trials were fast enough and found as much, in words."""
    scores = best_scores(results)
    faults = [f"more than {MOST_RATIO:g}x"] if ratio > MOST_RATIO else []
    if not scores["elastic"] >= scores["one slot each"] - NOISE:
        faults.append("a worse best score: " + ", ".join(f"{n} {score:.4f}" for n, score in scores.items()))
    return "failed, " + " and ".join(faults) if faults else "passed"


def best_scores(results: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The mean over the seeds of each way's best score; not a number if a search found none."""
    return {
        name: statistics.mean((one["best"] or {"value": math.nan})["value"] for one in found)
        for name, found in results.items()
    }


def measure(trials: int = 24, seeds: int = 1, *, tell: bool = False) -> dict[str, Any]:
    """Both ways for each seed; the ratio of their makespans, and the verdict."""
    results: dict[str, list[dict[str, Any]]] = {"one slot each": [], "elastic": []}
    for seed in range(seeds):
        for name, most in (("one slot each", 1), ("elastic", None)):
            with tempfile.TemporaryDirectory(prefix="swell-sweep-") as folder:
                found = search(trials, most, seed, Path(folder))
            results[name].append(found)
            if tell:
                score = found["best"]["value"] if found["best"] else float("nan")
                print(
                    f"seed {seed}, {name:>13}: {found['makespan_s']:6.1f} s, {found['epochs']} epochs, "
                    f"best {score:.4f}, "
                    + ", ".join(f"{count} {state}" for state, count in found["trials"].items()),
                    flush=True,
                )
    total = {name: sum(one["makespan_s"] for one in found) for name, found in results.items()}
    ratio = total["elastic"] / total["one slot each"]
    scores = {name: round(score, 4) for name, score in best_scores(results).items()}
    return results | {"ratio": round(ratio, 3), "scores": scores, "verdict": verdict(ratio, results)}


def main() -> None:
    """Run both and compare, or kill and resume."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--killed", action="store_true", help="kill the sweep in the middle, and resume it")
    args = parser.parse_args()
    if args.killed:
        with tempfile.TemporaryDirectory(prefix="swell-sweep-") as folder:
            print(json.dumps(killed_and_resumed(args.trials, Path(folder))))
        return
    found = measure(args.trials, args.seeds, tell=not args.json)
    if args.json:
        print(json.dumps(found))
    else:
        print(f"elastic trials take {found['ratio']:.2f}x of the time: {found['verdict']}")


if __name__ == "__main__":
    main()
