"""A service that wants random numbers of slots back, at random, while jobs train on them.

    python -m benchmarks.reclaims [--reclaims 100] [--jobs 6] [--slots 12] [--seed 0] [--json]

Real processes on CPU slots of this machine. The weights of each job count its samples, so that one that was
lost or used twice is seen. Some jobs have a deadline; a promise must be kept, or its danger be told. Printed
is how long it took until the last worker had left the slots that the service wanted, where that time went
(`reclaim_stages` has the stages), and the verdict: every reclaim within the bound, and no problem.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reclaim_stages import STAGES, histories, stages
from benchmarks.soak.scripts import COUNTING, Honest
from swell.control.model import JobRecord, JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import EventKind, Reservation
from swell.engines.local import LocalSite
from swell.engines.processes import processes_of
from swell.engines.supervised import SupervisedEngine

BOUND_S = 2.0
"""Training must have left the slots that a service wants within this time."""
SERVICE = "service"
LIMIT_S = 240.0
SAMPLES, BATCH = 64, 16
MOST_WORKERS = 4
"""Of a job, so that none trains so fast that it is over before the last reclaim."""
EPOCHS = 8
"""Of a job, for each reclaim: more than it can train meanwhile. What is left it trains without a pace."""


def want(plane: ControlPlane, gpus: int) -> float:
    """Have the service want so many slots; returns the seconds until training had left them."""
    asked_s = time.monotonic()
    plane.reservations.demand(SERVICE, gpus)
    while time.monotonic() - asked_s < LIMIT_S:
        state = next(one for one in plane.reservations.states() if one.reservation.name == SERVICE)
        if len(state.slots) == gpus and (state.yielded or not gpus):
            return time.monotonic() - asked_s
        time.sleep(0.01)
    raise TimeoutError(f"{gpus} slots were not left within {LIMIT_S:g} s")


def reclaim_at_random(
    home: Path, *, reclaims: int, jobs: int, slots: int, promised: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Run jobs and reclaim slots from them; returns figures, and problems (none if all is well)."""
    chance, hurry = random.Random(seed), home / "hurry"
    store = Store(connect(str(home / "store.db")))
    engine = SupervisedEngine(LocalSite(home, slots=slots))
    plane = ControlPlane(store, engine, home=home, policy="tide", interval_s=0.5)
    plane.start()
    epochs, left_s, sizes = EPOCHS * max(reclaims, 12), list[float](), list[int]()
    spans: list[tuple[float, float]] = []
    honest = [Honest(f"job-{i}", SAMPLES, BATCH, epochs, {}, (), home / f"job-{i}.json") for i in range(jobs)]
    try:
        records = [_submit(plane, one, home, i < promised, hurry) for i, one in enumerate(honest)]
        most = slots - promised  # promises count on no slot that a service may want
        plane.reservations.make(Reservation(name=SERVICE, most=most), "bench", force=True)
        for record in records:
            _wait(plane, record.job_id, lambda job: job.done > 0)
        _wait_decided(plane, [record.job_id for record in records[:promised]])
        had = 0
        while len(left_s) < reclaims:
            wanted, asked_s = chance.randint(0, most), plane.clock()
            took_s = want(plane, wanted)
            if wanted > had:
                left_s.append(took_s)
                spans.append((asked_s, asked_s + took_s))
                sizes.append(wanted - had)
            had = wanted
            time.sleep(chance.uniform(0.0, 0.6))
        running = sum(not plane.jobs.get(record.job_id).phase.over for record in records)
        want(plane, 0)
        hurry.touch()
        for record in records:
            _wait(plane, record.job_id, lambda job: job.phase.over)
        ended = [plane.jobs.get(record.job_id) for record in records]
        problems = [
            f"{job.job_id}: {job.phase} {job.reason}" for job in ended if job.phase is not Phase.FINISHED
        ]
        problems += [f"{one.name}: {found}" for one in honest if (found := one.problem())]
        problems += [f"{job.job_id}: promise broken, and not told" for job in ended if _broken(plane, job)]
        if running < jobs:
            problems.append(f"only {running} of {jobs} jobs ran until the last reclaim")
        events = [event for _, event in plane.events(limit=1_000_000)]
        runs = histories(home)
    finally:
        end_jobs(plane)
        plane.stop()
        store.close()
    return {
        "reclaims": len(left_s),
        "jobs": jobs,
        "slots_reclaimed": sum(sizes),
        **figures(left_s),
        **explained([stages(events, runs, asked_s, seen_s) for asked_s, seen_s in spans]),
        "promised": sum(job.promise.guaranteed_s is not None for job in ended),
        "dangers_told": sum(event.kind is EventKind.NOTICED for event in events),
        "problems": problems,
        "verdict": verdict(left_s, problems),
    }


