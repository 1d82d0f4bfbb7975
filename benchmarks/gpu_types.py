"""Clusters with two GPU types: policies that tell types apart against the same policies blind to types.

    python -m benchmarks.gpu_types                        # 5 seeds, 4x4 A100 and 8x4 T4
    python -m benchmarks.gpu_types --seeds 2 --policy tide-fixed

Jobs are generated for every seed. A blind policy takes every GPU for one of the more frequent type; its jobs
are placed on one type where there is room, else on several, and then run as fast as on the slower one.
`pollux` and `tide` learn the jobs' speed as they run, on each type; the others are told the true curves.
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

POLICIES = ("tide-fixed", "elasticflow", "max-min", "tide", "pollux")
CLUSTER = "8x4:T4,4x4:A100"
HOURS = 6.0
COST_S = 30.0


def jct_s(policy: str, cluster: str, jobs: int, seed: int, *, blind: bool) -> tuple[float, float]:
    """Average JCT of one run, and the GPU utilisation."""
    profiles = ProfileSet.load(None)
    made = generate_jobs(profiles, jobs=jobs, hours=HOURS, seed=seed, max_gpu_hours=50.0, gpu_type="T4")
    result = simulate(
        made,
        profiles,
        Cluster.parse(cluster),
        policy,
        resize_cost=COST_S,
        seed=seed,
        blind_to_types=blind,
    )
    record = result.record()
    assert record["finished"] == jobs, record
    return record["avg_jct_s"], record["gpu_utilisation"]


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
        runs = [
            [jct_s(policy, options.cluster, options.jobs, seed, blind=blind)[0] for blind in (True, False)]
            for seed in range(options.seeds)
        ]
        blind, aware = np.array(runs).T
        saved = 1 - aware / blind
        figures[policy] = {"blind_s": blind.tolist(), "by_type_s": aware.tolist()}
        rows.append((policy, blind.mean(), aware.mean(), *(f"{x:.0%}" for x in (saved.mean(), saved.min()))))
    write_json("gpu_types", figures)
    header = ("policy", "blind: JCT s", "by type: JCT s", "saved, mean", "saved, worst seed")
    table(f"{options.cluster}, {options.jobs} jobs in {HOURS:g} h, {options.seeds} seeds", header, rows)


if __name__ == "__main__":
    main()
