"""One ImageNet job on rented nodes: goodput-driven autoscaling against throughput-only and fixed clusters.

    python -m benchmarks.autoscaling                # Pollux's measured imagenet profile, at most 32x4 T4
    python -m benchmarks.autoscaling --seeds 5      # of spot loss

The job is the one of Pollux's cloud experiment: it trains through the 90 epochs of the measured profile and
adapts its batch size. A node costs 1 an hour, from the request on, and starts in 120 s. With spot loss a node
lives 6 hours on average. Resizes cost what swell's take (`--resize-cost model`).

    fixed            that many nodes from beginning to end
    throughput       Pollux's range of utility, for the speed-up in throughput; the job uses the batch with
                     the most samples per second. This is the autoscaler that Pollux was compared with
    .. own batch     the same, but the job chooses its batch by goodput
    .. least gain    the same as 'throughput', but no node that adds hardly any throughput
    goodput, range   Pollux's range of utility, for the speed-up in goodput
    goodput, worth   the least cost where the job's time costs too: an hour sooner is worth that many nodes
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import data_dir, table, write_json
from swell.domain import Cluster, JobSpec
from swell.perf.profiles import ProfileSet
from swell.sim import parse_cloud, parse_cost, simulate

JOB = JobSpec(job_id="imagenet", submit_s=0.0, model="imagenet", batch_size=200)
FIXED = (4, 8, 16, 32)
SPOT_H = 6
BASELINE = "throughput"


class Way(NamedTuple):
    """One way to decide about nodes."""

    name: str
    options: str
    throughput_only: bool = False
    """Whether the job chooses the batch with the most samples per second."""


WAYS = (
    Way(BASELINE, "measure=throughput,gain=0", throughput_only=True),
    Way(".. own batch", "measure=throughput,gain=0"),
    Way(".. least gain", "measure=throughput", throughput_only=True),
    Way("goodput, range .50-.67", ""),
    Way("goodput, range .40-.55", "low=0.4,high=0.55"),
    Way("goodput, range .30-.45", "low=0.3,high=0.45"),
    *(Way(f"goodput, worth {worth}", f"worth={worth}") for worth in (15, 60, 150, 300)),
)


def run(way: Way, most: int, spot: bool, seed: int, policy: str) -> tuple[float, float]:
    """Hours and cost of one run."""
    profiles = ProfileSet.load(data_dir() / "pollux" / "profiles")
    cluster = Cluster.parse(f"{most}x4")
    options = way.options + (f",spot={SPOT_H}" if spot else "")
    record = simulate(
        [JOB],
        profiles,
        cluster,
        policy,
        resize_cost=parse_cost("model"),
        seed=seed,
        cloud=parse_cloud(options, cluster, seed),
        throughput_only=way.throughput_only,
    ).record()
    return record["makespan_s"] / 3600, record["cost"]


def fixed(nodes: int, policy: str) -> tuple[float, float]:
    """Hours and cost on a cluster that is rented from beginning to end, its start included."""
    profiles = ProfileSet.load(data_dir() / "pollux" / "profiles")
    cluster = Cluster.parse(f"{nodes}x4")
    record = simulate([JOB], profiles, cluster, policy, resize_cost=parse_cost("model")).record()
    hours = record["makespan_s"] / 3600 + 120 / 3600
    return hours, hours * nodes


def main() -> None:
    """Run all, and print cost and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=32, help="nodes")
    parser.add_argument("--policy", default="tide")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for spot in (False, True):
        found: dict[str, tuple[float, float]] = {}
        if not spot:
            found = {f"fixed {nodes}": fixed(nodes, options.policy) for nodes in FIXED}
        for way in WAYS:
            seeds = range(options.seeds if spot else 1)
            runs = [run(way, options.most, spot, seed, options.policy) for seed in seeds]
            hours, cost = np.mean(runs, axis=0).tolist()
            found[way.name] = hours, cost
        rows = []
        for name, (hours, cost) in found.items():
            than = (hours / found[BASELINE][0] - 1, cost / found[BASELINE][1] - 1)
            rows.append((name, f"{hours:.2f}", f"{cost:.1f}", *(f"{part:+.0%}" for part in than)))
        title = f"with spot loss, mean of {options.seeds} seeds" if spot else "no spot loss"
        header = ("nodes by", "hours", "cost", "time", "cost against throughput")
        table(f"imagenet, at most {options.most}x4, {title}", header, rows)
        figures["spot" if spot else "steady"] = found
    write_json("autoscaling", figures)


if __name__ == "__main__":
    main()
