"""Everything at once, for minutes, on a real platform; then: nothing lost, nothing doubled, nothing left.

    python -m benchmarks.soak [--minutes 10] [--seed 0] [--json]

A real `swell up` on four CPU slots, in a home with a small disk of its own (where one may be mounted). People
submit honest jobs whose weights count their samples. Meanwhile, drawn from the seed: every kind of process is
killed or frozen, the control plane too; the disk is full; bounds and policies change; jobs pause; hostile
jobs lie, fork, leave processes and swap their files; strangers talk nonsense to every port. Afterwards:

- every accepted job is in the store, once, and every honest one finished with each sample used exactly once;
- no job ever had two supervisors, and by the event log no slot two jobs;
- no process is left, not even one that shed its environment (where cgroups v2 can be used);
- no hostile job could read the tokens (where jobs can be walled off);
- memory and descriptors of the control plane are flat in the last 40% of the time, in which it is not killed.

Only processes of this platform are touched, and all that it started is ended. The exit code is 1 if anything
went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
from typing import Any

from benchmarks.common import write_json
from benchmarks.soak import verdict
from benchmarks.soak.harm import Harm, Watch
from benchmarks.soak.scripts import COUNTING, Honest
from benchmarks.soak.stage import SLOTS, Stage
from swell.engines import groups
from swell.engines.local import try_wall, wall_trouble

ALONE = 0.6
"""From this part of the time on the control plane is left alone, and measured."""
KILLED_BY = 0.3
"""By this part of the time the control plane was killed at least once, whatever the seed."""
MOST_ACTIVE = 5
"""Honest jobs that are there at a time."""
FINISH_S = 240.0
"""How long the jobs get to finish after all harm is over."""
GONE_S = 30.0
TALK_S = 10.0


class People(threading.Thread):
    """Submits honest jobs, whatever happens to the platform, until `over` is set."""

    def __init__(self, stage: Stage, seed: int) -> None:
        super().__init__(daemon=True)
        self.stage = stage
        self.chance = random.Random(seed)
        self.over = threading.Event()
        self.jobs: dict[str, Honest] = {}
        """By key: what was submitted."""
        self.answers: dict[str, set[str]] = {}
        """By key: the ids that the submission was answered with."""
        self.refused: set[str] = set()

    def run(self) -> None:
        """One job after the other, with a few at a time."""
        while not self.over.wait(self.chance.uniform(0.3, 1.5)):
            if self._active() >= MOST_ACTIVE:
                continue
            job = Honest.drawn(self.chance, len(self.jobs), self.stage.work)
            self.jobs[job.name] = job
            self._submit(job)
            if self.chance.random() < 0.2:  # somebody who did not see the answer asks again
                self._submit(job)

    def _active(self) -> int:
        with contextlib.suppress(Exception), self.stage.server.client(retry_s=0.0) as client:
            return sum(job.ended_s is None for job in client.jobs(limit=100) if job.name in self.jobs)
        return 0

    def _submit(self, job: Honest) -> None:
        """Try until it is accepted: the control plane may be away, or its disk full."""
        while True:
            with contextlib.suppress(Exception), self.stage.server.client(retry_s=5.0) as client:
                view = client.submit(
                    COUNTING,
                    name=job.name,
                    args=list(job.args),
                    workdir=str(self.stage.work),
                    idempotency_key=job.name,
                    max_restarts=100,  # in ten minutes a job may lose all its processes many times
                    **job.options,
                )
                self.answers.setdefault(job.name, set()).add(view.job_id)
                return
            if self.over.wait(0.5):
                return  # perhaps it was accepted, perhaps not: nobody was told


def soak(minutes: float, seed: int, say: Any) -> verdict.Verdict:
    """The whole story."""
    stage = Stage(seed)
    harm, watch, people = Harm(stage, seed), Watch(stage), People(stage, seed + 1)
    walled = not wall_trouble(try_wall(), stage.home)
    found = verdict.Verdict()
    try:
        stage.start(time.monotonic() + 120.0)
        watch.start()
        people.start()
        _disturb(harm, watch, people, 60.0 * minutes, say)
        say("all harm is over; the jobs finish")
        people.over.set()
        people.join(60.0)
        (stage.work / "hurry").touch()
        harm.settle()
        unfinished = _finish(stage, people, say)
        grown = verdict.growth(watch.seen, stage.pid)
        with stage.server.client() as client:
            health = client.health()
        watch.over.set()
        watch.join(30.0)
        stored = stage.accepted()
        stage.server.stop()
        left = _until_gone(stage)
        accepted = [people.jobs[key] for key in people.answers]
        samples = [(job.name, job.problem()) for job in accepted]
        found.wrong = {
            "lost": verdict.lost(people.answers, stored),
            "doubled": verdict.doubled(people.answers, stored)
            + [f"{job_id} had two supervisors" for job_id in watch.twice],
            "not finished": unfinished,
            "samples": [f"{name}: {problem}" for name, problem in samples if problem is not None],
            "event log": verdict.log_problems(_events(stage), SLOTS),
            "left": left,
            "backups": harm.bad_backups,
            "not deleted": _not_deleted(stage),  # after the log was read
            "read by thieves": harm.stolen() if walled else [],
            "not flat": verdict.not_flat(grown),
            "errors of the platform": verdict.complaints(stage.home / "up.log"),
            "not well at the end": [] if health.status == "ok" else [str(health)],
        }
        found.figures = {
            "minutes": minutes,
            "seed": seed,
            "honest_jobs": len(accepted),
            "hostile_jobs": len(harm.hostile),
            "variants": harm.variants,
            "samples": sum(job.samples * job.epochs for job in accepted),
            "harms": dict(sorted(harm.count.items())),
            "restarts": len(harm.back_s),
            "restart_s": round(statistics.median(harm.back_s), 2) if harm.back_s else None,
            "most_workers": watch.most_workers,
            "grown": grown,
            "answers": verdict.answer_times(watch.answers_ms),
            "skipped": _skipped(stage, walled),
        }
        return found
    finally:
        people.over.set()
        watch.over.set()
        keep = os.environ.get("SWELL_SOAK_KEEP")
        if keep and not found.ok:
            _keep(stage, keep)
        stage.close()


def _disturb(harm: Harm, watch: Watch, people: People, seconds: float, say: Any) -> None:
    """One harm after the other until the time is over."""
    began_s = said_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < seconds:
        if passed_s > ALONE * seconds and not harm.sparing_plane:
            harm.sparing_plane = watch.alone = True
            harm.bring_back()
        harm.one()
        if passed_s > KILLED_BY * seconds and not harm.count["killed: control plane"]:
            harm.count["killed: control plane"] += harm.do_plane(training=False) is not None
        if time.monotonic() - said_s > TALK_S:
            said_s = time.monotonic()
            harms = sum(harm.count.values())
            say(f"{passed_s:.0f} of {seconds:.0f} s: {len(people.answers)} honest jobs, {harms} harms")
        time.sleep(harm.chance.uniform(0.1, 1.0))


def _finish(stage: Stage, people: People, say: Any) -> list[str]:
    """Wait for the jobs to be over; returns honest jobs that did not come to a good end."""
    until_s, said_s = time.monotonic() + FINISH_S, time.monotonic()
    while True:
        with stage.server.client() as client:
            jobs = client.jobs()
        there = [job for job in jobs if job.ended_s is None]
        if not there or time.monotonic() > until_s:
            honest = [job for job in jobs if job.name in people.jobs and job.phase.value != "finished"]
            return [f"{job.job_id} is {job.phase.value}: {job.reason}" for job in honest] + [
                f"{job.job_id} is {job.phase.value}" for job in there if job not in honest
            ]
        if time.monotonic() - said_s > TALK_S:
            said_s = time.monotonic()
            say(f"{len(there)} jobs to go")
        time.sleep(0.5)


def _until_gone(stage: Stage) -> list[str]:
    until_s = time.monotonic() + GONE_S
    while (left := stage.strays()) and time.monotonic() < until_s:
        time.sleep(0.2)
    return left


def _events(stage: Stage) -> list[Any]:
    from swell.control.store import Store, connect

    store = Store(connect(str(stage.home / "store.db")))
    try:
        return [event for _, event in store.events(limit=1_000_000)]
    finally:
        store.close()


def _not_deleted(stage: Stage) -> list[str]:
    """Jobs that the platform cannot forget, whatever is in their directories. All of them are over by now."""
    from swell.control.retention import Keep, Retention
    from swell.control.store import Store, connect

    store = Store(connect(str(stage.home / "store.db")))
    try:
        Retention(store, stage.home, Keep(for_s=-1.0)).run(time.time())
        return [record.job_id for record in store.jobs(over=True, limit=1_000_000)]
    finally:
        store.close()


def _skipped(stage: Stage, walled: bool) -> list[str]:
    found = [] if stage.own_disk else [f"full disk: {stage.no_disk}"]
    found += [] if walled else ["thieves: this machine allows no wall"]
    return found + ([] if groups.where() is not None else ["groups: this account may make no cgroup v2"])


def _keep(stage: Stage, folder: str) -> None:
    """Keep logs for whoever looks into what went wrong."""
    import shutil

    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(
            stage.home,
            folder,
            ignore=lambda _, names: [
                n for n in names if n in ("checkpoints", "filler", "lifeline", "tokens")
            ],
            dirs_exist_ok=True,
            copy_function=_copy_plain,
        )


def _copy_plain(source: str, target: str) -> None:
    import shutil
    from pathlib import Path

    if Path(source).is_file():
        shutil.copyfile(source, target)


def main() -> int:
    """Soak, and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the platform is disturbed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    if not 0 < args.minutes <= 600:
        parser.error(f"--minutes must be above 0 and at most 600, got {args.minutes:g}")
    os.environ.pop("SWELL_URL", None)
    os.environ.pop("SWELL_TOKEN", None)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = soak(args.minutes, args.seed, say)
    write_json("soak", found.to_json())
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
        return int(not found.ok)
    for name, value in found.figures.items():
        print(f"{name:<14} {json.dumps(value)}")
    for name, lines in found.wrong.items():
        print(f"{name + ':':<26} {'' if lines else 'none'}".rstrip())
        for line in lines[:20]:
            print(f"  {line}")
    print("nothing went wrong" if found.ok else "SOMETHING WENT WRONG")
    return int(not found.ok)


if __name__ == "__main__":
    sys.exit(main())
