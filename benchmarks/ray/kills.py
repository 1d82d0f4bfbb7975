"""Workers that take long to get ready are killed again and again on Ray: does any job stop by itself?

    python -m benchmarks.ray.kills [--kills 100] [--minutes 20] [--ready 15]

A head with the control plane and two nodes of three slots each, in network namespaces of this machine. Two
jobs, of three workers and of two, train all the time, and each of their workers takes 15 s to get ready.
Workers are killed at even intervals, those that are still getting ready too, but never the last one that
trains. Meanwhile jobs of one worker come one after the other and take 44 s to get ready, and three times the
head is away for 8 s. There is room for all: so no job may stop, or be told that others have its slots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.ray.cluster import RayNode, new_token
from benchmarks.ray.failures import until
from benchmarks.runtime import netns
from swell.control.model import JobRequest, Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Event, EventKind
from swell.engines.processes import workers_of
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine
from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

SCRIPT = Path(__file__).parent / "steps_script.py"
OUT = Path("out") / "ray_kills.json"
AWAY_S = 8.0
SLOW_S = 44.0
"""How long the jobs that come and go take to get ready."""
WORKERS = {"three": 3, "two": 2}
_STOPPED_FOR_OTHERS = "its slots went"


class Scene:
    """A platform on a cluster whose head can be cut off, and its jobs."""

    def __init__(self, home: Path, address: str, ready_s: float, slow_s: float) -> None:
        self.home, self._ready_s, self._slow_s = home, ready_s, slow_s
        self.store = Store(connect(str(home / "store.db")))
        engine = SupervisedEngine(RaySite(home, RayOptions(address=address)))
        self.plane = ControlPlane(self.store, engine, home=home, policy="max-min", interval_s=1.0)
        self.plane.start()
        self.end = home / "end"
        self.jobs = {name: self._submit(name, count, ready_s, self.end) for name, count in WORKERS.items()}
        self.slow: list[str] = []

    def _submit(self, name: str, workers: int, ready_s: float, end: Path) -> str:
        steps = self.home / "steps" / name
        steps.mkdir(parents=True)
        args = ("--steps", str(steps), "--until", str(end), "--ready-s", str(ready_s))
        fields: dict[str, Any] = {"min_workers": workers, "max_workers": workers, "checkpoint_s": 10.0}
        request = JobRequest(name=name, script=str(SCRIPT), args=args, workdir=str(SCRIPT.parent), **fields)
        return self.plane.jobs.submit(request, "bench").job_id

    def status(self, job_id: str) -> dict[str, Any]:
        """How a job's coordinator sees it; empty if it cannot be reached now."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            run = sorted((self.home / "jobs" / job_id / "runs").iterdir())[-1]
            with JobClient(JobDirectory(run)) as client:
                return client.status()
        return {}

    def whole(self, name: str) -> bool:
        """Whether a job trains with all of its workers."""
        return len(self.status(self.jobs[name]).get("members", ())) == WORKERS[name]

    def kill_one(self, chance: random.Random) -> bool:
        """Kill a worker of a job, but not the last one that trains; False if there is none now."""
        for name in chance.sample(sorted(self.jobs), len(self.jobs)):
            status = self.status(self.jobs[name])
            if not status:
                continue
            members = {status["pids"].get(worker) for worker in status["members"]}
            pids = set(workers_of(self.home / "jobs" / self.jobs[name]))
            if len(members) < 2:
                pids -= members
            if pids and members:
                os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
                return True
        return False

    def slow_starts(self) -> None:
        """Have one job that starts slowly at any time; it ends once it has trained for a moment."""
        if self.slow and not self.plane.jobs.get(self.slow[-1]).phase.over:
            steps = self.home / "steps" / f"slow-{len(self.slow)}"
            if any(path.stat().st_size for path in steps.glob("*")):
                self._end_of(len(self.slow)).touch()
            return
        number = len(self.slow) + 1
        self.slow.append(self._submit(f"slow-{number}", 1, self._slow_s, self._end_of(number)))

    def _end_of(self, number: int) -> Path:
        return self.home / f"end-{number}"

    def finish(self) -> None:
        """Have all jobs end by themselves."""
        self.end.touch()
        for number in range(1, len(self.slow) + 1):
            self._end_of(number).touch()
        everybody = [*self.jobs.values(), *self.slow]
        until(lambda: all(self.plane.jobs.get(job_id).phase.over for job_id in everybody), 180)

    def events(self) -> list[Event]:
        """All events."""
        return [event for _, event in self.store.events(limit=1_000_000)]

    def close(self) -> None:
        """End the platform and what is left of its jobs."""
        for job_id in [*self.jobs.values(), *self.slow]:
            if not self.plane.jobs.get(job_id).phase.over:
                self.plane.jobs.cancel(job_id)
        with contextlib.suppress(TimeoutError):
            until(lambda: not list((self.home / "jobs").glob("*/start.json")), 30)
        self.plane.stop()
        self.store.close()


