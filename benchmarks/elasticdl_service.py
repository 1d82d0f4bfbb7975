"""ElasticDL's second experiment: a service whose load rises and falls, and training on what it leaves.

    python -m benchmarks.elasticdl_service [--minutes 2] [--slots 10] [--json]

Real processes on CPU slots of this machine. The service wants between a fifth and four fifths of the slots,
in waves; it starts a process on each slot once training has left it. Two jobs train on the rest. Printed
after start-up: the part of the slots in use by the service or by workers that train, the same without
training, how long the service waited for slots and where that time went, and the verdict: over 90% in use, no
wait above the bound, and both jobs still train.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reclaim_stages import histories, stages
from benchmarks.reclaims import SERVICE, end_jobs, explained, figures, verdict
from swell.control.model import JobRequest
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import EventKind, Reservation
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine

SCRIPT = Path(__file__).parents[1] / "tests" / "engines" / "toy.py"
WAVE_S = 40.0
"""From one peak of the load to the next."""
LOOK_S = 0.02
LEAST_USED = 0.9
"""The part of the slots that is to be in use."""
SETTLED_S = 3.0
LIMIT_S = 300.0


def load(at_s: float, slots: int) -> int:
    """How many slots the service wants at a moment: waves between a fifth and four fifths."""
    return round(slots * (0.5 - 0.3 * math.cos(2 * math.pi * at_s / WAVE_S)))


def beside(home: Path, slots: int, run_s: float) -> dict[str, Any]:
    """Train beside the service for so long."""
    store = Store(connect(str(home / "store.db")))
    engine = SupervisedEngine(LocalSite(home, slots=slots))
    plane = ControlPlane(store, engine, home=home, policy="tide", interval_s=0.5)
    plane.start()
    service: list[subprocess.Popen[bytes]] = []
    try:
        plane.reservations.make(Reservation(name=SERVICE, most=load(WAVE_S / 2, slots)), "bench")
        jobs = []
        for i in range(2):
            args = ("--epochs", "2000", "--sample-ms", "8", "--seed", str(i))
            request = JobRequest(name=f"train-{i}", script=str(SCRIPT), args=args, workdir=str(home))
            jobs.append(plane.jobs.submit(request, "bench").job_id)
        _until(lambda: all(plane.jobs.get(job_id).done > 0 for job_id in jobs))
        _until(lambda: _settled(plane, jobs))
        began_s = last_s = time.monotonic()
        used_s, serving_s = 0.0, 0.0
        while (now_s := time.monotonic()) - began_s < run_s:
            wanted = load(now_s - began_s, slots)
            if wanted < len(service):  # the service gives its slots back itself, then says so
                _end(service[wanted:])
                del service[wanted:]
            state = plane.reservations.states()[0]
            if state.reservation.gpus != wanted:
                plane.reservations.demand(SERVICE, wanted)
            elif state.yielded:
                service += [_serve() for _ in range(len(state.slots) - len(service))]
            training = sum(len(plane.jobs.get(job_id).held) for job_id in jobs)
            used_s += min(len(service) + training, slots) * (now_s - last_s)
            serving_s += len(service) * (now_s - last_s)
            last_s = now_s
            time.sleep(LOOK_S)
        took_s = last_s - began_s
        events = [event for _, event in plane.events(limit=1_000_000)]
        yields = [(e.time_s, float(e.data["after_s"])) for e in events if e.kind is EventKind.YIELDED]
        waits_s, runs = [after_s for _, after_s in yields], histories(home)
        utilisation, ended = (
            used_s / slots / took_s,
            [plane.jobs.get(one) for one in jobs if plane.jobs.get(one).phase.over],
        )
        problems = [f"{job.job_id} ended: {job.phase.value}, {job.reason}" for job in ended]
        if utilisation <= LEAST_USED:
            problems.append(f"only {utilisation:.1%} of the slots in use")
        return {
            "seconds": round(took_s, 1),
            "utilisation": round(utilisation, 3),
            "service_alone": round(serving_s / slots / took_s, 3),
            "reclaims": len(waits_s),
            **figures(waits_s),
            **explained([stages(events, runs, at_s - after_s, at_s) for at_s, after_s in yields]),
            "resizes": sum(plane.jobs.get(job_id).resizes for job_id in jobs),
            "problems": problems,
            "verdict": verdict(waits_s, problems),
        }
    finally:
        _end(service)
        end_jobs(plane)
        plane.stop()
        store.close()


def _serve() -> subprocess.Popen[bytes]:
    """One process of the service."""
    return subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _settled(plane: ControlPlane, jobs: list[str]) -> bool:
    """Whether the jobs have grown to what they were given, which need not be all slots, for some seconds."""
    until_s = time.monotonic() + SETTLED_S
    while time.monotonic() < until_s:
        if any(len((job := plane.jobs.get(job_id)).held) != max(len(job.wanted), 1) for job_id in jobs):
            return False
        time.sleep(0.05)
    return True


def _until(condition: Any) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {LIMIT_S:g} s")
        time.sleep(0.05)


def measure(slots: int = 10, minutes: float = 2.0) -> dict[str, Any]:
    """Train beside the service in a platform of its own."""
    with tempfile.TemporaryDirectory(prefix="swell-service-") as folder:
        return beside(Path(folder), slots, 60 * minutes)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.slots, args.minutes)
    print(
        json.dumps(found) if args.json else "\n".join(f"{name:>24}: {value}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
