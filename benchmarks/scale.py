"""How the cost, the memory and the quality of `tide` grow with the cluster, by simulation.

    python -m benchmarks.scale                                      # 100 to 10,000 GPUs, 10 jobs a GPU
    python -m benchmarks.scale --gpus 100000 --jobs-per-gpu 10      # a million jobs
    python -m benchmarks.scale --deadlines 0.5 --gpus 100 --gpus 1000
    python -m benchmarks.scale --gpus 100000 --jobs-per-gpu 10 --limit-s 250

Jobs are generated (Philly's sizes and arrivals) and come at the rate that would keep the cluster just busy.
Rounds of five minutes, 30 s a resize, `tide-fixed`. Each size runs in a process of its own, for its memory.
With `--limit-s` a run ends after so many CPU seconds: then the figures are those of the part that was
simulated, and the row says how many jobs that were.

quality: the average JCT over the lower bound of `benchmarks.bounds`, for runs that came to their end.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import bounds
from benchmarks.common import table, write_json
from swell.domain import Cluster, Event, EventKind
from swell.perf.profiles import ProfileSet
from swell.policies.base import Decision
from swell.policies.snapshot import Snapshot
from swell.policies.tide import TideFixed
from swell.sim import simulate
from swell.sim.generate import generate_jobs

SIZES = (100, 1_000, 10_000)
GPU_HOURS = 8.3
"""The mean of the generated jobs, on the GPUs they ask for."""
ROUND_S = 300.0
COST_S = 30.0


class OutOfTime(Exception):
    """The run has used up its CPU seconds."""


@dataclass(kw_only=True)
class Counted(TideFixed):
    """tide, with its decisions counted and timed, and an end after so many CPU seconds."""

    until_s: float = math.inf
    decisions: list[tuple[int, float]] = field(default_factory=list)
    """For each decision: the active jobs, and its CPU seconds."""

    def allocate(self, snapshot: Snapshot) -> Decision:
        """As tide does."""
        if time.process_time() > self.until_s:
            raise OutOfTime
        began_s = time.process_time()
        decision = super().allocate(snapshot)
        self.decisions.append((len(snapshot), time.process_time() - began_s))
        return decision


def one(gpus: int, per_gpu: float, deadlines: float, limit_s: float) -> dict[str, Any]:
    """One size, in this process."""
    profiles, count = ProfileSet.load(None), round(gpus * per_gpu)
    cluster = Cluster.parse(f"{max(gpus // 8, 1)}x8")
    hours = count * GPU_HOURS / gpus
    jobs = generate_jobs(profiles, jobs=count, hours=hours, seed=1, deadlines=deadlines)
    warm = generate_jobs(profiles, jobs=20, hours=1.0, seed=2, deadlines=0.5)
    simulate(warm, profiles, Cluster.parse("2x8"), "tide-fixed", interval_s=60.0, resize_cost=COST_S)
    policy = Counted()
    ended = {"jobs": 0, "events": 0}

    def watch(event: Event) -> None:
        ended["events"] += 1
        ended["jobs"] += event.kind in (EventKind.FINISHED, EventKind.REJECTED)

    began_s = time.process_time()
    policy.until_s = began_s + limit_s
    figures: dict[str, Any] = {}
    try:
        result = simulate(
            jobs,
            profiles,
            cluster,
            policy,
            interval_s=ROUND_S,
            resize_cost=COST_S,
            on_event=watch,
        )
        figures = result.record()
    except OutOfTime:
        pass
    cpu_s = time.process_time() - began_s
    active, seconds = np.array(policy.decisions).T
    quality = None
    if figures and not deadlines:
        needed = bounds.needs(jobs, profiles, cluster)
        quality = figures["avg_jct_s"] / bounds.least_jct_s(needed, cluster.capacity, COST_S)["bound"]
    return {
        "gpus": cluster.capacity,
        "jobs": count,
        "simulated": ended["jobs"],
        "cpu_s": cpu_s,
        "us_per_event": 1e6 * (cpu_s - float(seconds.sum())) / max(ended["events"], 1),
        "decisions": len(seconds),
        "decision_ms": 1e3 * float(seconds.mean()),
        "decision_max_ms": 1e3 * float(seconds.max()),
        "most_active": int(active.max()),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "avg_jct_s": figures.get("avg_jct_s"),
        "over_bound": quality,
        "deadline_ratio": figures.get("deadline_ratio"),
        "broken": figures.get("promises_broken"),
    }


def main() -> None:
    """Run the sizes, each in a process of its own, and print how they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, action="append")
    parser.add_argument("--jobs-per-gpu", type=float, default=10.0)
    parser.add_argument("--deadlines", type=float, default=0.0)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="CPU seconds for each size")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        (gpus,) = options.gpus
        print(json.dumps(one(gpus, options.jobs_per_gpu, options.deadlines, options.limit_s)))
        return
    records = []
    for gpus in options.gpus or SIZES:
        words = ["--gpus", str(gpus), "--jobs-per-gpu", str(options.jobs_per_gpu), "--inside"]
        words += ["--deadlines", str(options.deadlines), "--limit-s", str(options.limit_s)]
        command = [sys.executable, "-m", "benchmarks.scale", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        records.append(json.loads(done.stdout))
    table("tide by size of the cluster", list(records[0]), [list(record.values()) for record in records])
    write_json("scale", records)


if __name__ == "__main__":
    main()
