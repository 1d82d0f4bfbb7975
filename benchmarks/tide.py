"""tide against each published scheduler at its own game, with what no scheduler can beat beside it.

    python -m benchmarks.tide                 # all parts
    python -m benchmarks.tide --part jct      # one of: jct, deadlines, errors, afs, mixed

jct        average JCT on the Pollux authors' workloads against their Pollux, with and without length
deadlines  strict deadline ratios against elasticflow on full and smaller clusters, by jobs and by GPU-time
errors     admitted jobs that are late if every belief is wrong by 10% and 30%
afs        average JCT on Philly virtual clusters against afs-l and afs-p
mixed      half of the jobs with deadlines: elasticflow on those, pollux, afs-l and max-min on the others

The last column says what the choice of constants has seen. 'tuned': constants were chosen on it. 'seen': its
figures were printed beside others while choosing, and a few close calls were decided with them. 'held out':
it was first run after the last constant was chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import data_dir, run, table, write_json
from benchmarks.deadlines import TRACES
from benchmarks.elasticflow import feasible
from swell.domain import Cluster, FloatArray, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.metrics import Result
from swell.sim.traces import load_trace

TUNED_ON = {"workload-1", "workload-3", "elasticVpollux_e", "195job", "philly/b436b2"}
SEEN = {"workload-2", "workload-4", "cluster10", "philly_103959"}
# The Pollux authors' results (the data folder's README): average and p99 JCT in seconds.
POLLUX_JCT_S = (2089, 3323, 2188, 2721)
POLLUX_P99_S = (39105, 43324, 14570, 51976)
GOALS = ((60.0, 30.0, "tide", 0.85), (10.0, 1.0, "tide", 0.77), (60.0, 30.0, "tide:length=unknown", 0.93))
PARTS_OF_CLUSTER = (1, 2, 4, 8)
COST_S = 5.0


def seen(trace: str) -> str:
    """How far a trace took part in the choice of constants."""
    return "tuned" if trace in TUNED_ON else "seen" if trace in SEEN else "held out"


def jct() -> list[tuple[Any, ...]]:
    """Item 1: average JCT over the authors' Pollux."""
    data, rows = data_dir() / "pollux", []
    for interval_s, cost_s, policy, goal in GOALS:
        records = [
            run(
                data / "workloads" / f"workload-{i}.csv",
                policy,
                "16x4",
                profiles=data / "profiles",
                interval_s=interval_s,
                resize_cost=cost_s,
            )
            for i in range(1, 5)
        ]
        setting = f"{interval_s:.0f} s, cost {cost_s:.0f} s"
        for i, record in enumerate(records):
            over, p99 = record["avg_jct_s"] / POLLUX_JCT_S[i], record["p99_jct_s"] / POLLUX_P99_S[i]
            cells = (record["avg_jct_s"], over, p99, record["max_rho"], record["cpu_s"], None)
            rows.append((policy, setting, record["trace"], *cells, seen(record["trace"])))
        mean = sum(record["avg_jct_s"] for record in records) / sum(POLLUX_JCT_S)
        p99 = sum(record["p99_jct_s"] for record in records) / sum(POLLUX_P99_S)
        rows.append((policy, setting, "mean of four", None, mean, p99, None, None, goal, ""))
    header = ("policy", "rounds", "trace", "JCT s", "x Pollux", "p99 x", "max rho", "cpu s", "goal", "")
    table("Average JCT against the authors' Pollux, 16x4", header, rows)
    return rows


def _load(name: str, kind: str) -> tuple[list[JobSpec], ProfileSet]:
    data = data_dir() / "elasticflow"
    profiles = ProfileSet.load(data / f"throughputs_{kind}")
    return list(load_trace(data / f"{name}.csv", profiles, seed=0).jobs), profiles


def _smaller(full: str, part: int) -> Cluster:
    nodes, gpus = (int(count) for count in full.split("x"))
    return Cluster.parse(f"{nodes // part}x{gpus}")


