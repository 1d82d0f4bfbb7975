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

from benchmarks.runtime.gpu import EXAMPLES, ROOT, Running, running

WORKERS = 2
_ENDLESS = ["--epochs", "100000", "--windows", "1000"]
_EPOCHS = 3
_WAIT_S = 120.0


def smoke(device: str) -> dict[str, Any]:
    """1 -> 2 -> 1 replicas and a kill -9; then some epochs, whose losses the job said."""
    limits = {"minimum": WORKERS, "maximum": 2 * WORKERS, "workers": WORKERS}
    began_s = time.monotonic()
    script = EXAMPLES / "sharded_gpt.py"
    arguments = [*_ENDLESS, "--device", device]
    with running(script, arguments, limits=limits, workers_per_replica=WORKERS) as job:
        now = job.client.wait_for(lambda s: s["step"] > 5, _WAIT_S)
        for count in (2 * WORKERS, WORKERS):
            job.client.resize(count)
            now = job.client.wait_for(lambda s, count=count: len(s["members"]) == count, _WAIT_S)
            now = job.client.wait_for(lambda s, begin=now["step"]: s["step"] >= begin + 10, _WAIT_S)
        victim = now["members"][-1]
        os.kill(now["pids"][victim], signal.SIGKILL)
        job.client.wait_for(lambda s: victim not in s["members"] and len(s["members"]) == WORKERS, _WAIT_S)
        said = _losses(job)
        until_s = time.monotonic() + _WAIT_S
        while len(_losses(job)) < len(said) + _EPOCHS:
            if time.monotonic() > until_s or job.process.poll() is not None:
                raise RuntimeError(f"no {_EPOCHS} epochs after the kill: {job.output.read_text()[-3000:]}")
            time.sleep(0.1)
        losses, changes = _losses(job), job.changes()
    return {
        "losses": losses,
        "learned": losses[-1] < losses[0],
        **changes,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _losses(job: Running) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss (\S+)", job.output.read_text())]


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
