"""What several small jobs on one GPU are worth: working days of them, with 1, 2 and 4 slots on each GPU.

    python -m benchmarks.fractions

Each line is the mean over generated days of small jobs (at most one GPU-hour each) that overload machines
whose GPUs run one job at a time. `fill` is which part of a GPU's time a worker uses alone. Jobs on one GPU
train side by side or in turns by the rule of the live runtime (docs/simulator.md, "Several jobs on one GPU").
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common import table, write_json
from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.generate import generate_jobs

FILLS = ((0.1, 0.4), (0.1, 1.0), (1.0, 1.0))
PER_GPU = (1, 2, 4)
POLICIES = ("tide", "max-min")
DAYS = 5
JOBS, HOURS, GPU_HOURS = 400, 8.0, 1.0
COST_S = 5.0


def main() -> None:
    """Run all combinations and print one table for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", action="append", help="default: 1x8 and 4x2")
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--jobs", type=int, default=JOBS)
    given = parser.parse_args()
    profiles, records = ProfileSet.load(None), []
    for cluster in given.cluster or ["1x8", "4x2"]:
        rows: list[tuple[Any, ...]] = []
        for fill in FILLS:
            for policy in POLICIES:
                means = [mean(profiles, cluster, policy, fill, n, given.days, given.jobs) for n in PER_GPU]
                records += [
                    {"cluster": cluster, "fill": fill, "policy": policy, "per_gpu": n} | one
                    for n, one in zip(PER_GPU, means, strict=True)
                ]
                jcts = [f"{one['avg_jct_s']:.0f}" for one in means]
                spans = [f"{one['makespan_s'] / 3600:.1f}" for one in means]
                shown = f"{fill[0]:g}" if fill[0] == fill[1] else f"{fill[0]:g} to {fill[1]:g}"
                rows.append((shown, policy, *jcts, *spans))
        header = (
            "fill",
            "policy",
            *(f"JCT, {n} per GPU" for n in PER_GPU),
            *(f"hours, {n}" for n in PER_GPU),
        )
        title = f"{given.days} days of {given.jobs} small jobs in {HOURS:g} h on {cluster}"
        table(f"{title}: average JCT in s, makespan in h", header, rows)
    write_json("fractions", records)


def mean(
    profiles: ProfileSet,
    cluster: str,
    policy: str,
    fill: tuple[float, float],
    per_gpu: int,
    days: int,
    jobs: int,
) -> dict[str, float]:
    """The mean figures over the days, which differ only in the seed."""
    found = []
    for day in range(days):
        load = generate_jobs(
            profiles, jobs=jobs, hours=HOURS, seed=day, max_gpus=8, max_gpu_hours=GPU_HOURS, fill=fill
        )
        shared = Cluster.parse(cluster).shared_by(per_gpu)
        found.append(simulate(load, profiles, shared, policy, resize_cost=COST_S).record())
    return {
        name: float(np.mean([record[name] for record in found]))
        for name in ("avg_jct_s", "p99_jct_s", "makespan_s", "finished")
    }


if __name__ == "__main__":
    main()