def gpu_time(jobs: Sequence[JobSpec], profiles: ProfileSet, cluster: Cluster) -> FloatArray:
    """GPU-seconds of each job on the GPUs it asked for, the weights of the weighted ratio."""
    out = []
    for job in jobs:
        profile = profiles.get(job.model)
        curve = profile.curve(job.batch_size, 512, cluster.gpus_per_node, profile.gpu_types[0])
        gpus = job.gpus if curve[job.gpus] > 0 else int(np.argmax(curve > 0))
        out.append((job.work or 0.0) / float(curve[gpus]) * gpus)
    return np.array(out)


def capacity_bound(jobs: Sequence[JobSpec], profiles: ProfileSet, cluster: Cluster) -> float:
    """No scheduler meets more deadlines than this: a relaxation of capacity.

    Every job may run at its most efficient at any moment, in any fraction of GPUs, from the first submission
    on; all work of the chosen jobs must fit before the latest deadline, and jobs that are late even alone
    are left out. The most jobs are met by taking the cheapest first.
    """
    cheapest, alone = [], []
    for job in jobs:
        profile = profiles.get(job.model)
        curve = profile.curve(job.batch_size, cluster.capacity, cluster.gpus_per_node, profile.gpu_types[0])
        work = job.work or 0.0
        cheapest.append(work / float((curve[1:] / np.arange(1, len(curve))).max()))
        alone.append(job.submit_s + COST_S + work / float(curve.max()) <= (job.deadline_s or np.inf))
    costs = np.sort(np.array(cheapest)[np.array(alone)])
    last_s = max(job.deadline_s or 0.0 for job in jobs) - min(job.submit_s for job in jobs)
    return float((np.cumsum(costs) <= cluster.capacity * last_s).sum()) / len(jobs)


def _met(result: Result) -> Any:
    return result.finish_s <= result.deadline_s


def deadlines() -> list[tuple[Any, ...]]:
    """Item 2: deadline ratios, and the JCT of the jobs that both meet."""
    rows = []
    for name, full, kind in TRACES:
        jobs, profiles = _load(name, kind)
        for part in PARTS_OF_CLUSTER:
            cluster = _smaller(full, part)
            both = [
                simulate(jobs, profiles, cluster, policy, resize_cost=COST_S)
                for policy in ("elasticflow", "tide-fixed")
            ]
            by_id = {job.job_id: job for job in jobs}
            weight = gpu_time([by_id[i] for i in both[0].job_ids], profiles, cluster)
            met = [_met(result) for result in both]
            shared = met[0] & met[1]
            jct_s = [float((r.finish_s - r.submit_s)[shared].mean()) for r in both]
            bound = min(feasible(jobs, profiles, cluster, COST_S), capacity_bound(jobs, profiles, cluster))
            ratios = [float(m.mean()) for m in met]
            weighted = [float(weight[m].sum() / weight.sum()) for m in met]
            late = both[1].promises_broken
            figures = (*ratios, bound, *weighted, jct_s[1] / jct_s[0], late)
            rows.append((name, str(cluster), *figures, seen(name)))
    header = ("trace", "cluster", "elasticflow", "tide", "bound", "by GPU-time: elasticflow", "tide")
    table("Strict deadline ratio, 5 s a resize", (*header, "JCT of both, x", "late", ""), rows)
    return rows


def errors() -> list[tuple[Any, ...]]:
    """Item 3: who is late if beliefs are wrong."""
    rows = []
    for error in (0.1, 0.3):
        for policy in ("elasticflow", "tide-fixed"):
            late = admitted = met = total = 0
            for name, full, kind in TRACES:
                jobs, profiles = _load(name, kind)
                for part in (1, 4):
                    cluster = _smaller(full, part)
                    result = simulate(jobs, profiles, cluster, policy, resize_cost=COST_S, belief_error=error)
                    late += result.promises_broken
                    admitted += int((result.rejected == 0).sum())
                    met += result.deadline_met
                    total += len(jobs)
            rows.append((f"{error:.0%}", policy, admitted, late, f"{late / admitted:.2%}", met / total))
    header = ("beliefs wrong by", "policy", "admitted", "late", "part", "deadlines met")
    table("Promises with wrong beliefs, four traces on full and quarter clusters", header, rows)
    return rows


