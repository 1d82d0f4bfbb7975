"""Clusters with two GPU types: policies that tell types apart against the same policies blind to types.

    python -m benchmarks.gpu_types                        # 5 seeds, 4x4 A100 and 8x4 T4
    python -m benchmarks.gpu_types --seeds 2 --policy tide-fixed

Jobs are generated for every seed. A blind policy takes every GPU for one of the more frequent type; its jobs
are placed on one type where there is room, else on several, and then run as fast as on the slower one. 'One
type' is in between: every job is on one type, but which one is chosen by load alone.
`pollux` and `tide` learn the jobs' speed as they run, on each type; the others are told the true curves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import table, write_json
from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.policies import Policy, make_policy
from swell.policies.by_type import by_type
from swell.sim import simulate
from swell.sim.generate import generate_jobs

POLICIES = ("tide-fixed", "elasticflow", "max-min", "tide", "pollux")
CLUSTER = "8x4:T4,4x4:A100"
HOURS = 6.0
COST_S = 30.0


WAYS = ("blind", "one type", "by type")


def jct_s(policy: str, cluster_text: str, jobs: int, seed: int, way: str) -> float:
    """Average JCT of one run."""
    profiles, cluster = ProfileSet.load(None), Cluster.parse(cluster_text)
    chosen: Policy = make_policy(policy)
    if way == "one type":
        chosen = by_type(chosen, cluster)
    made = generate_jobs(profiles, jobs=jobs, hours=HOURS, seed=seed, max_gpu_hours=50.0, gpu_type="T4")
    result = simulate(
        made,
        profiles,
        cluster,
        chosen,
        resize_cost=COST_S,
        seed=seed,
        blind_to_types=way != "by type",
    )
    record = result.record()
    assert record["finished"] == jobs, record
    return float(record["avg_jct_s"])


def measure(
    policy: str, seeds: int, *, cluster: str = CLUSTER, jobs: int = 160, ways: Sequence[str] = WAYS
) -> dict[str, list[float]]:
    """By way: the average JCT in seconds on each seed."""
    return {way: [jct_s(policy, cluster, jobs, seed, way) for seed in range(seeds)] for way in ways}


def main() -> None:
    """Run all, and print what knowing the types is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--jobs", type=int, default=160)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    for policy in options.policy or POLICIES:
        runs = measure(policy, options.seeds, cluster=options.cluster, jobs=options.jobs)
        saved = 1 - np.array(runs["by type"]) / runs["blind"]
        figures[policy] = runs
        means = (statistics.mean(run) for run in runs.values())
        rows.append((policy, *means, *(f"{part:.0%}" for part in (saved.mean(), saved.min()))))
    write_json("gpu_types", figures)
    header = ("policy", *(f"{way}: JCT s" for way in WAYS), "saved, mean", "saved, worst seed")
    table(f"{options.cluster}, {options.jobs} jobs in {HOURS:g} h, {options.seeds} seeds", header, rows)


if __name__ == "__main__":
    main()
