"""All policies over generated families of workloads: mean ranks with 95% confidence intervals.

    python -m benchmarks.tournament                      # 5 seeds, all policies but the slow ones
    python -m benchmarks.tournament --seeds 2 --policy tide-fixed --policy afs-l
    python -m benchmarks.tournament --family 'load 2'

Each family is generated anew for every seed; no constant of any policy was chosen on them. Policies are
ranked in each run: by average JCT where no job has a deadline; else by deadlines met and by the JCT of
best-effort jobs, and the two ranks are averaged. Equal figures share their mean rank. `pollux`, `oasis` and
`themis` take minutes each, so they take part only if they are named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import table, write_json
from benchmarks.decision_time import SLOW
from swell.domain import Cluster, FloatArray
from swell.perf.profiles import ProfileSet
from swell.policies import policy_class, policy_names
from swell.sim import NodeFailure, simulate
from swell.sim.generate import generate_jobs


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of workload."""

    name: str
    load: float = 1.0
    """Jobs relative to the number that keeps the cluster just busy."""
    deadlines: float = 0.0
    cluster: str = "8x4"
    failures: int = 0
    """Nodes that are lost for half an hour each."""
    error: float = 0.0
    """Relative error of beliefs."""


FAMILIES = (
    Family(name="load 0.5", load=0.5),
    Family(name="load 1"),
    Family(name="load 2", load=2.0),
    Family(name="half with deadlines", deadlines=0.5),
    Family(name="half with deadlines, load 2", deadlines=0.5, load=2.0),
    Family(name="all with deadlines", deadlines=1.0),
    Family(name="failures", deadlines=0.5, failures=6),
    Family(name="mixed nodes", deadlines=0.5, cluster="4x4,2x8"),
    Family(name="beliefs wrong by 10%", deadlines=0.5, error=0.1),
    Family(name="beliefs wrong by 30%", deadlines=0.5, error=0.3),
)
BUSY_JOBS = 100
"""About this many jobs in 6 hours, none above 50 GPU-hours, keep 32 GPUs busy."""
HOURS = 6.0
COST_S = 10.0


def figures(family: Family, policy: str, seed: int) -> tuple[float, float]:
    """Deadlines met (NaN if nobody has one), and the average JCT of the jobs without deadlines."""
    profiles, cluster = ProfileSet.load(None), Cluster.parse(family.cluster)
    jobs = generate_jobs(
        profiles,
        jobs=round(BUSY_JOBS * family.load),
        hours=HOURS,
        seed=seed,
        deadlines=family.deadlines,
        max_gpu_hours=50.0,
    )
    rng = np.random.default_rng([seed, 5])
    lost = [
        NodeFailure(int(rng.integers(len(cluster.nodes))), float(at_s), 1800.0)
        for at_s in np.sort(rng.uniform(0, HOURS * 3600, family.failures))
    ]
    result = simulate(
        jobs,
        profiles,
        cluster,
        policy,
        resize_cost=COST_S,
        seed=seed,
        belief="profiles" if policy_class(policy.partition(":")[0]).knows == "fitted" else None,
        failures=lost,
        belief_error=family.error,
    )
    free = np.isinf(result.deadline_s)
    jct_s = (result.finish_s - result.submit_s)[free]
    met = result.deadline_met / int((~free).sum()) if (~free).any() else math.nan
    return met, float(np.nanmean(jct_s)) if free.any() else math.nan


def ranks(scores: FloatArray) -> FloatArray:
    """Ranks from 1 for the lowest score; equal ones share their mean."""
    below = (scores[:, None] > scores[None, :] + 1e-9).sum(axis=1)
    equal = (np.abs(scores[:, None] - scores[None, :]) <= 1e-9).sum(axis=1)
    return below + (equal + 1) / 2


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of a mean."""
    return 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    """Run the tournament."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--family", action="append", choices=[family.name for family in FAMILIES])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    policies = options.policy or [name for name in policy_names() if name not in SLOW | {"tide"}]
    total: dict[str, list[float]] = {policy: [] for policy in policies}
    rows: list[tuple[Any, ...]] = []
    for family in FAMILIES:
        if options.family and family.name not in options.family:
            continue
        runs = np.array([[figures(family, p, seed) for p in policies] for seed in range(options.seeds)])
        placed = []
        for run in runs:
            parts = [ranks(sign * run[:, c]) for c, sign in ((0, -1), (1, 1)) if not np.isnan(run[0, c])]
            placed.append(np.mean(parts, axis=0))
        for i, policy in enumerate(policies):
            mine = [float(place[i]) for place in placed]
            total[policy] += mine
            met, jct_s = (float(v) for v in runs[:, i].mean(axis=0))
            shown = (None if math.isnan(met) else met, None if math.isnan(jct_s) else jct_s)
            rows.append((family.name, policy, float(np.mean(mine)), interval(mine), *shown))
    header = ("family", "policy", "mean rank", "+-", "deadlines met", "best-effort JCT s")
    table(f"Ranks by family, {options.seeds} seeds", header, rows)
    overall = [(policy, float(np.mean(r)), interval(r)) for policy, r in total.items()]
    overall.sort(key=lambda row: row[1])
    table(f"Overall, {len(next(iter(total.values())))} runs", ("policy", "mean rank", "+-"), overall)
    write_json("tournament", {"families": rows, "overall": overall})


if __name__ == "__main__":
    main()
