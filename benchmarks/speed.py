"""CPU seconds of whole simulations, against what the authors' code needed on such a machine.

    python -m benchmarks.speed

Compiled code is built and cached before the clock starts: each case runs once on a few jobs first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import data_dir, run, table, write_json


def cases(data: Path) -> list[tuple[str, Path, str, str, dict[str, Any], float | None, float]]:
    """(name, trace, policy, cluster, options, the authors' CPU seconds, our limit)."""
    flow = data / "elasticflow"
    pollux: dict[str, Any] = {"profiles": data / "pollux/profiles", "interval_s": 60.0, "resize_cost": 30.0}
    a100: dict[str, Any] = {
        "profiles": flow / "throughputs_A100",
        "resize_cost": 5.0,
    }
    workload = data / "pollux/workloads/workload-1.csv"
    philly = data / "philly/philly.csv"
    return [
        ("tiresias workload-1", workload, "tiresias", "16x4", pollux, 20.0, 20.0 / 20),
        ("optimus workload-1", workload, "optimus", "16x4", pollux, 80.0, 80.0 / 20),
        ("pollux workload-1", workload, "pollux", "16x4", pollux, 1647.0, 1647.0 / 25),
        ("elasticflow 195job", flow / "195job.csv", "elasticflow", "16x8", a100, 8.0, 8.0 / 10),
        (
            "elasticflow cluster01",
            flow / "cluster01.csv",
            "elasticflow",
            "64x8",
            a100,
            None,
            30.0,
        ),
        ("afs-l philly 11cb48", philly, "afs-l", "16x4", {"cluster_id": "11cb48"}, None, 4.0),
        ("tiresias philly, all", philly, "tiresias", "256x8", {}, None, 60.0),
    ]


def main() -> None:
    """Run every case, the first time not counted."""
    records, rows = [], []
    small: dict[str, bool] = {}
    for name, trace, policy, cluster, options, theirs, limit in cases(data_dir()):
        if policy not in small:
            warm_up(policy)
            small[policy] = True
        record = run(trace, policy, cluster, **options)
        records.append(record | {"case": name, "limit_cpu_s": limit, "authors_cpu_s": theirs})
        ratio = f"{theirs / record['cpu_s']:.0f}x less" if theirs else ""
        verdict = "ok" if record["cpu_s"] <= limit else "over"
        rows.append((name, record["jobs"], cluster, theirs, record["cpu_s"], limit, ratio, verdict))
    header = ("case", "jobs", "cluster", "authors' cpu s", "ours", "limit", "ratio", "")
    table("CPU seconds per simulation", header, rows)
    write_json("speed", records)


def warm_up(policy: str) -> None:
    """Compile what this policy needs on a small generated workload."""
    from swell.domain import Cluster
    from swell.perf.profiles import ProfileSet
    from swell.sim import simulate
    from swell.sim.generate import generate_jobs

    profiles = ProfileSet.load(None)
    jobs = generate_jobs(profiles, jobs=12, hours=1.0, seed=1, deadlines=0.5)
    simulate(jobs, profiles, Cluster.parse("2x4"), policy, resize_cost=5.0)


if __name__ == "__main__":
    main()
