"""Nodes of a real Ray that follow the queue of a platform, from none to three and back to none.

    python -m benchmarks.rented

The platform rents up to three nodes of one slot from the local provider, which starts raylets on this
machine. Two jobs are submitted that together want three slots. When all nodes are there and have a worker
each, the jobs are told to end, and the nodes go again. Printed is how long it took to have three nodes, and
none again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swell.cli._platform import make_renting, need_ray, with_rented
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import EventKind
from swell.engines.ray import head, raylet
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine

WAITS = """#!/bin/sh
echo ready
until [ -e "$1" ]; do
    if [ -e "$SWELL_SAVE_NOW" ]; then exit 75; fi
    sleep 0.2
done
"""
"""A job without torch that is done once a file is there."""
MOST = 3
LIMIT_S = 200.0
"""Ray nodes start in seconds; on a machine that does much else, in many of them."""
POLL_S = 0.2


@contextmanager
def renting_platform(home: Path) -> Iterator[ControlPlane]:
    """A platform on a Ray of its own that rents up to three nodes of one slot."""
    need_ray()
    store, rented = Store(connect(str(home / "store.db"))), (f"0:{MOST}x1,idle=1,interval=2", "local")
    engine = SupervisedEngine(RaySite(home, with_rented(RayOptions(spares=False), *rented)))
    plane = ControlPlane(store, engine, home=home, interval_s=1.0, renting=make_renting(*rented, engine))
    try:
        plane.start()
        yield plane
        for record in plane.jobs.find():
            if not record.phase.over:
                plane.jobs.cancel(record.job_id)
        plane.stop()
    finally:
        raylet.stop_all(home)
        head.stop(home)
        store.close()


def follow_queue(plane: ControlPlane, home: Path) -> dict[str, Any]:
    """Submit jobs for three nodes, let them run on all three, and let them end; times and wanted nodes."""

    def state() -> tuple[int, int]:
        found = plane.nodes.autoscaler()
        if found is None or plane.trouble:
            raise RuntimeError(f"the autoscaler does not work: {plane.trouble}")
        return found.ready, found.coming

    def output(job_id: str) -> str:
        path = home / "jobs" / job_id / "output.log"
        return path.read_text() if path.exists() else ""

    def until(condition: Callable[[], object], what: str) -> float:
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > LIMIT_S:
                why = [plane.jobs.explain(job)["why"] for job in jobs]
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s; {state()}, {why}")
            time.sleep(POLL_S)
        return time.monotonic()

    script, done = home / "waits.sh", home / "done"
    script.write_text(WAITS)
    script.chmod(0o755)
    at_first, jobs, asked_s = (state(), len(raylet.running(home))), list[str](), time.monotonic()
    for workers in (1, 2):
        request = JobRequest(
            name=f"on{workers}", script="waits.sh", args=(str(done),), workdir=str(home), command=True,
            min_workers=workers,
        )  # fmt: skip
        jobs.append(plane.jobs.submit(request, "ann").job_id)
    up_s = until(lambda: state() == (MOST, 0), "three nodes") - asked_s
    until(lambda: all("ready" in output(job) for job in jobs), "the jobs to run")
    until(lambda: {node.used for node in plane.nodes.states()} == {1}, "a worker on each node")
    most = len(raylet.running(home))
    done.touch()
    over_s = until(
        lambda: all(plane.jobs.get(job).phase is Phase.FINISHED for job in jobs), "the jobs to end"
    )
    until(lambda: not raylet.running(home), "the nodes to end")
    down_s = until(lambda: not plane.engine.cluster().capacity, "Ray to notice") - over_s
    events = [event for _, event in plane.events(limit=1000)]
    return {
        "nodes": [sum(at_first[0]) + at_first[1], most, sum(state()) + len(raylet.running(home))],
        "wanted": [event.data["nodes"] for event in events if event.kind is EventKind.SCALED],
        "up_after_s": round(up_s, 1),
        "down_after_s": round(down_s, 1),
    }


def measure() -> dict[str, Any]:
    """From none to three and back, in a platform of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="swell-rented-") as folder,
        renting_platform(Path(folder)) as plane,
    ):
        return follow_queue(plane, Path(folder))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
