"""A step of each mode, and of three sizes of models, against plain DDP (gradient_as_bucket_view)."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.harness import running

SCRIPT = Path(__file__).with_name("overhead_script.py")
BLOCKS = {"0.4M": (10, 30), "10M": (8, 8), "60M": (6, 4)}
"""By size of the model: blocks of steps, and steps in a block."""


def measure(mode: str, size: str = "10M", workers: int = 2, timeout_s: float = 150.0) -> dict[str, Any]:
    """Median step of ours and of DDP, taken in turns in the same processes, and their ratio."""
    options = ["--workers", str(workers), "--threads", "1"]
    blocks, steps = BLOCKS[size]
    arguments = ["--mode", mode, "--size", size, "--blocks", str(blocks), "--block-steps", str(steps)]
    with running(arguments, options, SCRIPT) as job:
        deadline = time.monotonic() + timeout_s
        result = job.out / "result.json"
        while not result.exists() and job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)
        if not result.exists():
            raise RuntimeError((job.root / "run.log").read_text()[-2000:])
        return figures(json.loads(result.read_text()), steps)


def figures(times: dict[str, Any], block: int) -> dict[str, Any]:
    """What the script's times say; its first block does not count."""
    ours, theirs = times["ours"][block:], times["theirs"][block:]
    # Blocks alternate, so the ratio of each pair of blocks cancels what else the machine is doing.
    ratios = [
        statistics.median(ours[i : i + block]) / statistics.median(theirs[i : i + block])
        for i in range(0, min(len(ours), len(theirs)) - block + 1, block)
    ]
    return {
        "ours_ms": round(statistics.median(ours) * 1e3, 2),
        "ddp_ms": round(statistics.median(theirs) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ours_cpu_ms": round(statistics.median(times["ours_cpu"][block:]) * 1e3, 2),
        "ddp_cpu_ms": round(statistics.median(times["theirs_cpu"][block:]) * 1e3, 2),
        "steps": len(theirs),
        "timeline": times["timeline"],
    }


def sizes() -> dict[str, Any]:
    """Fixed mode at each size."""
    return {size: measure("fixed", size) for size in BLOCKS}


if __name__ == "__main__":
    found = {m: measure(m) for m in ("fixed", "adaptive", "consistent")}
    print(json.dumps(found | {"sizes": sizes()}, indent=1))
