"""AFS on two virtual clusters of the Philly trace: average JCT against the policies it was made to beat.

    python -m benchmarks.afs

16 nodes x 4 GPUs, resizes cost nothing. Philly names no models: each job gets a shipped profile by seed.
"""

from __future__ import annotations

from benchmarks.common import data_dir, run, table, write_json

CLUSTERS = ("b436b2", "6c71a0")
POLICIES = ("afs-l", "srtf", "tiresias", "max-min", "optimus", "afs-p")


def main() -> None:
    """Run and compare."""
    trace = data_dir() / "philly" / "philly.csv"
    records = [run(trace, policy, "16x4", cluster_id=c) for c in CLUSTERS for policy in POLICIES]
    rows = [
        (r["trace"], r["policy"], r["jobs"], r["avg_jct_s"], r["p99_jct_s"], r["resizes"], r["cpu_s"])
        for r in records
    ]
    header = ("trace", "policy", "jobs", "avg JCT s", "p99 s", "resizes", "cpu s")
    table("Philly virtual clusters, 16x4, resizes free", header, rows)
    write_json("afs", records)


if __name__ == "__main__":
    main()