def measure(
    kills: int, minutes: float, ready_s: float = 15.0, slow_s: float = SLOW_S, aways: int = 3
) -> dict[str, Any]:
    """Make the cluster, kill workers at even intervals, and look at what the platform wrote down."""
    home = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    scratch = tempfile.mkdtemp(prefix="swell-rc-")
    with new_token(), netns.Hosts(3) as hosts:
        made: list[RayNode] = []
        try:
            made.append(RayNode("head", 0, scratch, None, host=(hosts.namespace(0), hosts.address(0))))
            address = str(made[0].wait_up()["address"])
            for i in (1, 2):
                place = hosts.namespace(i), hosts.address(i)
                made.append(RayNode(f"n{i}", 3, scratch, address, host=place))
            for node in made[1:]:
                node.wait_up()
            with hosts.inside(0):
                scene = Scene(home, address, ready_s, slow_s)
                try:
                    return _run(scene, hosts, kills, minutes, aways)
                finally:
                    hosts.heal_all()
                    scene.close()
        finally:
            for node in reversed(made):
                node.stop()
            for folder in (scratch, home):
                shutil.rmtree(folder, ignore_errors=True)


def _run(scene: Scene, hosts: netns.Hosts, kills: int, minutes: float, aways: int) -> dict[str, Any]:
    until(lambda: all(scene.whole(name) for name in WORKERS), 300)
    chance, began_s, whole_s = random.Random(1), time.monotonic(), minutes * 60.0
    due_kills = [whole_s * (i + 0.5) / kills for i in range(kills)]
    due_aways = [whole_s * (i + 1) / (aways + 1) for i in range(aways)]
    killed, was_away, heal_s = 0, 0, float("inf")
    while (now_s := time.monotonic() - began_s) < whole_s or killed < kills:
        if due_aways and now_s > due_aways[0]:
            due_aways.pop(0)
            for node in (1, 2):
                hosts.cut(0, node)
            heal_s, was_away = now_s + AWAY_S, was_away + 1
        if now_s > heal_s:
            hosts.heal_all()
            heal_s = float("inf")
        if killed < kills and now_s > due_kills[killed]:
            killed += scene.kill_one(chance)
        if heal_s == float("inf"):
            scene.slow_starts()
        time.sleep(0.2)
    hosts.heal_all()
    until(lambda: all(scene.whole(name) for name in WORKERS), 180)
    took_s = time.monotonic() - began_s
    runs = {n: len(list((scene.home / "jobs" / j / "runs").iterdir())) for n, j in scene.jobs.items()}
    scene.finish()
    events = scene.events()
    kinds = Counter(event.kind for event in events)
    reasons = [str(event.data.get("reason", "")) for event in events]
    everybody = [*scene.jobs.values(), *scene.slow]
    found = {
        "kills": killed,
        "minutes": round(took_s / 60, 1),
        "times_the_head_was_away": was_away,
        "slow_starts": len(scene.slow),
        "workers_lost_by_the_log": kinds[EventKind.WORKER_LOST],
        "jobs_that_stopped": kinds[EventKind.PREEMPTED],
        "jobs_begun_again": sum(count - 1 for count in runs.values()),
        "times_others_had_their_slots": sum(_STOPPED_FOR_OTHERS in reason for reason in reasons),
        "reasons": dict(Counter(filter(None, reasons)).most_common(10)),
        "all_finished": all(scene.plane.jobs.get(j).phase is Phase.FINISHED for j in everybody),
    }
    stopped = ("jobs_that_stopped", "jobs_begun_again", "times_others_had_their_slots")
    return found | {"holds": found["all_finished"] and not any(found[name] for name in stopped)}


def main() -> int:
    """Measure, write, and say in one line whether any job stopped."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--ready", type=float, default=15.0, help="seconds that a worker takes to get ready")
    options = parser.parse_args()
    why = netns.why_not()
    found = {"skipped": why} if why else measure(options.kills, options.minutes, options.ready)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if why:
        print(f"skipped: {why}")
        return 0
    print(
        f"{'holds' if found['holds'] else 'DOES NOT HOLD'}: {found['kills']} kills in {found['minutes']} "
        f"minutes, the head away {found['times_the_head_was_away']} times, {found['slow_starts']} slow "
        f"starts; {found['jobs_that_stopped']} jobs stopped, {found['jobs_begun_again']} began again, "
        f"'its slots went' was said {found['times_others_had_their_slots']} times"
    )
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
