"""Jobs on rented nodes: goodput-driven autoscaling against throughput-only and fixed clusters.

    python -m benchmarks.autoscaling                           # Pollux's imagenet profile, at most 32x4 T4
    python -m benchmarks.autoscaling --seeds 5                 # of spot loss
    python -m benchmarks.autoscaling --job bert --job mixed-1  # other jobs; `--job all`: all of them

The imagenet job is the one of Pollux's cloud experiment: it trains through the 90 epochs of the measured
profile and adapts its batch size. The other models of these profiles train to the end of theirs, from the
smallest batch that was measured. `mixed-1` to `mixed-4` are the first twenty jobs of workloads of Pollux;
their hours are the average JCT. A node costs 1 an hour, from the request on, and starts in 120 s. With spot
loss a node lives 6 hours on average. Resizes cost what swell's take (`--resize-cost model`).

    fixed            that many nodes from beginning to end
    throughput       Pollux's range of utility, for the speed-up in throughput; the job uses the batch with
                     the most samples per second. This is the autoscaler that Pollux was compared with
    .. own batch     the same, but the job chooses its batch by goodput
    .. least gain    the same as 'throughput', but no node that adds hardly any throughput
    goodput, range   Pollux's range of utility, for the speed-up in goodput
    goodput, worth   the least cost where the job's time costs too: an hour sooner is worth that many nodes
    goodput, pace    the fewest nodes on which jobs are as fast as on those of a throughput-only autoscaler
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import data_dir, table, write_json
from swell.domain import Cluster, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import parse_cloud, parse_cost, simulate
from swell.sim.traces import load_trace

BATCHES = {"imagenet": 200, "bert": 12, "cifar10": 128, "deepspeech2": 20, "ncf": 256, "yolov3": 8}
"""By model: the batch that its job starts with, the smallest that was measured."""
MIXED = {
    "mixed-1": "realistic-1.csv",
    "mixed-2": "workload-2.csv",
    "mixed-3": "workload-3.csv",
    "mixed-4": "workload-4.csv",
}
"""By name: the workload of Pollux whose first jobs these are."""
MIXED_JOBS = 20
JOBS = (*BATCHES, *MIXED)
FIXED = (4, 8, 16, 32)
SPOT_H = 6
BASELINE = "throughput"


class Way(NamedTuple):
    """One way to decide about nodes."""

    name: str
    options: str
    throughput_only: bool = False
    """Whether the job chooses the batch with the most samples per second."""


DEFAULT = Way("goodput, range .50-.67", "")
WORTH = Way("goodput, worth 300", "worth=300")
PACE = Way("goodput, pace 1", "pace=1")
WAYS = (
    Way(BASELINE, "measure=throughput,gain=0", throughput_only=True),
    Way(".. own batch", "measure=throughput,gain=0"),
    Way(".. least gain", "measure=throughput", throughput_only=True),
    DEFAULT,
    Way("goodput, range .40-.55", "low=0.4,high=0.55"),
    Way("goodput, range .30-.45", "low=0.3,high=0.45"),
    *(Way(f"goodput, worth {worth}", f"worth={worth}") for worth in (15, 60, 150)),
    WORTH,
    PACE,
)
JUDGED = (WAYS[0], DEFAULT, WORTH, PACE)
"""The ways that are compared on every job."""


class Result(NamedTuple):
    """What one run came to."""

    hours: float
    """Average JCT, from submission to the end."""
    cost: float


@cache
def profiles() -> ProfileSet:
    """The measured profiles of Pollux's models."""
    return ProfileSet.load(data_dir() / "pollux" / "profiles")


@cache
def jobs_of(name: str) -> tuple[JobSpec, ...]:
    """The job of a model, or the jobs of the mixed workload."""
    if name in MIXED:
        trace = data_dir() / "pollux" / "workloads" / MIXED[name]
        return tuple(load_trace(trace, profiles(), limit=MIXED_JOBS).jobs)
    return (JobSpec(job_id=name, submit_s=0.0, model=name, batch_size=BATCHES[name]),)


def run(way: Way, job: str, most: int, spot: bool, seed: int, policy: str) -> Result:
    """One job, or one workload, on rented nodes."""
    cluster = Cluster.parse(f"{most}x4")
    options = way.options + (f",spot={SPOT_H}" if spot else "")
    record = simulate(
        list(jobs_of(job)),
        profiles(),
        cluster,
        policy,
        resize_cost=parse_cost("model"),
        seed=seed,
        cloud=parse_cloud(options, cluster, seed),
        throughput_only=way.throughput_only,
    ).record()
    assert record["finished"] == len(jobs_of(job)), record
    return Result(record["avg_jct_s"] / 3600, record["cost"])


def fixed(job: str, nodes: int, policy: str) -> Result:
    """On a cluster that is rented from beginning to end, its start included."""
    cluster = Cluster.parse(f"{nodes}x4")
    cost = parse_cost("model")
    record = simulate(list(jobs_of(job)), profiles(), cluster, policy, resize_cost=cost).record()
    start_h = 120 / 3600
    return Result(record["avg_jct_s"] / 3600 + start_h, (record["makespan_s"] / 3600 + start_h) * nodes)


def measure(
    job: str, seeds: int, *, ways: Sequence[Way] = JUDGED, most: int = 32, policy: str = "tide"
) -> dict[str, dict[str, Result]]:
    """By 'steady' and 'spot', and by way: hours and cost, with spot loss the means over the seeds."""
    figures: dict[str, dict[str, Result]] = {}
    for name, spot in (("steady", False), ("spot", True)):
        figures[name] = {}
        for way in ways:
            runs = [run(way, job, most, spot, seed, policy) for seed in range(seeds if spot else 1)]
            figures[name][way.name] = Result(*np.mean(runs, axis=0).tolist())
    return figures


def main() -> None:
    """Run all, and print cost and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=32, help="nodes")
    parser.add_argument("--policy", default="tide")
    parser.add_argument("--job", action="append", choices=[*JOBS, "all"], help="may be given several times")
    parser.add_argument("--judged", action="store_true", help="only the ways that are compared on every job")
    options = parser.parse_args()
    asked = options.job or ["imagenet"]
    figures: dict[str, Any] = {}
    for job in JOBS if "all" in asked else asked:
        ways = JUDGED if options.judged else WAYS
        found = measure(job, options.seeds, ways=ways, most=options.most, policy=options.policy)
        if not options.judged:
            least = {f"fixed {nodes}": fixed(job, nodes, options.policy) for nodes in FIXED}
            found["steady"] = least | found["steady"]
        for name, results in found.items():
            rows = []
            base = results[BASELINE]
            for way, (hours, cost) in results.items():
                than = (hours / base.hours - 1, cost / base.cost - 1)
                rows.append((way, f"{hours:.2f}", f"{cost:.1f}", *(f"{part:+.0%}" for part in than)))
            title = f"with spot loss, mean of {options.seeds} seeds" if name == "spot" else "no spot loss"
            header = ("nodes by", "hours", "cost", "time", "cost against throughput")
            table(f"{job}, at most {options.most}x4, {title}", header, rows)
        figures[job] = found
    write_json("autoscaling", figures)


if __name__ == "__main__":
    main()
