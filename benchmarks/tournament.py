"""All policies over generated families of workloads and over public traces: mean ranks with 95% intervals.

    python -m benchmarks.tournament                      # 5 seeds, all policies but the slow ones
    python -m benchmarks.tournament --seeds 2 --policy tide-fixed --policy afs-l
    python -m benchmarks.tournament --family 'load 2'    # only this one
    python -m benchmarks.tournament --add --family ...   # and the rest as in out/tournament.json

Each family is generated anew for every seed; no constant of any policy was chosen on them. A trace is one
run; docs/lab/tide.md says which of them tide's constants were chosen on. Policies are ranked in each
run: by average JCT where no job has a deadline; else by deadlines met and by the JCT of best-effort jobs, and
the two ranks are averaged. Equal figures share their mean rank. The row 'bound' says what no policy can
exceed (`benchmarks.bounds`). `pollux`, `oasis` and `themis` take minutes each, so they take part only if they
are named. `tide` would be `tide-fixed` here, since all are told curves.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import bounds
from benchmarks.common import OUT, data_dir, table, write_json
from benchmarks.decision_time import SLOW
from swell.domain import Cluster, FloatArray, JobSpec
from swell.perf.profiles import ProfileSet
from swell.policies import policy_class, policy_names
from swell.sim import NodeFailure, simulate
from swell.sim.generate import generate_jobs
from swell.sim.traces import load_trace

BOUND = "bound"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of workload: generated, or a public trace."""

    name: str
    load: float = 1.0
    """Jobs relative to the number that keeps the cluster just busy."""
    deadlines: float = 0.0
    cluster: str = "8x4"
    failures: int = 0
    """Nodes that are lost for half an hour each."""
    error: float = 0.0
    """Relative error of beliefs."""
    trace: str = ""
    """Path of a trace in the data folder, in place of generated jobs."""
    profiles: str = ""
    cluster_id: str | None = None

    def jobs(self, seed: int) -> tuple[Sequence[JobSpec], ProfileSet]:
        """The jobs, and how fast they are."""
        profiles = ProfileSet.load(data_dir() / self.profiles if self.profiles else None)
        if self.trace:
            loaded = load_trace(data_dir() / self.trace, profiles, seed=0, cluster_id=self.cluster_id)
            return loaded.jobs, profiles
        jobs = generate_jobs(
            profiles,
            jobs=round(BUSY_JOBS * self.load),
            hours=HOURS,
            seed=seed,
            deadlines=self.deadlines,
            max_gpu_hours=50.0,
        )
        return jobs, profiles


def _elasticflow(name: str, cluster: str, kind: str) -> Family:
    profiles = f"elasticflow/throughputs_{kind}"
    return Family(name=name, cluster=cluster, trace=f"elasticflow/{name}.csv", profiles=profiles)


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
    _elasticflow("elasticVpollux_e", "16x4", "T4"),
    _elasticflow("195job", "16x8", "A100"),
    _elasticflow("cluster10", "32x8", "A100"),
    _elasticflow("philly_103959", "32x8", "A100"),
    Family(name="philly/6c71a0", cluster="16x4", trace="philly/philly.csv", cluster_id="6c71a0"),
    Family(name="philly/11cb48", cluster="16x4", trace="philly/philly.csv", cluster_id="11cb48"),
)
BUSY_JOBS = 100
"""About this many jobs in 6 hours, none above 50 GPU-hours, keep 32 GPUs busy."""
HOURS = 6.0
COST_S = 10.0
Figures = tuple[float, float]
"""Deadlines met, and the average JCT of the jobs without deadlines; NaN where there are none."""


def figures(family: Family, policy: str, seed: int) -> Figures:
    """What a policy reaches in one run."""
    jobs, profiles = family.jobs(seed)
    cluster = Cluster.parse(family.cluster)
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


def bound(family: Family, seed: int) -> Figures:
    """What no policy can exceed in one run."""
    jobs, profiles = family.jobs(seed)
    cluster = Cluster.parse(family.cluster)
    needed = bounds.needs(jobs, profiles, cluster)
    calm = [need for need in needed if math.isinf(need.deadline_s)]
    least_s = bounds.least_jct_s(calm, cluster.capacity, COST_S)[BOUND] if calm else math.nan
    return bounds.most_deadlines(needed, cluster.capacity, COST_S), least_s


def ranks(scores: FloatArray) -> FloatArray:
    """Ranks from 1 for the lowest score; equal ones share their mean."""
    below = (scores[:, None] > scores[None, :] + 1e-9).sum(axis=1)
    equal = (np.abs(scores[:, None] - scores[None, :]) <= 1e-9).sum(axis=1)
    return below + (equal + 1) / 2


def placed(runs: dict[str, list[Figures]]) -> dict[str, list[float]]:
    """The rank of each policy in each run."""
    policies = [policy for policy in runs if policy != BOUND]
    found: dict[str, list[float]] = {policy: [] for policy in policies}
    for seed in range(len(runs[policies[0]])):
        run = np.array([runs[policy][seed] for policy in policies])
        parts = [ranks(sign * run[:, c]) for c, sign in ((0, -1), (1, 1)) if not np.isnan(run[0, c])]
        for policy, rank in zip(policies, np.mean(parts, axis=0).tolist(), strict=True):
            found[policy].append(rank)
    return found


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95% confidence interval of a mean."""
    return 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def show(results: dict[str, dict[str, list[Figures]]]) -> None:
    """Print ranks by family, and over all runs."""
    rows: list[tuple[Any, ...]] = []
    total: dict[str, list[float]] = {}
    won: dict[str, int] = {}
    for name, runs in results.items():
        place = placed(runs)
        means = {policy: float(np.mean(mine)) for policy, mine in place.items()}
        for policy, mine in place.items():
            total.setdefault(policy, []).extend(mine)
            won[policy] = won.get(policy, 0) + (means[policy] <= min(means.values()) + 1e-9)
        for policy in runs:
            mean = (float(v) for v in np.array(runs[policy]).mean(axis=0))
            shown = (None if math.isnan(value) else value for value in mean)
            rank = (means[policy], interval(place[policy])) if policy in place else (None, None)
            rows.append((name, policy, *rank, *shown))
    header = ("family", "policy", "mean rank", "+-", "deadlines met", "best-effort JCT s")
    table("Ranks by family", header, rows)
    overall = [(p, float(np.mean(r)), interval(r), won[p], len(r)) for p, r in total.items()]
    overall.sort(key=lambda row: row[1])
    table(f"Overall, {len(results)} families", ("policy", "mean rank", "+-", "families won", "runs"), overall)


def main() -> None:
    """Run the tournament."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--family", action="append", choices=[family.name for family in FAMILIES])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="to the families in out/tournament.json")
    options = parser.parse_args()
    policies = options.policy or [name for name in policy_names() if name not in SLOW | {"tide"}]
    path = OUT / "tournament.json"
    before = json.loads(path.read_text()) if options.add and path.exists() else {}
    results: dict[str, dict[str, list[Figures]]] = {}
    for family in FAMILIES:
        if options.family and family.name not in options.family:
            if family.name in before:
                results[family.name] = before[family.name]
            continue
        seeds = range(1 if family.trace else options.seeds)
        results[family.name] = {p: [figures(family, p, seed) for seed in seeds] for p in policies}
        results[family.name][BOUND] = [bound(family, seed) for seed in seeds]
        write_json("tournament", before | results)
    show(results)


if __name__ == "__main__":
    main()
