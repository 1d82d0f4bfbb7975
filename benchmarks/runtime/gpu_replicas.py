"""Replicas on one GPU, as a smoke test: two workers share a model and the GPU. Prints one JSON.

    python -m benchmarks.runtime.gpu_replicas [--device cuda]

The job of examples/sharded_gpt.py goes from one replica of two workers to two replicas and back, then a
worker is killed. NCCL refuses two workers on one GPU, so torch's collectives are gloo's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from typing import Any

from benchmarks.runtime.gpu import EXAMPLES, ROOT, running

WORKERS = 2
_ARGUMENTS = ["--epochs", "6", "--windows", "3000"]


def smoke(device: str) -> dict[str, Any]:
    """1 -> 2 -> 1 replicas and a kill -9; what the job said at the end."""
    arguments = [*_ARGUMENTS, "--device", device]
    limits = {"minimum": WORKERS, "maximum": 2 * WORKERS, "workers": WORKERS}
    began_s = time.monotonic()
    script = EXAMPLES / "sharded_gpt.py"
    with running(script, arguments, limits=limits, workers_per_replica=WORKERS) as job:
        now = job.client.wait_for(lambda s: s["step"] > 5, 120.0)
        for count in (2 * WORKERS, WORKERS):
            job.client.resize(count)
            now = job.client.wait_for(lambda s, count=count: len(s["members"]) == count, 120.0)
            now = job.client.wait_for(lambda s, begin=now["step"]: s["step"] >= begin + 10, 120.0)
        victim = now["members"][-1]
        os.kill(now["pids"][victim], signal.SIGKILL)
        text = job.finish()
        changes = job.changes()
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", text)]
    return {
        "losses": losses,
        "learned": len(losses) >= 2 and losses[-1] < losses[0],
        **changes,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> int:
    """Print what happened; the exit code is 0 if the job learned through all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    sys.path.insert(0, str(ROOT / "src"))
    found = smoke(device)
    print(json.dumps(found, indent=1))
    return 0 if found["learned"] else 1


if __name__ == "__main__":
    sys.exit(main())
