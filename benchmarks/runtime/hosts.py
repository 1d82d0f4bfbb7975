"""Several hosts (network namespaces): a step against DDP over gloo, with and without a limit on the links."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.runtime import overhead
from benchmarks.runtime.network import Hosts, NotPermitted, network
from benchmarks.runtime.stage import Stage
from swell.train.agent.jobdir import JobDirectory

RATES = (None, "1gbit")
BLOCKS = {("0.4M", None): (8, 30), ("10M", None): (6, 8), ("60M", None): (4, 3)} | {
    ("0.4M", "1gbit"): (6, 20), ("10M", "1gbit"): (4, 4), ("60M", "1gbit"): (3, 3)
}  # fmt: skip
"""By size of the model and limit: blocks of steps, and steps in a block."""


@contextlib.contextmanager
def job_on(hosts: Hosts, script: Path, arguments: list[str], **config: Any) -> Iterator[JobDirectory]:
    """A job whose coordinator is on the first host and whose workers move to theirs; call it on that host."""
    root = Path(tempfile.mkdtemp(prefix="swell-hosts-"))
    stage = Stage()
    settings = {"host": hosts.address(0), "shared_memory": False}
    fields: dict[str, Any] = {"threads": 1, "silent_after_s": 20.0, "settings": settings} | config
    pid = stage.launch(root / "job", script=str(script), arguments=[*arguments, "--out", str(root)], **fields)
    try:
        yield JobDirectory(root / "job")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        stage.wait(pid, 10.0)
        stage.close()
        shutil.rmtree(root, ignore_errors=True)


def step(size: str, rate: str | None, timeout_s: float = 240.0) -> dict[str, Any]:
    """Median step of ours and of DDP with one worker on each of two hosts, and their ratio."""
    blocks, steps = BLOCKS[size, rate]
    with network(2, rate) as hosts, hosts.inside(0):
        arguments = ["--size", size, "--hosts", hosts.name]
        arguments += ["--blocks", str(blocks), "--block-steps", str(steps)]
        with job_on(hosts, overhead.SCRIPT, arguments, minimum=2, maximum=2, workers=2) as directory:
            result = directory.path.parent / "result.json"
            deadline = time.monotonic() + timeout_s
            while not result.exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(_said(directory))
                time.sleep(0.2)
            return overhead.figures(json.loads(result.read_text()), steps)


def _said(directory: JobDirectory) -> str:
    logs = sorted((directory.path / "logs").glob("*"))
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)


def steps(sizes: tuple[str, ...] = ("0.4M", "10M", "60M")) -> dict[str, Any]:
    """All sizes, with and without the limit; why not, where namespaces are not permitted."""
    try:
        return {rate or "no limit": {size: step(size, rate) for size in sizes} for rate in RATES}
    except NotPermitted as error:
        return {"skipped": str(error)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="0.4M,10M,60M")
    parser.add_argument("--rates", default="none,1gbit")
    chosen = parser.parse_args()
    for wanted in chosen.rates.split(","):
        limit = None if wanted == "none" else wanted
        for model in chosen.sizes.split(","):
            print(wanted, model, json.dumps(step(model, limit)), flush=True)
