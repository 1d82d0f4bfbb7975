"""What `--auto` costs on one worker: the time of a step under it against the same script alone.

    python -m benchmarks.runtime.frameworks [--rounds 3] [--only lightning_fit.py]

Each script of tests/train/plain_scripts is run plainly and under `--auto`, in turns, and measures the time
between two of its steps (tools/pace.py): of the processor, which a busy machine changes little, and of the
clock. The models are so wide that a batch takes some ten milliseconds, as in the smallest real trainings.
What swell adds does not depend on the model, so it is printed in milliseconds too: `added_cpu_ms`. Prints the
least of the rounds, because other work on the machine only adds to it, and the ratios.

glibc gives freed memory back to the system or keeps it, depending on what else lies at the end of the heap.
So two runs of the same script may differ by a thousand page faults, and two milliseconds, in every batch.
Both runs are told to keep the memory (KEEP_MEMORY), so that this chance is not compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "tests" / "train" / "plain_scripts"
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
CASES = {  # script: package that it needs, width, epochs, batches between which the time is measured
    "everyday.py": ("torch", 30_000, 50, (100, 400)),
    "gan.py": ("torch", 10_000, 35, (50, 350)),
    "accelerated.py": ("accelerate", 30_000, 12, (64, 384)),
    "lightning_fit.py": ("lightning", 30_000, 50, (80, 400)),
    "hugging_face.py": ("transformers", 128, 9, (40, 360)),
}


def run(script: str, *, auto: bool) -> dict[str, float]:
    """The time of the processor and of the clock of one run's steps."""
    _, width, epochs, (first, last) = CASES[script]
    with tempfile.TemporaryDirectory(prefix="swell-frameworks-") as root:
        output = Path(root) / "out"
        output.mkdir()
        arguments = [str(SCRIPTS / script), str(epochs), "0", str(output)]
        arguments += ["mean"] if script == "everyday.py" else []
        under = ["-m", "swell", "run", "--auto", "--workers", "1", "--threads", "1"] if auto else []
        env = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")}
        report = Path(root) / "report.json"
        env |= {"OMP_NUM_THREADS": "1", "SWELL_HOME": root, "PACE_REPORT": f"{first},{last},{report}"}
        env |= {"PLAIN_WIDTH": str(width), **KEEP_MEMORY}
        subprocess.run([sys.executable, *under, *arguments], env=env, check=True, capture_output=True)
        found: dict[str, float] = json.loads(report.read_text())
        return {what: seconds / (last - first) * 1000.0 for what, seconds in found.items()}


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(CASES))
    options = parser.parse_args()
    for script, (package, *_) in CASES.items():
        if importlib.util.find_spec(package) is None or options.only not in (None, script):
            continue
        plain, auto = [], []
        for _ in range(options.rounds):  # in turns, so that both see the same machine
            plain.append(run(script, auto=False))
            auto.append(run(script, auto=True))
        out: dict[str, float] = {}
        for what in ("cpu_s", "wall_s"):
            alone, shared = (min(one[what] for one in runs) for runs in (plain, auto))
            name = what.removesuffix("_s")
            out |= {f"plain_{name}_ms": alone, f"auto_{name}_ms": shared, f"{name}_ratio": shared / alone}
        out["added_cpu_ms"] = out["auto_cpu_ms"] - out["plain_cpu_ms"]
        print(
            json.dumps({"script": script} | {name: round(value, 3) for name, value in out.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
