"""Against the authors' own figures on their own traces. Needs the public data; skipped without it.

The full tables, with every policy and trace, are `python -m benchmarks.fidelity`, `.deadlines` and `.afs`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swell.domain import Cluster
from swell.perf.profiles import ProfileSet
from swell.sim import simulate
from swell.sim.traces import load_trace

DATA = Path(os.environ.get("SWELL_DATA", Path(__file__).parents[3] / "shared" / "data"))

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no public traces at {DATA}: set SWELL_DATA"),
]


@cache
def profiles(path: Path | None) -> ProfileSet:
    return ProfileSet.load(path)


def run(trace: Path, policy: str, cluster: str, known: Path | None, **options: Any) -> dict[str, Any]:
    cluster_id = options.pop("cluster_id", None)
    loaded = load_trace(trace, profiles(known), cluster_id=cluster_id)
    return simulate(loaded.jobs, profiles(known), Cluster.parse(cluster), policy, **options).record()


def average_jct(policy: str, *workloads: int) -> float:
    home = DATA / "pollux"
    records = [
        run(
            home / f"workloads/workload-{i}.csv",
            policy,
            "16x4",
            home / "profiles",
            interval_s=60.0,
            resize_cost=30.0,
        )
        for i in workloads
    ]
    assert all(r["finished"] == 160 for r in records)
    return float(sum(r["avg_jct_s"] for r in records)) / len(records)


def test_tiresias_is_within_5_percent_of_the_pollux_authors() -> None:
    assert average_jct("tiresias", 1, 2, 3, 4) == pytest.approx((2474 + 5145 + 3876 + 3280) / 4, rel=0.05)


def test_optimus_is_within_10_percent_of_the_pollux_authors() -> None:
    assert average_jct("optimus", 1, 2, 3, 4) == pytest.approx((4087 + 6914 + 3944 + 5968) / 4, rel=0.10)


@pytest.mark.slow
def test_pollux_is_within_5_percent_of_its_authors() -> None:
    assert average_jct("pollux", 3) == pytest.approx(2188, rel=0.05)  # `make bench` has all eight


@pytest.mark.parametrize(
    ("trace", "cluster", "kind", "goal", "edf", "tiresias"),
    [
        ("elasticVpollux_e", "16x4", "T4", 0.74, 0.118, 0.287),
        ("195job", "16x8", "A100", 0.87, 0.087, 0.462),
        ("cluster10", "32x8", "A100", 0.98, 0.777, 0.477),
        ("philly_103959", "32x8", "A100", 0.92, 0.436, 0.466),
    ],
)
def test_deadlines_of_elasticflow_and_of_those_it_was_compared_with(
    trace: str, cluster: str, kind: str, goal: float, edf: float, tiresias: float
) -> None:
    home = DATA / "elasticflow"
    records = {
        policy: run(home / f"{trace}.csv", policy, cluster, home / f"throughputs_{kind}", resize_cost=5.0)
        for policy in ("elasticflow", "edf", "tiresias:thresholds=3250/7200,fifo=start")
    }
    assert records["elasticflow"]["deadline_ratio"] >= goal
    assert records["elasticflow"]["promises_broken"] == 0
    assert records["edf"]["deadline_ratio"] == pytest.approx(edf, abs=0.05)
    ratio = records["tiresias:thresholds=3250/7200,fifo=start"]["deadline_ratio"]
    assert ratio == pytest.approx(tiresias, abs=0.05)


def test_afs_beats_those_it_was_made_to_beat() -> None:
    trace = DATA / "philly" / "philly.csv"
    jct = {
        policy: run(trace, policy, "16x4", None, cluster_id="b436b2")["avg_jct_s"]
        for policy in ("afs-l", "afs-p", "tiresias", "max-min")  # benchmarks/afs.py has the others
    }
    assert all(jct["afs-l"] < jct[other] for other in ("tiresias", "max-min"))
    assert jct["afs-p"] < jct["tiresias"]


def test_whole_simulations_stay_fast() -> None:
    """Far above what `benchmarks/speed.py` shows: a guard against a lost compilation, not a race."""
    home = DATA / "elasticflow"
    record = run(home / "195job.csv", "elasticflow", "16x8", home / "throughputs_A100", resize_cost=5.0)
    assert record["cpu_s"] < 2.0
    trace = DATA / "philly" / "philly.csv"
    assert run(trace, "afs-l", "16x4", None, cluster_id="11cb48")["cpu_s"] < 12.0
