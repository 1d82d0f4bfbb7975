"""Average JCT of pollux, tiresias and optimus against the Pollux authors' own simulator.

    python -m benchmarks.fidelity [--policy tiresias]

16 nodes x 4 GPUs, rounds of 60 s, 30 s per resize, workload-1 to workload-4.
"""

from __future__ import annotations

import argparse

from benchmarks.common import data_dir, pick, run, table, write_json

# The authors' results (OSDI'21 artifact), as given in the data folder's README: average JCT in seconds.
AUTHORS = {
    "pollux": (2089, 3323, 2188, 2721),
    "optimus": (4087, 6914, 3944, 5968),
    "tiresias": (2474, 5145, 3876, 3280),
}
SHOWN = ("p99_jct_s", "makespan_s", "resizes", "cpu_s")
TOLERANCE = {"pollux": 0.10, "optimus": 0.10, "tiresias": 0.05}


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", choices=sorted(AUTHORS))
    chosen = parser.parse_args().policy or list(AUTHORS)
    data = data_dir() / "pollux"
    records, rows = [], []
    for policy in chosen:
        ours = []
        for i in range(1, 5):
            record = run(
                data / "workloads" / f"workload-{i}.csv",
                policy,
                "16x4",
                profiles=data / "profiles",
                interval_s=60.0,
                resize_cost=30.0,
            )
            records.append(record)
            ours.append(record["avg_jct_s"])
            theirs = AUTHORS[policy][i - 1]
            rows.append(
                (
                    policy,
                    record["trace"],
                    theirs,
                    ours[-1],
                    f"{ours[-1] / theirs - 1:+.1%}",
                    *pick(record, SHOWN),
                )
            )
        mean, theirs_mean = sum(ours) / 4, sum(AUTHORS[policy]) / 4
        off = mean / theirs_mean - 1
        verdict = "ok" if abs(off) <= TOLERANCE[policy] else f"beyond {TOLERANCE[policy]:.0%}"
        rows.append((policy, "mean", theirs_mean, mean, f"{off:+.1%} {verdict}", None, None, None, None))
    header = ("policy", "trace", "authors' JCT s", "ours", "difference", *SHOWN)
    table("Average JCT, 16x4, rounds of 60 s, 30 s per resize", header, rows)
    write_json("fidelity-jct", records)


if __name__ == "__main__":
    main()
