"""ElasticDL's third experiment: is a model as good if the workers change between four and eight all the time?

    python -m benchmarks.elasticdl_accuracy [--seeds 5] [--epochs 12] [--picture FILE.svg] [--json]

Real processes: examples/digits_cnn.py on four workers, on eight, and on four to eight that change every half
second, each with the same seeds. The changing runs must end within the spread of the fixed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from swell.report import svg
from swell.train.agent.client import JobClient
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory

SCRIPT = Path(__file__).parents[1] / "examples" / "digits_cnn.py"
FEWEST, MOST = 4, 8
EVERY_S = 0.5
FETCH_MS = 4.0
"""As if each sample came from slow storage, so that a run takes long enough for many changes."""


def train(seed: int, epochs: int, workers: int | None) -> dict[str, Any]:
    """The accuracy after each epoch, on so many workers or on a changing number of them."""
    rng, sizes = random.Random(seed), [workers or FEWEST]
    with tempfile.TemporaryDirectory(prefix="swell-accuracy-") as home:
        command = [sys.executable, "-m", "swell", "run", "--name", "digits", "--threads", "1"]
        command += ["--workers", f"{FEWEST}:{MOST}", "--start", str(sizes[0]), str(SCRIPT)]
        command += ["--epochs", str(epochs), "--seed", str(seed), "--fetch-ms", str(FETCH_MS)]
        process = subprocess.Popen(
            command, env={**os.environ, "SWELL_HOME": home}, stdout=subprocess.PIPE, text=True
        )
        while workers is None and process.poll() is None:
            time.sleep(EVERY_S)
            sizes.append(rng.choice([n for n in range(FEWEST, MOST + 1) if n != sizes[-1]]))
            try:
                with JobClient(JobDirectory(Path(home) / "jobs" / "digits")) as client:
                    client.resize(sizes[-1])
            except (OSError, TrainError):
                sizes.pop()  # it has not begun yet, or is over
        output, _ = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(output[-2000:])
        changes = [e for e in JobDirectory(Path(home) / "jobs" / "digits").events() if e["event"] == "switch"]
    curve = [float(found) for found in re.findall(r"epoch .* accuracy ([\d.]+)", output)]
    return {"curve": curve, "switches": len(changes)}


def measure(seeds: int, epochs: int) -> dict[str, Any]:
    """Final accuracies by way, their spread, and the mean curves."""
    out: dict[str, Any] = {}
    for name, workers in (("4 workers", 4), ("8 workers", 8), ("4 to 8, changing", None)):
        runs = [train(seed, epochs, workers) for seed in range(seeds)]
        final = [run["curve"][-1] for run in runs]
        out[name] = {
            "accuracy": final,
            "mean": round(fmean(final), 4),
            "sd": round(stdev(final), 4) if seeds > 1 else None,
            "switches": sum(run["switches"] for run in runs),
            "curve": [round(fmean(epoch), 4) for epoch in zip(*(run["curve"] for run in runs))],
        }
        print(
            f"{name:>17}: {out[name]['mean']:.4f}, {out[name]['switches']} switches",
            file=sys.stderr,
            flush=True,
        )
    fixed = out["4 workers"]["accuracy"] + out["8 workers"]["accuracy"]
    out["within_spread"] = min(fixed) <= out["4 to 8, changing"]["mean"] <= max(fixed)
    return out


def picture(found: dict[str, Any]) -> str:
    """Mean part of the images that are taken for another digit, by epoch."""
    curves = {name: way["curve"] for name, way in found.items() if isinstance(way, dict)}
    drawn = [svg.ChartLine(name, range(1, len(y) + 1), [1 - one for one in y]) for name, y in curves.items()]
    chart = svg.lines("Error after each epoch", drawn, say_x=lambda x: f"epoch {x:g}", say_y=_percent)
    return svg.figure(chart, list(curves))


def _percent(part: float) -> str:
    return f"{100 * part:g} %"


def main() -> None:
    """Run all and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.seeds, args.epochs)
    if args.picture is not None:
        args.picture.write_text(picture(found))
    if args.json:
        print(json.dumps(found))
    else:
        print(
            "within the spread of the fixed runs"
            if found["within_spread"]
            else "OUTSIDE the fixed runs' spread"
        )


if __name__ == "__main__":
    main()
