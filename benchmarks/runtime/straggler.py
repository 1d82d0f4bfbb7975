"""One worker at half speed: how fast the job is before, while it is slow, and after it was replaced.

    python -m benchmarks.runtime.straggler

The worker is slowed by stopping and continuing its process every 20 ms, so the slowness is real and belongs
to the process: neither the job nor its script know of it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

from benchmarks.runtime.harness import Running, running

SLICE_S = 0.02


def _speed(job: Running, worker: str, since_s: float, until_s: float) -> float:
    """Steps per second of a worker in a span of time."""
    steps = [s for s in job.timeline(worker) if since_s <= s.at_s <= until_s]
    return (len(steps) - 1) / (steps[-1].at_s - steps[0].at_s) if len(steps) > 1 else 0.0


def _slow_down(pid: int, over: threading.Event) -> None:
    """Let a process run only half of the time."""
    try:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLICE_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLICE_S)
    except ProcessLookupError:
        pass  # it was replaced


def measure(normal_s: float = 8.0, within_s: float = 30.0) -> dict[str, Any]:
    """Speeds in steps per second, and after how long the slow worker was replaced."""
    with running(["--model", "large"], ["--workers", "2", "--threads", "1"]) as job:
        status = job.members(2)
        job.settle(50)
        stays, slow = status["members"]
        begin_s = time.monotonic()
        time.sleep(normal_s)
        slowed_s, over = time.monotonic(), threading.Event()
        thread = threading.Thread(target=_slow_down, args=(status["pids"][slow], over), daemon=True)
        thread.start()
        try:
            time.sleep(within_s)
            again_s = time.monotonic()
            time.sleep(normal_s)
            end_s = time.monotonic()
        finally:
            over.set()
            thread.join()
        found = [e for e in job.directory.events() if e["event"] == "straggler"]
        after = job.client.status()["members"]
        normal = _speed(job, stays, begin_s, slowed_s)
        offset_s = time.time() - time.monotonic()
        found_s = found[0]["time_s"] - offset_s if found else again_s
        return {
            "normal_steps_s": round(normal, 1),
            "slowed": round(_speed(job, stays, slowed_s + 1.0, found_s) / normal, 3),
            "after_30_s": round(_speed(job, stays, again_s, end_s) / normal, 3),
            "found_after_s": round(found_s - slowed_s, 1) if found else None,
            "times_slower": found[0]["times"] if found else None,
            "replaced": [e["worker"] for e in found] == [slow] and slow not in after and len(after) == 2,
        }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
