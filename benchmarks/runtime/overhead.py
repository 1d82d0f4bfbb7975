"""Must-show 4: a step of each mode against plain DDP (gradient_as_bucket_view) at two workers."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.harness import running

SCRIPT = Path(__file__).with_name("overhead_script.py")


def measure(mode: str, workers: int = 2, timeout_s: float = 150.0) -> dict[str, Any]:
    """Median step of ours and of DDP, taken in turns in the same processes, and their ratio."""
    options = ["--workers", str(workers), "--threads", "1"]
    with running(["--mode", mode], options, SCRIPT) as job:
        deadline = time.monotonic() + timeout_s
        result = job.out / "result.json"
        while not result.exists() and job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)
        if not result.exists():
            raise RuntimeError((job.root / "run.log").read_text()[-2000:])
        times = json.loads(result.read_text())
    ours, theirs = times["ours"][8:], times["theirs"][8:]
    # Blocks alternate, so the ratio of each pair of blocks cancels what else the machine is doing.
    block = 8
    ratios = [
        statistics.median(ours[i : i + block]) / statistics.median(theirs[i : i + block])
        for i in range(0, min(len(ours), len(theirs)) - block + 1, block)
    ]
    return {
        "ours_ms": round(statistics.median(ours) * 1e3, 2),
        "ddp_ms": round(statistics.median(theirs) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ours_cpu_ms": round(statistics.median(times["ours_cpu"][8:]) * 1e3, 2),
        "ddp_cpu_ms": round(statistics.median(times["theirs_cpu"][8:]) * 1e3, 2),
        "steps": len(theirs),
    }


if __name__ == "__main__":
    print(json.dumps({m: measure(m) for m in ("fixed", "adaptive", "consistent")}, indent=1))
