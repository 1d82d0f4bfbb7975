"""What others need for the same: torchrun after a kill -9, measured here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    from torch import nn
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log = open(os.environ["STEPS"] + f".{dist.get_rank()}", "a", buffering=1)
    for _ in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).sum().backward()
        optimizer.step()
        log.write(f"{os.getpid()} {time.monotonic()}\\n")
        time.sleep(0.01)
"""


def torchrun_death(rounds: int = 2, timeout_s: float = 30.0) -> dict[str, Any]:
    """From a kill -9 of one of three workers to the first step after it (torchrun restarts all of them)."""
    times: list[float] = []
    hung = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = _torchrun_once(Path(folder), timeout_s)
            hung += found is None
            times += [] if found is None else [found]
    median = round(statistics.median(times), 2) if times else None
    return {"median_s": median, "rounds": rounds, "hung": hung}


def _torchrun_once(folder: Path, timeout_s: float) -> float | None:
    script, log = folder / "train.py", folder / "steps"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    process = subprocess.Popen(
        [*command, "--max-restarts=2", str(script)],
        env={**os.environ, "STEPS": str(log)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        pid = _wait(folder / "steps.0", lambda lines: lines[-1][0] if len(lines) > 20 else None, timeout_s)
        victim = _wait(folder / "steps.1", lambda lines: lines[-1][0] if lines else None, timeout_s)
        if pid is None or victim is None:
            return None
        killed = time.monotonic()
        os.kill(int(victim), signal.SIGKILL)
        back = _wait(
            folder / "steps.0",
            lambda lines: next((t for p, t in lines if p != pid and float(t) > killed), None),
            timeout_s,
        )
        return None if back is None else float(back) - killed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait(path: Path, found: Any, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            lines = [tuple(line.split()) for line in path.read_text().splitlines()]
            value = found([line for line in lines if len(line) == 2])
            if value is not None:
                return value
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    print(json.dumps(torchrun_death()))
