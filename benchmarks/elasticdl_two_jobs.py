"""ElasticDL's first experiment: two jobs that each want 55% of the slots, elastic against gang scheduling.

    python -m benchmarks.elasticdl_two_jobs [--epochs 60] [--pictures FOLDER] [--json]

Real processes on nine CPU slots of this machine; a sample takes a fixed time, so that jobs scale whatever the
number of cores. Each job wants five slots. Under gang scheduling (`fifo`, five or nothing) the second waits
for the first. Elastic, it starts at once on the four that are left and grows when the first has ended.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine
from swell.report import svg
from swell.report.runs import Run

SCRIPT = Path(__file__).parents[1] / "tests" / "engines" / "toy.py"
SLOTS, WANTED = 9, 5
LIMIT_S = 300.0


def both(home: Path, policy: str, least: int, epochs: int) -> tuple[dict[str, Any], Run]:
    """Submit one job, and another when the first trains; returns times and utilisation, and the whole run."""
    store = Store(connect(str(home / "store.db")))
    engine = SupervisedEngine(LocalSite(home, slots=SLOTS))
    plane = ControlPlane(store, engine, home=home, policy=policy, interval_s=0.5)
    plane.start()
    try:
        jobs = []
        for name in ("first", "second"):
            request = JobRequest(
                name=name,
                script=str(SCRIPT),
                args=("--epochs", str(epochs), "--sample-ms", "4"),
                workdir=str(home),
                workers=WANTED,
                min_workers=least,
                max_workers=WANTED,
            )
            jobs.append(plane.jobs.submit(request, "bench"))
            _wait(plane, jobs[0].job_id, lambda job: job.done > 0)
        for job in jobs:
            _wait(plane, job.job_id, lambda job: job.phase.over)
        ended = [plane.jobs.get(job.job_id) for job in jobs]
        if any(job.phase is not Phase.FINISHED for job in ended):
            raise RuntimeError(str([(job.phase, job.reason) for job in ended]))
        run = Run.read(policy, (event for _, event in plane.events(limit=100_000)))
    finally:
        plane.stop()
        store.close()
    began_s = ended[0].started_s or ended[0].submitted_s
    figures = {
        "total_s": round(max(job.ended_s or 0.0 for job in ended) - began_s, 1),
        "second_waits_s": round((ended[1].started_s or 0.0) - ended[1].submitted_s, 1),
        "utilisation": None if run.utilisation is None else round(run.utilisation, 3),
    }
    return figures, run


def _wait(plane: ControlPlane, job_id: str, condition: Any) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition(plane.jobs.get(job_id)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"job {job_id} after {LIMIT_S:g} s: {plane.jobs.get(job_id)}")
        time.sleep(0.05)


def measure(epochs: int = 60) -> dict[str, tuple[dict[str, Any], Run]]:
    """Both ways, by name: times and utilisation, and the whole run."""
    found = {}
    for name, policy, least in (("gang", "fifo", WANTED), ("elastic", "tide", 1)):
        with tempfile.TemporaryDirectory(prefix="swell-two-") as folder:
            found[name] = both(Path(folder), policy, least, epochs)
    return found


def main() -> None:
    """Run both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--pictures", type=Path, help="folder for who had how many slots when")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    for name, (found, run) in measure(args.epochs).items():
        results[name] = found
        if args.pictures is not None:
            drawn = svg.figure(svg.swim_lanes(run))
            (args.pictures / f"elasticdl-{name}.svg").write_text(drawn)
        if not args.json:
            print(
                f"{name:>8}: {found['total_s']:6.1f} s in all, the second waits "
                f"{found['second_waits_s']:.1f} s, slots in use {found['utilisation']:.0%}",
                flush=True,
            )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