def alone_jct_s(cluster_id: str, shape: str) -> float:
    """Average JCT if every job had the whole cluster to itself: no scheduler is below it."""
    profiles, cluster = ProfileSet.load(None), Cluster.parse(shape)
    jobs = load_trace(data_dir() / "philly" / "philly.csv", profiles, seed=0, cluster_id=cluster_id).jobs
    best: dict[tuple[str, int], float] = {}
    for job in jobs:
        if (job.model, job.batch_size) not in best:
            profile = profiles.get(job.model)
            kind = profile.resolve(cluster.gpu_types[0])
            curve = profile.curve(job.batch_size, cluster.capacity, cluster.gpus_per_node, kind)
            best[job.model, job.batch_size] = float(curve.max())
    return sum((job.work or 0.0) / best[job.model, job.batch_size] for job in jobs) / len(jobs)


def afs() -> list[tuple[Any, ...]]:
    """Item 4: Philly virtual clusters, resizes free."""
    trace, rows = data_dir() / "philly" / "philly.csv", []
    for cluster_id in ("b436b2", "6c71a0", "11cb48"):
        figures = {
            policy: run(trace, policy, "16x4", cluster_id=cluster_id)
            for policy in ("afs-l", "tide-fixed", "afs-p", "tide-fixed:length=unknown")
        }
        base = {False: figures["afs-l"]["avg_jct_s"], True: figures["afs-p"]["avg_jct_s"]}
        for policy, record in figures.items():
            over = record["avg_jct_s"] / base[policy in ("afs-p", "tide-fixed:length=unknown")] - 1
            cells = (record["avg_jct_s"], f"{over:+.1%}", record["p99_jct_s"], record["max_rho"])
            rows.append((record["trace"], policy, *cells, record["cpu_s"], seen(record["trace"])))
        alone_s = alone_jct_s(cluster_id, "16x4")
        over = f"{alone_s / base[False] - 1:+.1%}"
        rows.append(
            (f"philly/{cluster_id}", "bound: alone on the cluster", alone_s, over, None, None, None, "")
        )
    header = ("trace", "policy", "JCT s", "against afs", "p99 s", "max rho", "cpu s", "")
    table("Philly, 16x4, resizes free (afs-l with known length, afs-p without)", header, rows)
    return rows


def mixed() -> list[tuple[Any, ...]]:
    """Item 5: every second job without its deadline."""
    rows = []
    for name, full, kind in TRACES:
        jobs, profiles = _load(name, kind)
        jobs = [replace(job, deadline_s=None) if i % 2 else job for i, job in enumerate(jobs)]
        slow = ("pollux:generations=30",) if full == "16x4" else ()  # minutes on larger clusters
        for policy in ("elasticflow", *slow, "afs-l", "max-min", "tide-fixed"):
            result = simulate(jobs, profiles, Cluster.parse(full), policy, resize_cost=COST_S)
            free = np.isinf(result.deadline_s)
            jct_s = (result.finish_s - result.submit_s)[free & ~np.isnan(result.finish_s)]
            ratio = result.deadline_met / int((~free).sum())
            rows.append((name, policy, ratio, float(jct_s.mean()), result.promises_broken, seen(name)))
    header = ("trace", "policy", "deadlines met", "best-effort JCT s", "late", "")
    table("Half of the jobs with deadlines, full clusters, 5 s a resize", header, rows)
    return rows


PARTS: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "jct": jct,
    "deadlines": deadlines,
    "errors": errors,
    "afs": afs,
    "mixed": mixed,
}


def main() -> None:
    """Run the chosen parts and keep their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    for part in parser.parse_args().part or list(PARTS):
        write_json(f"tide-{part}", PARTS[part]())


if __name__ == "__main__":
    main()
