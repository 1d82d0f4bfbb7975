"""A Ray cluster on three hosts whose head is cut off for a while: does a job train on, and is all well after?

    python -m benchmarks.ray.head_away [--seconds 30]

A head with the control plane and two nodes with a slot each, in network namespaces of this machine, with the
settings of docs/guides/ray.md. A job trains on both nodes; then nothing goes between the head and the nodes
any more. Printed: the longest time without a step while the head was away, how many steps were made
meanwhile, whether the workers are the same afterwards, and how long after the healing the job did what it
was told (`scale` to one worker and back to two).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ray.cluster import RayNode, new_token
from benchmarks.ray.failures import until
from benchmarks.runtime import netns
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine

SCRIPT = Path(__file__).parent / "steps_script.py"
OUT = Path("out") / "ray_head_away.json"
GOAL_S = 5.0


def measure(away_s: float) -> dict[str, Any]:
    """Make the cluster, cut the head off, and look."""
    home = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    scratch = tempfile.mkdtemp(prefix="swell-rc-")
    with new_token(), netns.Hosts(3) as hosts:
        made: list[RayNode] = []
        try:
            made.append(RayNode("head", 0, scratch, None, host=_place(hosts, 0)))
            address = str(made[0].wait_up()["address"])
            made += [RayNode(f"n{i}", 1, scratch, address, host=_place(hosts, i)) for i in (1, 2)]
            for node in made[1:]:
                node.wait_up()
            with hosts.inside(0):
                return _job(hosts, home, address, away_s)
        finally:
            for node in reversed(made):
                node.stop()
            for folder in (scratch, home):
                shutil.rmtree(folder, ignore_errors=True)


def _place(hosts: netns.Hosts, index: int) -> tuple[str, str]:
    return hosts.namespace(index), hosts.address(index)


def _job(hosts: netns.Hosts, home: Path, address: str, away_s: float) -> dict[str, Any]:
    steps, end = home / "steps", home / "end"
    steps.mkdir()
    store = Store(connect(str(home / "store.db")))
    engine = SupervisedEngine(RaySite(home, RayOptions(address=address)))
    plane = ControlPlane(store, engine, home=home, policy="max-min", interval_s=1.0)
    plane.start()
    try:
        args = ("--steps", str(steps), "--until", str(end))
        request = JobRequest(
            name="job", script=str(SCRIPT), args=args, workdir=str(SCRIPT.parent), min_workers=2
        )
        job_id = plane.jobs.submit(request, "bench").job_id
        until(lambda: _world(steps) == 2, 180)
        time.sleep(3.0)
        before = {path.name for path in steps.iterdir()}
        cut_s = time.time()
        for node in (1, 2):
            hosts.cut(0, node)
        time.sleep(away_s)
        hosts.heal_all()
        healed_s = time.time()
        made = sorted(s.at_s for s in _made(steps, only=max(before)) if cut_s <= s.at_s <= healed_s)
        gaps = [b - a for a, b in pairwise([cut_s, *made, healed_s])]
        time.sleep(2.0)
        record = plane.jobs.get(job_id)
        same = {path.name for path in steps.iterdir()} == before and record.phase is Phase.RUNNING
        plane.jobs.scale(job_id, 1, 1)
        until(lambda: _world(steps) == 1, 60)
        plane.jobs.scale(job_id, 2, 2)
        until(lambda: _world(steps) == 2, 150)
        obeyed_s = time.time() - healed_s
        end.touch()
        until(lambda: plane.jobs.get(job_id).phase.over, 60)
        return {
            "away_s": away_s,
            "steps_meanwhile": len(made),
            "longest_gap_s": round(max(gaps), 2),
            "the_same_workers_after": same,
            "scaled_down_and_up_after_s": round(obeyed_s, 1),
            "ended_well": plane.jobs.get(job_id).phase is Phase.FINISHED,
            "holds": max(gaps) <= GOAL_S and same,
        }
    finally:
        plane.stop()
        store.close()


class Step(NamedTuple):
    """A step that a worker wrote down."""

    at_s: float
    world: int


def _made(steps: Path, only: str = "*") -> list[Step]:
    """The steps that workers wrote down, or only one of them."""
    lines = [line.split() for path in steps.glob(only) for line in path.read_text().splitlines()]
    return sorted(Step(float(line[1]), int(line[2])) for line in lines if len(line) == 3)


def _world(steps: Path) -> int:
    """How many workers made the last step."""
    made = _made(steps)
    return made[-1].world if made else 0


def main() -> None:
    """Measure and write."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the head is away")
    options = parser.parse_args()
    found = {"skipped": why} if (why := netns.why_not()) else measure(options.seconds)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