def figures(waits_s: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of waits; the percentile is one of the waits."""
    ordered = sorted(waits_s) or [0.0]
    p99_s = ordered[min(math.ceil(0.99 * len(ordered)), len(ordered)) - 1]
    return {
        "median_s": round(statistics.median(ordered), 3),
        "p99_s": round(p99_s, 3),
        "worst_s": round(ordered[-1], 3),
        "over_bound": sum(took_s > BOUND_S for took_s in waits_s),
    }


def verdict(waits_s: Sequence[float], problems: Sequence[str] = ()) -> str:
    """Whether everything was as it must be, in words."""
    over = sum(took_s > BOUND_S for took_s in waits_s)
    faults = [f"{over} of {len(waits_s)} reclaims took more than {BOUND_S:g} s"] if over else []
    faults += [f"{len(problems)} problems"] if problems else []
    return "failed: " + " and ".join(faults) if faults else "passed"


def explained(where: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Where the time of reclaims went: in general, and of each that took longer than the bound."""
    if not where:
        return {}
    late = [one for one in where if sum(one.values()) > BOUND_S]
    return {
        "stages_median": _told({name: statistics.median(w[name] for w in where) for name in STAGES}),
        "stages_max": _told({name: max(w[name] for w in where) for name in STAGES}),
        "late": [f"{sum(one.values()):.2f} s: {_told(one)}" for one in late],
    }


def _told(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {took_s:.2f}" for name, took_s in seconds.items())


def end_jobs(plane: ControlPlane) -> None:
    """Cancel what still runs, if the benchmark was interrupted, and wait until its processes are gone."""
    for job in plane.jobs.find():
        if not job.phase.over:
            plane.jobs.cancel(job.job_id)
    until_s = time.monotonic() + 60.0
    folders = [plane.home / "jobs" / job.job_id for job in plane.jobs.find()]
    while any(processes_of(folder) for folder in folders) and time.monotonic() < until_s:
        time.sleep(0.1)


def _submit(plane: ControlPlane, one: Honest, home: Path, promised: bool, hurry: Path) -> JobRecord:
    args = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", one.epochs, "--out", one.out)
    pace = ("--pace", 0.01, "--sample-pace", 0.01, "--checkpoint-every", 1000, "--hurry", hurry)
    request = JobRequest(
        name=one.name,
        script=str(COUNTING),
        args=tuple(map(str, (*args, *pace))),
        workdir=str(home),
        max_workers=MOST_WORKERS,
        deadline_s=time.time() + 3600.0 if promised else None,
    )
    return plane.jobs.submit(request, "bench")


def _broken(plane: ControlPlane, job: JobRecord) -> bool:
    by_s = job.promise.guaranteed_s
    told = any(event.kind is EventKind.NOTICED for _, event in plane.events(job_id=job.job_id, limit=10_000))
    return by_s is not None and (job.ended_s or 0.0) > by_s and not told


def _wait(plane: ControlPlane, job_id: str, condition: Any) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition(plane.jobs.get(job_id)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"job {job_id} after {LIMIT_S:g} s: {plane.jobs.get(job_id)}")
        if (job := plane.jobs.get(job_id)).phase.over and not condition(job):
            raise RuntimeError(f"job {job_id} ended too early: {job.phase.value}, {job.reason}")
        time.sleep(0.05)


def _wait_decided(plane: ControlPlane, job_ids: list[str]) -> None:
    for job_id in job_ids:
        _wait(plane, job_id, lambda job: job.phase.over or not job.promise.pending)


def measure(
    *, reclaims: int = 100, jobs: int = 6, slots: int = 12, promised: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Reclaim slots in a platform of its own."""
    with tempfile.TemporaryDirectory(prefix="swell-reclaims-") as folder:
        return reclaim_at_random(
            Path(folder), reclaims=reclaims, jobs=jobs, slots=slots, promised=promised, seed=seed
        )


def main() -> None:
    """Reclaim and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reclaims", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--promised", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(
        reclaims=args.reclaims, jobs=args.jobs, slots=args.slots, promised=args.promised, seed=args.seed
    )
    print(
        json.dumps(found) if args.json else "\n".join(f"{name:>16}: {value}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
