"""The simulator at a glance: a workload like those of real clusters under six schedulers, side by side.

`make demo-sim` runs it. It takes well under a minute and needs nothing but the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swell.cli import main

WORKLOAD = Path("out") / "demo-jobs.csv"
CLUSTER = "4x4"
POLICIES = ("fifo", "tiresias", "optimus", "afs-l", "elasticflow", "pollux")


def swell(*words: str) -> None:
    """Say a command and run it, as if it had been typed."""
    print(f"\n$ swell {' '.join(words)}", flush=True)
    code = main.main(list(words), standalone_mode=False)
    if code:
        sys.exit(code)


def demo() -> None:
    """Generate, simulate, and say what to try next."""
    WORKLOAD.parent.mkdir(exist_ok=True)
    print(
        "A day's rush hour: 200 training jobs arrive within eight hours at a cluster of 16 GPUs.\n"
        "Half of them have a deadline. Who gets how many GPUs is up to the policy."
    )
    swell(
        *("generate", "--jobs", "200", "--hours", "8", "--seed", "1"),
        *("--deadlines", "0.5", "--max-gpus", "16", "--max-gpu-hours", "100", "-o", str(WORKLOAD)),
    )
    chosen = [word for policy in POLICIES for word in ("--policy", policy)]
    swell("simulate", str(WORKLOAD), "--cluster", CLUSTER, *chosen, "--resize-cost", "5")
    print(
        f"""
fifo and tiresias give each job the GPUs it asked for; the others let jobs grow and shrink.
JCT is the time from submission to completion; rho compares it with a fair share (1 is fair, less is better).
elasticflow refuses at once what it cannot finish by its deadline, and keeps its word for the rest.

What to type next:
  .venv/bin/swell policies                                       the policies, their papers and options
  .venv/bin/swell simulate {WORKLOAD} --cluster 8x4 --policy afs-l --policy max-min
  .venv/bin/swell simulate --help                                your own trace, other GPUs, JSON, events
"""
    )


if __name__ == "__main__":
    demo()
