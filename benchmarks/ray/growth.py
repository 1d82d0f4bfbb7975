"""How long growing takes on Ray, with and without prepared processes, and what that costs.

    python -m benchmarks.ray.growth [rounds]

A cluster of four nodes with two slots each, on this machine. Growth latency is from the moment an allocation
is given to the engine to the end of the first step with the new worker; the pause is what training itself
stood still, beside that of the local engine in the same minutes. Writes out/ray_growth.json.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ray.cluster import RayCluster
from swell.domain import JobRequest, Placement
from swell.engines import Launch
from swell.engines.local import LocalSite
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine
from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

WORKLOAD = Path(__file__).parents[1] / "runtime" / "workload.py"
MOVES: list[Placement] = [(0, 2), (0, 2, 4), (0, 2, 4, 6), (0, 2), (0,)]
"""One worker on each node, one more at a time; then back to one."""
OUT = Path("out") / "ray_growth.json"


def _until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError("waited too long")
        time.sleep(0.005)


def _first_step(out: Path, world: int, after_s: float) -> float:
    """When the first step with that many workers was over, by what the workers wrote (monotonic clock)."""
    give_up_s = time.monotonic() + 90.0
    while time.monotonic() < give_up_s:
        rows = [line.split() for path in out.glob("w*.steps") for line in path.read_text().splitlines()]
        times = [float(r[3]) for r in rows if len(r) == 4 and int(r[1]) == world and float(r[3]) > after_s]
        if times:
            return min(times)
        time.sleep(0.01)
    raise TimeoutError(f"no step with {world} workers")


def play(engine: SupervisedEngine, home: Path, name: str, rounds: int) -> dict[str, Any]:
    """Grow and shrink a job; latencies of growth and the pauses that training saw, in milliseconds."""
    out = home / f"steps-{name}"
    out.mkdir()
    request = JobRequest(
        name=name,
        script=str(WORKLOAD),
        args=("--pace", "0.02", "--out", str(out)),
        workdir=str(WORKLOAD.parent),
    )
    launch = Launch(job_id=name, request=request, job_dir=home / "jobs" / name, max_workers=8)
    began_s = time.monotonic()
    engine.apply(launch, (0,))
    first_s = _first_step(out, 1, began_s) - began_s
    run = JobDirectory(sorted((home / "jobs" / name / "runs").iterdir())[-1])
    latencies: list[float] = []
    with JobClient(run, wait_s=20.0) as client:
        for _ in range(rounds):
            before = 1
            for move in MOVES:
                time.sleep(1.5)
                asked_s = time.monotonic()
                engine.apply(launch, move)
                at_s = _first_step(out, len(move), asked_s)
                if len(move) > before:
                    latencies.append((at_s - asked_s) * 1e3)
                before = len(move)
                client.wait_for(lambda s, n=before: len(s["members"]) == n)
    engine.end(name)
    _until(lambda: name not in engine.observe() and not (home / "orders" / name / "start.json").exists())
    pauses = [e["pause_s"] * 1e3 for e in run.events() if e["event"] == "switch" and "pause_s" in e]
    return {"start_s": round(first_s, 2), "growth_ms": _summary(latencies), "pause_ms": _summary(pauses)}


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "smallest": round(min(values), 1),
        "largest": round(max(values), 1),
        "count": len(values),
    }


def measure(rounds: int = 4) -> dict[str, Any]:
    """All of it."""
    result: dict[str, Any] = {}
    with RayCluster(4, 2) as cluster:
        for name in ("local", "with spares", "without spares"):
            home = Path(tempfile.mkdtemp(prefix="swell-bench-"))
            engine: SupervisedEngine
            if name == "local":
                engine = SupervisedEngine(LocalSite(home, nodes="4x2"))
            else:
                site = RaySite(home, RayOptions(address=cluster.address, spares=name == "with spares"))
                engine = SupervisedEngine(site)
            engine.start(lambda: None)
            try:
                if name == "with spares":
                    _until(
                        lambda s=site: len(s.spares) == 4 and all(one["ready"] for one in s.spares.values())
                    )
                    bytes_each = [state["bytes"] for state in site.spares.values()]
                    result["spare_mib"] = round(statistics.median(bytes_each) / 2**20, 1)
                result[name] = play(engine, home, name.replace(" ", "-"), rounds)
            finally:
                engine.close()
                shutil.rmtree(home, ignore_errors=True)
            print(name, json.dumps(result[name]), flush=True)
    pauses = [result[name]["pause_ms"]["median"] for name in ("with spares", "local")]
    result["pause_ratio"] = round(pauses[0] / max(pauses[1], 1e-3), 2)
    return result


def main() -> None:
    """Measure and write."""
    result = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
