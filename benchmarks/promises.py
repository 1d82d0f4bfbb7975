"""How many jobs that ElasticFlow or tide admits are late, with exact beliefs: there must be none.

    python -m benchmarks.promises            # 60 runs
    python -m benchmarks.promises --quick    # the tightest cluster of each trace only
    python -m benchmarks.promises --json     # one JSON object instead of a table
    python -m benchmarks.promises --policy tide-fixed
    python -m benchmarks.promises --crowded 2500    # that many generated workloads in place of the traces

The four ElasticFlow traces, each on its full cluster, on a half, a quarter and an eighth of it and on 4 nodes
of 4 GPUs, at 5, 30 and 60 s per resize. `--crowded`: workloads from `swell generate` with far more jobs than
the small cluster has room for, where promises are the tightest. Exits with 1 if any admitted job was late.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import data_dir, run, table, write_json
from benchmarks.deadlines import TRACES
from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.generate import generate_jobs

PARTS = (1, 2, 4, 8)
SMALL = "4x4"
RESIZE_COSTS_S = (5.0, 30.0, 60.0)
SHOWN = ("trace", "cluster", "resize_cost_s", "jobs", "admitted", "late", "deadline_ratio")


def sweep(quick: bool) -> Iterator[tuple[str, str, str, float]]:
    """Every run: trace, type of GPU, cluster, seconds per resize."""
    for name, full, kind in TRACES:
        nodes, gpus = (int(count) for count in full.split("x"))
        clusters = [SMALL] if quick else [*(f"{nodes // part}x{gpus}" for part in PARTS), SMALL]
        for cluster in clusters:
            for resize_cost_s in RESIZE_COSTS_S:
                yield name, kind, cluster, resize_cost_s


def measure(policy: str, name: str, kind: str, cluster: str, resize_cost_s: float) -> dict[str, Any]:
    """Simulate one of them; how many jobs were admitted, and how many of those were late."""
    data = data_dir() / "elasticflow"
    record = run(
        data / f"{name}.csv",
        policy,
        cluster,
        profiles=data / f"throughputs_{kind}",
        resize_cost=resize_cost_s,
    )
    return {
        "trace": name,
        "cluster": cluster,
        "resize_cost_s": resize_cost_s,
        "jobs": record["jobs"],
        "admitted": record["jobs"] - record["rejected"],
        "late": record["promises_broken"],
        "deadline_ratio": record["deadline_ratio"],
    }


def crowded(policy: str, count: int) -> dict[str, Any]:
    """Simulate generated workloads; how many jobs had a promise, and how many of those were late."""
    profiles, rng, found = (
        ProfileSet.load(None),
        random.Random(8),
        {"admitted": 0, "late": 0, "workloads": count},
    )
    for done in range(1, count + 1):
        seed, jobs, hours = rng.randint(0, 10_000), rng.randint(35, 60), rng.choice([0.2, 0.2, 1.0])
        cluster, cost_s = rng.choice(["2x4", "4x4", "2x8", "3x4"]), rng.choice([5.0, 60.0])
        load = generate_jobs(
            profiles, jobs=jobs, hours=hours, deadlines=0.9, seed=seed, max_gpus=8, max_gpu_hours=20
        )
        result = simulate(load, profiles, Cluster.parse(cluster), policy, resize_cost=cost_s)
        found["admitted"] += int((~np.isnan(result.promised_s)).sum())
        found["late"] += result.promises_broken
        if result.promises_broken:
            print(f"late: seed {seed}, {jobs} jobs in {hours:g} h on {cluster} at {cost_s:g} s", flush=True)
        if done % 250 == 0:
            print(f"{done}/{count}: {found['late']} late so far", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the sweep; 1 if somebody was late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the runs: clusters of 4x4 only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--crowded", type=int, metavar="N", help="N generated workloads instead")
    parser.add_argument("--policy", default="elasticflow", help="a policy that gives promises")
    options = parser.parse_args()
    if options.crowded:
        found = crowded(options.policy, options.crowded)
        print(
            json.dumps(found) if options.json else f"{found['late']} late of {found['admitted']:,} promised"
        )
        return 1 if found["late"] else 0
    todo = list(sweep(options.quick))
    records = []
    for done, item in enumerate(todo, 1):
        records.append(measure(options.policy, *item))
        name, _, cluster, resize_cost_s = item
        late = sum(record["late"] for record in records)
        print(
            f"{done}/{len(todo)} {name} on {cluster} at {resize_cost_s:g} s: {late} late so far",
            file=sys.stderr,
            flush=True,
        )
    admitted = sum(record["admitted"] for record in records)
    late = sum(record["late"] for record in records)
    figures = {"admitted": admitted, "late": late, "runs": records}
    name = "promises" if options.policy == "elasticflow" else f"promises-{options.policy.replace(':', '-')}"
    write_json(f"{name}-quick" if options.quick else name, figures)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        rows = [[record[field] for field in SHOWN] for record in records]
        table(f"Promises of {options.policy}, exact beliefs", SHOWN, rows)
        print(f"\n{late} late of {admitted:,} admitted")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
