"""How long a job takes to start on the local engine, from the order to its first step.

With the nursery and without it:

python -m benchmarks.platform.start [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import table, write_json
from swell.domain import JobRequest
from swell.engines import Launch
from swell.engines.local import LocalSite
from swell.engines.nursery import SHARED
from swell.engines.supervised import SupervisedEngine

TOY = Path(__file__).parents[2] / "tests" / "engines" / "toy.py"


def measure(home: Path, rounds: int) -> float:
    """Median seconds from `apply` to the first step that a job of one worker prints."""
    site = LocalSite(home, slots=1)
    engine = SupervisedEngine(site)
    engine.start(lambda: None)
    took = []
    try:
        while site._nursery is not None and site._nursery.in_preparation:
            time.sleep(0.05)
        for i in range(rounds):
            request = JobRequest(name="toy", script=str(TOY), args=("--epochs", "1", "--sample-ms", "0"))
            launch = Launch(
                job_id=f"toy{i}", request=request, job_dir=home / "jobs" / f"toy{i}", max_workers=1
            )
            begin, output = time.monotonic(), launch.job_dir / "output.log"
            engine.apply(launch, (0,))
            while not output.exists() or "| step " not in output.read_text():
                time.sleep(0.005)
            took.append(time.monotonic() - begin)
            engine.end(launch.job_id)
            while engine.observe():
                time.sleep(0.02)
    finally:
        engine.close()
    return statistics.median(took)


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = {}
    for name in ("with nursery", "without"):
        with tempfile.TemporaryDirectory(prefix="swell-start-") as folder:
            if name == "without":
                (Path(folder) / "nobody").touch()
                os.environ[SHARED] = str(Path(folder) / "nobody")
            found[name] = round(measure(Path(folder), args.rounds), 2)
    table("Seconds from the order to the first step", tuple(found), [tuple(found.values())])
    write_json("start", [found])


if __name__ == "__main__":
    main()
