"""Must-show 5: one hash of weights and optimizer state, whatever happened to the workers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.harness import Running, running

SCRIPT = Path(__file__).with_name("identity_script.py")


def _result(job: Running, timeout_s: float = 90.0) -> str:
    deadline = time.monotonic() + timeout_s
    path = job.out / "result.json"
    while not path.exists():
        if time.monotonic() > deadline or job.process.poll() not in (None, 0):
            raise RuntimeError((job.root / "run.log").read_text()[-2000:])
        time.sleep(0.05)
    found: str = json.loads(path.read_text())["hash"]
    return found


def _resizes(job: Running) -> None:
    """4 -> 2 -> 1 -> 3, each in the middle of an epoch."""
    for count in (4, 2, 1, 3):
        job.client.resize(count)
        job.members(count)
        job.settle(3)


def _kills(job: Running) -> None:
    for index in (0, 1):
        status = job.members(3)
        job.settle(3)
        job.kill(status["members"][index])
        job.client.wait_for(lambda s, old=status: s["members"] != old["members"])


def measure() -> dict[str, Any]:
    """The hashes of all runs; `identical` if there is only one."""
    hashes: dict[str, str] = {}
    for workers in (1, 2, 3, 4):
        options = ["--workers", str(workers), "--threads", "1"]
        for loaders in (0, 2) if workers in (1, 4) else (0,):
            with running(["--loader-workers", str(loaders)], options, SCRIPT) as job:
                hashes[f"{workers} workers, {loaders} loader workers"] = _result(job)
    with running(["--pace", "0.03"], ["--workers", "1:4", "--threads", "1"], SCRIPT) as job:
        job.members(4)
        _resizes(job)
        hashes["4 -> 2 -> 1 -> 3"] = _result(job)
    options = ["--workers", "1:3", "--threads", "1"]
    with running(["--pace", "0.04", "--loader-workers", "2"], options, SCRIPT) as job:
        job.members(3)
        _kills(job)
        hashes["two kills on the way"] = _result(job)
    return {"identical": len(set(hashes.values())) == 1, "hashes": {k: v[:16] for k, v in hashes.items()}}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
