"""What failures on a Ray cluster cost a job: seconds until a further step is done by those who are left.

    python -m benchmarks.ray.failures

A cluster of four nodes with two slots each, on this machine, with the health checks of docs/guides/ray.md.
Writes out/ray_failures.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ray.cluster import RayCluster
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.engines.processes import descendants
from swell.engines.ray import head
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine
from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

SCRIPT = Path(__file__).parents[2] / "tests" / "engines" / "toy.py"
OUT = Path("out") / "ray_failures.json"


class Scene:
    """A platform on a cluster, and one job that trains on as much of it as there is."""

    def __init__(self, home: Path, address: str | None, min_members: int = 4) -> None:
        self.home, self._min_members = home, min_members
        self.engine = SupervisedEngine(RaySite(home, RayOptions(address=address)))
        store = Store(connect(str(home / "store.db")))
        self.plane = ControlPlane(store, self.engine, home=home, policy="elasticflow", interval_s=1.0)
        self.plane.start()
        args = ("--epochs", "10000", "--sample-ms", "4")
        request = JobRequest(
            name="job", script=str(SCRIPT), args=args, workdir=str(SCRIPT.parent), checkpoint_s=1.0
        )
        self.job_id = self.plane.jobs.submit(request, "bench").job_id

    def client(self) -> JobClient:
        """Speaks to the job's present run."""
        run = sorted((self.home / "jobs" / self.job_id / "runs").iterdir())[-1]
        return JobClient(JobDirectory(run), wait_s=30.0)

    def settle(self) -> dict[str, Any]:
        """Wait until it trains on several nodes and nothing changes for a moment."""
        until(lambda: self.plane.jobs.get(self.job_id).phase is Phase.RUNNING)
        until(lambda: list((self.home / "jobs" / self.job_id / "runs").glob("*/coordinator.json")))
        with self.client() as client:
            while True:
                before = client.wait_for(lambda s: len(s["members"]) >= self._min_members, 120)
                time.sleep(2.0)
                now = client.status()
                if now["members"] == before["members"] and now["step"] > before["step"]:
                    return now

    def node_of(self, status: dict[str, Any], worker: str) -> int:
        """Which of the cluster's nodes a worker is on."""
        place = self.engine.cluster()
        name = place.nodes[int(place.node_of_gpu[status["slots"][worker]])].name
        return int(name.removeprefix("n"))

    def close(self) -> None:
        """End the job and the platform."""
        self.plane.jobs.cancel(self.job_id)
        until(lambda: not (self.home / "orders" / self.job_id / "start.json").exists(), 30)
        self.plane.stop()
        self.plane.store.close()


def until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Wait for something."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError("waited too long")
        time.sleep(0.02)


def without(scene: Scene, gone: set[str]) -> float:
    """Seconds until a step was done without these workers."""
    began_s = time.monotonic()
    with scene.client() as client:
        there = client.wait_for(lambda s: s["members"] and not gone & set(s["members"]), 60)
        client.wait_for(lambda s: s["step"] > there["step"], 60)
    return round(time.monotonic() - began_s, 2)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def measure() -> dict[str, Any]:
    """One failure after the other."""
    result: dict[str, Any] = {}
    home = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    with RayCluster(4, 2) as cluster:
        scene = Scene(home, cluster.address)
        try:
            status = scene.settle()
            worker = status["members"][-1]
            os.kill(status["pids"][worker], signal.SIGKILL)
            result["worker killed"] = without(scene, {worker})

            for what in ("raylet killed", "node frozen"):
                status = scene.settle()
                index = scene.node_of(status, status["members"][-1])
                gone = {w for w in status["members"] if scene.node_of(status, w) == index}
                node = cluster.nodes[index]
                everybody = [node.raylet, *descendants(node.raylet)]
                if what == "raylet killed":
                    node.signal_raylet(signal.SIGKILL)
                else:
                    _send(everybody, signal.SIGSTOP)
                result[what] = without(scene, gone)
                began_s = time.monotonic()
                until(lambda: scene.engine.cluster().capacity == 6, 30)
                result[f"{what}: out of the scheduler's view after a further"] = round(
                    time.monotonic() - began_s, 2
                )
                if what == "node frozen":
                    _send(everybody, signal.SIGCONT)
                node.stop()
                node.start()
                node.wait_up()
                began_s = time.monotonic()
                until(lambda: scene.engine.cluster().capacity == 8, 30)
                result[f"{what}: in it again once Ray runs"] = round(time.monotonic() - began_s, 2)
        finally:
            scene.close()
            shutil.rmtree(home, ignore_errors=True)
    return result | head_killed()


def head_killed() -> dict[str, Any]:
    """The head of a Ray of swell's own, with all that runs on it: until the job trains again."""
    home = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    scene = Scene(home, None, min_members=1)
    try:
        scene.settle()
        output = home / "jobs" / scene.job_id / "output.log"
        pid = head.running(home)
        assert pid is not None
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until(lambda: head.running(home) not in (None, pid))
        time.sleep(1.0)  # what was printed before has been written by then
        steps = output.read_text().count("| step ")
        until(lambda: output.read_text().count("| step ") > steps)
        return {"head killed, a Ray of its own": round(time.monotonic() - began_s, 1)}
    finally:
        scene.close()
        head.stop(home)
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    """Measure and write."""
    result = measure()
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
