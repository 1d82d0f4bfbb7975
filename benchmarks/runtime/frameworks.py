"""What `--auto` costs on one worker: the time of a step under it against the same script alone.

    python -m benchmarks.runtime.frameworks [--rounds 3]

Each script of tests/train/plain_scripts is run with few and with many epochs, plainly and under `--auto`; the
difference of the two durations is that of the steps alone, without imports. Prints the ratios of medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "tests" / "train" / "plain_scripts"
CASES = {  # script: few epochs, many epochs, package that it needs
    "everyday.py": (20, 220, "torch"),
    "gan.py": (20, 220, "torch"),
    "accelerated.py": (10, 110, "accelerate"),
    "lightning_fit.py": (10, 110, "lightning"),
    "hugging_face.py": (2, 14, "transformers"),
}


def duration_s(script: str, epochs: int, auto: bool) -> float:
    """How long one run of a script takes."""
    with tempfile.TemporaryDirectory(prefix="swell-frameworks-") as root:
        more = {"everyday.py": [f"{root}/out", "mean"], "gan.py": [], "accelerated.py": []}.get(
            script, [f"{root}/out"]
        )
        (Path(root) / "out").mkdir()
        arguments = [str(SCRIPTS / script), str(epochs), "0", *more]
        run = ["-m", "swell", "run", "--auto", "--workers", "1", "--threads", "1"] if auto else []
        env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")}
        env |= {"OMP_NUM_THREADS": "1", "SWELL_HOME": root}
        begin = time.perf_counter()
        subprocess.run([sys.executable, *run, *arguments], env=env, check=True, capture_output=True)
        return time.perf_counter() - begin


def steps_s(script: str, auto: bool) -> float:
    """How long the epochs between few and many take."""
    few, many, _ = CASES[script]
    return duration_s(script, many, auto) - duration_s(script, few, auto)


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    out: dict[str, dict[str, float]] = {}
    for script, (_, _, package) in CASES.items():
        if importlib.util.find_spec(package) is None:
            continue
        plain, auto = [], []
        for _ in range(options.rounds):  # in turns, so that both see the same machine
            plain.append(steps_s(script, False))
            auto.append(steps_s(script, True))
        ratio = statistics.median(auto) / statistics.median(plain)
        out[script] = {"plain_s": statistics.median(plain), "auto_s": statistics.median(auto), "ratio": ratio}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
