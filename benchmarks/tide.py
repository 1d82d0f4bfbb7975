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

from benchmarks import bounds
from benchmarks.common import data_dir, run, table, write_json
from benchmarks.deadlines import TRACES
from swell.domain import Cluster, FloatArray, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.metrics import SimulationResult
from swell.sim.traces import load_trace

TUNED_ON = {"workload-1", "workload-3", "elasticVpollux_e", "195job", "philly/b436b2"}
SEEN = {"workload-2", "workload-4", "cluster10", "philly_103959"}
# The Pollux authors' results (the data folder's README): average and p99 JCT in seconds.
POLLUX_JCT_S = (2089, 3323, 2188, 2721)
POLLUX_P99_S = (39105, 43324, 14570, 51976)
GOALS = ((60.0, 30.0, "tide", 0.85), (10.0, 1.0, "tide", 0.77), (60.0, 30.0, "tide:length=unknown", 0.93))
PARTS_OF_CLUSTER = (1, 2, 4, 8)
COST_S = 5.0
MOST_FOR_POLLUX = 200
"""Traces with more jobs than this, and smaller clusters, are not run with pollux, which takes minutes."""
POLLUX = "pollux:generations=10"
"""Few generations, since a thousand rounds of the genetic search take minutes."""


def seen(trace: str) -> str:
    """How far a trace took part in the choice of constants."""
    return "tuned" if trace in TUNED_ON else "seen" if trace in SEEN else "held out"


def jct() -> list[tuple[Any, ...]]:
    """Item 1: average JCT over the authors' Pollux."""
    data, rows, needed = data_dir() / "pollux", [], _workload_needs()
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
        least_s = [bounds.least_jct_s(each, 64, cost_s)["bound"] for each in needed]
        bound = sum(least_s) / sum(POLLUX_JCT_S)
        rows.append(("bound", setting, "mean of four", None, bound, None, None, None, None, ""))
        mean = sum(record["avg_jct_s"] for record in records) / sum(POLLUX_JCT_S)
        p99 = sum(record["p99_jct_s"] for record in records) / sum(POLLUX_P99_S)
        rows.append((policy, setting, "mean of four", None, mean, p99, None, None, goal, ""))
    header = ("policy", "rounds", "trace", "JCT s", "x Pollux", "p99 x", "max rho", "cpu s", "goal", "")
    table("Average JCT against the authors' Pollux, 16x4", header, rows)
    return rows


def _workload_needs() -> list[list[bounds.Need]]:
    """What the jobs of the four workloads need at least, whatever their batch sizes."""
    data, cluster = data_dir() / "pollux", Cluster.parse("16x4")
    profiles, found = ProfileSet.load(data / "profiles"), []
    for i in range(1, 5):
        jobs = load_trace(data / "workloads" / f"workload-{i}.csv", profiles, seed=0).jobs
        found.append(bounds.needs(jobs, profiles, cluster, adaptive=True))
    return found


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


def _met(result: SimulationResult) -> Any:
    return result.finish_s <= result.deadline_s


def _least_of(needed: list[bounds.Need], shown: list[JobSpec], which: Any, capacity: int) -> float:
    """The lower bound on the average JCT of some of the jobs, if there were no others."""
    by_submission = {(need.submit_s, need.deadline_s): need for need in needed}
    chosen = [by_submission[job.submit_s, job.deadline_s or np.inf] for job, one in zip(shown, which) if one]
    return bounds.least_jct_s(chosen, capacity, COST_S)["bound"]


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
            needed = bounds.needs(jobs, profiles, cluster)
            bound = bounds.most_deadlines(needed, cluster.capacity, COST_S)
            least_s = _least_of(needed, [by_id[i] for i in both[0].job_ids], shared, cluster.capacity)
            ratios = [float(m.mean()) for m in met]
            weighted = [float(weight[m].sum() / weight.sum()) for m in met]
            late = both[1].promises_broken
            figures = (*ratios, bound, *weighted, jct_s[1] / jct_s[0], least_s / jct_s[0], late)
            rows.append((name, str(cluster), *figures, seen(name)))
    header = ("trace", "cluster", "elasticflow", "tide", "bound", "by GPU-time: elasticflow", "tide")
    table("Strict deadline ratio, 5 s a resize", (*header, "JCT of both, x", "bound, x", "late", ""), rows)
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
        profiles, cluster = ProfileSet.load(None), Cluster.parse("16x4")
        jobs = load_trace(trace, profiles, seed=0, cluster_id=cluster_id).jobs
        for name, bound_s in bounds.least_jct_s(
            bounds.needs(jobs, profiles, cluster), cluster.capacity
        ).items():
            over = f"{bound_s / base[False] - 1:+.1%}"
            rows.append((f"philly/{cluster_id}", f"bound: {name}", bound_s, over, None, None, None, ""))
    header = ("trace", "policy", "JCT s", "against afs", "p99 s", "max rho", "cpu s", "")
    table("Philly, 16x4, resizes free (afs-l with known length, afs-p without)", header, rows)
    return rows


def mixed() -> list[tuple[Any, ...]]:
    """Item 5: every second job without its deadline, on full and half clusters."""
    rows = []
    for name, full, kind in TRACES:
        jobs, profiles = _load(name, kind)
        jobs = [replace(job, deadline_s=None) if i % 2 else job for i, job in enumerate(jobs)]
        for part in (1, 2):
            cluster = _smaller(full, part)
            needed = bounds.needs(jobs, profiles, cluster)
            most = bounds.most_deadlines(needed, cluster.capacity, COST_S)
            calm = [need for need in needed if np.isinf(need.deadline_s)]
            least_s = bounds.least_jct_s(calm, cluster.capacity, COST_S)["bound"]
            rows.append((name, str(cluster), "bound", most, least_s, None, ""))
            slow = (POLLUX,) if part == 1 and len(jobs) <= MOST_FOR_POLLUX else ()
            for policy in ("elasticflow", *slow, "afs-l", "max-min", "tide-fixed"):
                result = simulate(jobs, profiles, cluster, policy, resize_cost=COST_S)
                free = np.isinf(result.deadline_s)
                jct_s = (result.finish_s - result.submit_s)[free & ~np.isnan(result.finish_s)]
                ratio = result.deadline_met / int((~free).sum())
                figures = (ratio, float(jct_s.mean()), result.promises_broken, seen(name))
                rows.append((name, str(cluster), policy, *figures))
    header = ("trace", "cluster", "policy", "deadlines met", "best-effort JCT s", "late", "")
    table("Half of the jobs with deadlines, 5 s a resize", header, rows)
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
