"""What several small jobs on one GPU are worth: working days of them, with 1, 2 and 4 slots on each GPU.

    python -m benchmarks.fractions
    python -m benchmarks.fractions --promises 900    # are promises kept, whoever the neighbours are?

Each line is the mean over generated days of small jobs (at most one GPU-hour each) that overload machines
whose GPUs run one job at a time. `fill` is which part of a GPU's time a worker uses alone. How fast
jobs on one GPU are: docs/reference/simulator.md, "Several jobs on one GPU".

With `--promises`, so many random traces are simulated under policies that give promises, which are told the
jobs' speed without neighbours, and late jobs are counted (docs/decisions/0037).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import table, write_json
from swell.domain import Cluster, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.generate import generate_jobs

FILLS = ((0.1, 0.4), (0.1, 1.0), (1.0, 1.0))
PER_GPU = (1, 2, 4)
POLICIES = ("tide", "max-min")
DAYS = 5
JOBS, HOURS, GPU_HOURS = 400, 8.0, 1.0
COST_S = 5.0
PROMISING = ("elasticflow", "tide-fixed", "edf-admission", "oasis")


def main() -> None:
    """Run all combinations and print one table for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", action="append", help="default: 1x8 and 4x2")
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--promises", type=int, metavar="TRACES", help="count late promises in them")
    given = parser.parse_args()
    profiles, records = ProfileSet.load(None), []
    if given.promises is not None:
        promises(profiles, given.promises)
        return
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


def promises(profiles: ProfileSet, traces: int) -> None:
    """Count promises and late ones in random traces, by policy."""
    kept: dict[str, list[int]] = {policy: [0, 0, 0] for policy in PROMISING}
    for seed in range(traces):
        rng, policy = np.random.default_rng(seed), PROMISING[seed % len(PROMISING)]
        per_gpu, least = int(rng.choice([2, 4])), float(rng.choice([0.05, 0.5, 1.0]))
        load = generate_jobs(
            profiles,
            jobs=int(rng.integers(5, 50)),
            hours=float(rng.choice([0.2, 1.0, 5.0])),
            seed=seed,
            deadlines=0.9,
            max_gpus=8,
            max_gpu_hours=20,
            fill=(least, 1.0),
        )
        cluster = Cluster.parse(str(rng.choice(["1x1", "1x4", "2x4", "4x1", "3x4"]))).shared_by(per_gpu)
        cost_s = float(rng.choice([0.0, 5.0, 60.0]))
        jobs = [with_time(job, per_gpu) for job in load]
        result = simulate(jobs, profiles, cluster, policy, resize_cost=cost_s)
        given = np.isfinite(result.promised_s)
        kept[policy] = [a + b for a, b in zip(kept[policy], (1, int(given.sum()), result.promises_broken))]
    rows = [(policy, *counts) for policy, counts in kept.items()]
    rows.append(("all", *np.sum(list(kept.values()), axis=0).tolist()))
    table("promises on shared GPUs", ("policy", "traces", "promises", "late"), rows)
    write_json("fractions_promises", kept)


def with_time(job: JobSpec, times: int) -> JobSpec:
    """The same job with so many times the time to its deadline: promises on shared GPUs count on less."""
    if job.deadline_s is None:
        return job
    return replace(job, deadline_s=job.submit_s + times * (job.deadline_s - job.submit_s))


if __name__ == "__main__":
    main()
