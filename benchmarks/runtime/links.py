"""Several hosts (network namespaces): a step against DDP over gloo, with and without a limit on the links."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.runtime import overhead
from benchmarks.runtime.harness import WORKLOAD, Step, timeline
from benchmarks.runtime.network import Hosts, NotPermitted, network
from benchmarks.runtime.stage import Stage
from swell.train.agent.client import JobClient
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
    settings = {"host": hosts.address(0), "shared_memory": False, "encrypt": config.pop("encrypt", True)}
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


def step(size: str, rate: str | None, timeout_s: float = 240.0, *, encrypt: bool = True) -> dict[str, Any]:
    """Median step of ours and of DDP with one worker on each of two hosts, and their ratio."""
    blocks, steps = BLOCKS[size, rate]
    with network(2, rate) as hosts, hosts.inside(0):
        arguments = ["--size", size, "--hosts", hosts.name]
        arguments += ["--blocks", str(blocks), "--block-steps", str(steps)]
        pair = {"minimum": 2, "maximum": 2, "workers": 2, "encrypt": encrypt}
        with job_on(hosts, overhead.SCRIPT, arguments, **pair) as directory:
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
    """All sizes, with and without the limit; why not, where namespaces are not permitted.

    Where the processor is the limit and not the network, also without encryption, as DDP's gradients travel.
    """
    try:
        found = {rate or "no limit": {size: step(size, rate) for size in sizes} for rate in RATES}
        plain = {size: step(size, None, encrypt=False) for size in sizes}
        return found | {"no limit, not encrypted": plain}
    except NotPermitted as error:
        return {"skipped": str(error)}


def join(model: str = "huge", rate: str | None = "1gbit", batch: int = 16, wait_s: float = 120.0) -> Any:
    """Growth by one and by two workers on hosts of their own: what the members' steps took around it.

    The pause is the time in the switch; `steps_ms` are the members' steps from the request to the switch, in
    which the newcomers became level beside them, the last one with the switch in it. `leave` and `death`: the
    pauses when they left again, and when one of two members was killed.
    """
    out: dict[str, Any] = {}
    left: list[dict[str, Any]] = []
    with network(4, rate) as hosts, hosts.inside(0):
        arguments = ["--model", model, "--batch", str(batch), "--hosts", hosts.name]
        with job_on(hosts, WORKLOAD, arguments, minimum=1, maximum=4, workers=2) as directory:
            client = JobClient(directory, wait_s=30.0)
            client.wait_for(lambda s: len(s["members"]) == 2 and s["step"] >= 6, wait_s)
            for newcomers in (1, 2):
                asked_s = time.monotonic()
                begin = client.status()["step"]
                client.resize(2 + newcomers)
                now = client.wait_for(lambda s, n=newcomers: len(s["members"]) == 2 + n, wait_s)
                client.wait_for(lambda s, n=now: s["step"] >= n["step"] + 4, wait_s)
                steps = timeline(directory.path.parent / f"{now['members'][0]}.steps")
                switch = [e for e in directory.events() if e["event"] == "switch"][-1]
                out[f"{newcomers} newcomers"] = _around(steps, begin, asked_s, switch)
                client.resize(2)
                now = client.wait_for(lambda s: len(s["members"]) == 2, wait_s)
                now = client.wait_for(lambda s, n=now: s["step"] >= n["step"] + 3, wait_s)
                left.append([e for e in directory.events() if e["event"] == "switch"][-1])
            victim = now["members"][1]
            os.kill(now["pids"][victim], signal.SIGKILL)
            client.wait_for(lambda s, n=now: victim not in s["members"] and s["step"] > n["step"] + 1, wait_s)
            died = [e for e in directory.events() if e["event"] == "recovery"]
            client.close()
    out["leave"] = {"pause_ms": [round(e["pause_s"] * 1e3, 1) for e in left]}
    out["death"] = {"pause_ms": [round(e["pause_s"] * 1e3, 1) for e in died]}
    return out


def _around(steps: list[Step], begin: int, asked_s: float, switch: dict[str, Any]) -> dict[str, Any]:
    """Steps before the request, until the switch and after it."""
    spans = {b.number: b.at_s - a.at_s for a, b in pairwise(steps)}
    at = next(s.at_s for s in steps if s.number == switch["step"])
    normal = [span for number, span in spans.items() if begin - 4 < number <= begin]
    after = [span for number, span in spans.items() if switch["step"] < number <= switch["step"] + 4]
    return {
        "pause_ms": round(switch["pause_s"] * 1e3),
        "of_that_waited_ms": round(switch["waited_s"] * 1e3),
        "normal_step_ms": round(statistics.median(normal) * 1e3),
        "steps_ms": [round(spans[n] * 1e3) for n in range(begin + 1, switch["step"] + 1) if n in spans],
        "step_after_ms": round(statistics.median(after) * 1e3),
        "newcomers_level": switch["level"],
        "request_to_switch_s": round(at - asked_s, 2),
    }


def joins() -> dict[str, Any]:
    """A join at 1 Gbit/s with 59 million parameters; why not, where namespaces are not permitted."""
    try:
        found: dict[str, Any] = join()
    except NotPermitted as error:
        return {"skipped": str(error)}
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="0.4M,10M,60M")
    parser.add_argument("--rates", default="none,1gbit")
    parser.add_argument("--plain", action="store_true", help="do not encrypt what goes between hosts")
    parser.add_argument("--join", help="measure joins of this model (small, large, huge) instead")
    chosen = parser.parse_args()
    if chosen.join:
        print(json.dumps(join(chosen.join), indent=1))
        raise SystemExit
    for wanted in chosen.rates.split(","):
        limit = None if wanted == "none" else wanted
        for model in chosen.sizes.split(","):
            print(wanted, model, json.dumps(step(model, limit, encrypt=not chosen.plain)), flush=True)
