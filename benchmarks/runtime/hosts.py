"""Cut links between hosts: how long training stands still, who commits, who comes back.

    python -m benchmarks.runtime.hosts [--quick] [--events] [--schedules N] [case ...]

A head and three workers, each in a network namespace of its own (`netns`), train a model that counts its
samples (`counting`). A link is cut for a while and healed; then the job is run to its end. Reported for each
case: the longest time without a step by those who are left, how many steps the cut-off worker made, how long
after the healing all three trained together again, and whether every sample was used once.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.runtime.arena import SCRIPT, check_counts
from benchmarks.runtime.harness import Step
from benchmarks.runtime.netns import Hosts, why_not
from benchmarks.runtime.stage import Stage
from swell.train.agent.client import JobClient
from swell.train.agent.jobdir import JobDirectory

SAMPLES, BATCH = 48, 16


@dataclass(frozen=True, slots=True)
class Case:
    """Something that happens to the links."""

    links: list[tuple[int, int]]
    """The links that are cut, as pairs of hosts."""
    cut_s: float
    left_out: int | None = None
    """The slot of the worker that is left out; None if nobody is."""
    both: bool = True
    """False if only what the first sends to the second is lost."""


CASES = {
    "worker from worker, 20 s": Case([(2, 3)], 20.0, 3),
    "worker from worker, 170 s": Case([(2, 3)], 170.0, 3),
    "one worker from the others, 20 s": Case([(1, 2), (1, 3)], 20.0, 1),
    "worker from head, 20 s": Case([(0, 2)], 20.0, 2),
    "one direction, worker to worker, 20 s": Case([(3, 2)], 20.0, 3, both=False),
    "one direction, head to worker, 20 s": Case([(0, 3)], 20.0, 3, both=False),
    "one host from everybody, 20 s": Case([(1, 0), (1, 2), (1, 3)], 20.0, 1),
    "head away, 30 s": Case([(0, 1), (0, 2), (0, 3)], 30.0),
    "a glitch, 1 s": Case([(2, 0), (2, 1), (2, 3)], 1.0),
}


class HostsJob:
    """A job on the hosts 1, 2, ... that counts its samples."""

    def __init__(self, hosts: Hosts, stage: Stage, root: Path, *, epochs: int, pace_s: float) -> None:
        self.hosts, self._stage, self.root = hosts, stage, root
        self.out, self.hurry, self.timeline = root / "out.json", root / "hurry", root / "timeline"
        self.timeline.mkdir(parents=True)
        self.directory = JobDirectory(root / "job")
        arguments = ["--samples", str(SAMPLES), "--batch", str(BATCH), "--epochs", str(epochs)]
        arguments += ["--pace", str(pace_s), "--hurry", str(self.hurry), "--timeline", str(self.timeline)]
        slots = list(range(1, hosts.count))
        self.pid = stage.launch(
            root / "job",
            script=str(SCRIPT),
            arguments=[*arguments, "--checkpoint-every", "20", "--out", str(self.out)],
            minimum=1,
            maximum=len(slots),
            workers=len(slots),
            slots=slots,
            gather_s=0.3,
            threads=1,
            hosts=hosts.describe(),
        )
        self.code: int | None = None

    @contextlib.contextmanager
    def client(self) -> Iterator[JobClient]:
        """A connection to the coordinator, from its host."""
        with self.hosts.inside(0):
            made = JobClient(self.directory, wait_s=20.0)
        try:
            yield made
        finally:
            made.close()

    def wait_for(self, condition: Callable[[dict[str, Any]], Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the coordinator's view fulfils a condition."""
        with self.client() as client:
            return client.wait_for(condition, timeout_s)

    def together(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until there is a member on every host, and a step was made since."""
        size = self.hosts.count - 1
        before = self.wait_for(lambda s: len(s["members"]) == size and s["step"] > 0, timeout_s)
        return self.wait_for(
            lambda s: len(s["members"]) == size and s["step"] > before["step"], timeout_s=timeout_s
        )

    def steps(self) -> dict[str, list[Step]]:
        """What each worker committed so far."""
        found = {}
        for path in self.timeline.iterdir():
            rows = [line.split() for line in path.read_text().splitlines()]
            found[path.name] = [Step(int(a), int(b), int(c), float(d)) for a, b, c, d in rows if d]
        return found

    def finish(self, timeout_s: float = 90.0) -> str | None:
        """Let it run to its end; what is wrong with the result, or None."""
        self.hurry.touch()
        self.code = self._stage.wait(self.pid, timeout_s)
        if self.code != 0:
            return f"exit code {self.code}: {(self.root / 'job' / 'output.txt').read_text()[-2000:]}"
        weight = json.loads(self.out.read_text())["weight"]
        return check_counts(weight, SAMPLES, BATCH) or twice(self.steps())

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._stage.wait(self.pid, 15.0)


def twice(steps: dict[str, list[Step]]) -> str | None:
    """A step that was committed in two generations, which must not be."""
    by_number: dict[int, set[int]] = {}
    for rows in steps.values():
        for row in rows:
            by_number.setdefault(row.number, set()).add(row.generation)
    odd = {number: sorted(found) for number, found in by_number.items() if len(found) > 1}
    # Some may commit a step, and others complete it after a recovery, in the next generation.
    odd = {number: found for number, found in odd.items() if found[-1] - found[0] > 1}
    return f"steps committed twice: {odd}" if odd else None


def longest_gap_s(steps: dict[str, list[Step]], begin_s: float, end_s: float) -> float:
    """The longest time in which nobody committed a step."""
    times = sorted(row.at_s for rows in steps.values() for row in rows if begin_s <= row.at_s <= end_s)
    return max(b - a for a, b in pairwise([begin_s, *times, end_s]))


def play(hosts: Hosts, stage: Stage, case: Case, *, pace_s: float = 0.1) -> dict[str, Any]:
    """Run one case."""
    root = Path(tempfile.mkdtemp(prefix="swell-hosts-"))
    epochs = int((case.cut_s + 40) / (pace_s * SAMPLES / BATCH))
    job = HostsJob(hosts, stage, root, epochs=epochs, pace_s=pace_s)
    try:
        before = job.together()
        slots = {slot: name for name, slot in before["slots"].items()}
        time.sleep(1.0)
        cut_s, cut_at_s = time.monotonic(), time.time()
        for one, other in case.links:
            hosts.cut(one, other, both=case.both)
        time.sleep(case.cut_s)
        healed_s = time.monotonic()
        during = job.steps()
        hosts.heal_all()
        job.together(120.0)
        back_s = time.monotonic() - healed_s
        result: dict[str, Any] = {
            "longest_gap_s": round(longest_gap_s(during, cut_s, healed_s), 2),
            "back_after_s": round(back_s, 2),
        }
        if case.left_out is not None:
            rows = during.get(slots[case.left_out], [])
            alone = [row for row in rows if row.at_s > cut_s + 7.0]
            result["steps_of_the_cut_off"] = len(alone)
        result["problem"] = job.finish()
        result["events"] = [
            {
                "at_s": round(event["time_s"] - cut_at_s, 2),
                **{k: v for k, v in event.items() if k != "time_s"},
            }
            for event in job.directory.events()
            if event["event"] != "checkpoint"
        ]
        return result
    finally:
        job.close()
        hosts.heal_all()
        shutil.rmtree(root, ignore_errors=True)


def play_at_random(hosts: Hosts, stage: Stage, seed: int) -> dict[str, Any]:
    """One job in which links are cut and healed and workers killed at random."""
    rng = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="swell-hosts-"))
    job = HostsJob(hosts, stage, root, epochs=60, pace_s=0.1)
    done: list[str] = []
    try:
        job.together()
        for _ in range(rng.randint(2, 4)):
            one, other = rng.sample(range(hosts.count), 2)
            kind = rng.choice(["cut", "cut", "cut one way", "heal", "kill"])
            if kind == "heal":
                hosts.heal_all()
            elif kind == "kill":
                status = job.wait_for(lambda s: s["members"])
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(status["pids"][rng.choice(status["members"])], signal.SIGKILL)
            else:
                hosts.cut(one, other, both=kind == "cut")
            done.append(f"{kind} {one} {other}")
            time.sleep(rng.choice([0.0, 1.0, 4.0, 7.0]))
        hosts.heal_all()
        job.together(120.0)
        return {"done": done, "problem": job.finish()}
    except TimeoutError as error:
        return {"done": done, "problem": str(error)}
    finally:
        job.close()
        hosts.heal_all()
        shutil.rmtree(root, ignore_errors=True)


def measure(names: list[str] | None = None, *, quick: bool = False, schedules: int = 0) -> dict[str, Any]:
    """All cases, or those named; quickly without the longest. And some random schedules, or only those."""
    reason = why_not()
    if reason is not None:
        return {"skipped": reason}
    chosen = list(names or [])
    if not chosen and not schedules:
        chosen = [name for name, case in CASES.items() if not quick or case.cut_s < 100]
    stage = Stage()
    result: dict[str, Any] = {}
    try:
        with Hosts(4) as hosts:
            for name in chosen:
                result[name] = play(hosts, stage, CASES[name])
            for seed in range(schedules):
                result[f"schedule {seed}"] = play_at_random(hosts, stage, seed)
    finally:
        stage.close()
    return result


def figures(*, quick: bool = False, schedules: int = 0) -> dict[str, Any]:
    """As `measure`, without the events."""
    found = measure(quick=quick, schedules=schedules)
    for result in found.values():
        if isinstance(result, dict):
            result.pop("events", None)
    return found


def main() -> None:
    """Print what was measured as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--events", action="store_true", help="and the job's events, by time since the cut")
    parser.add_argument("--schedules", type=int, default=0, help="so many random ones instead")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    for name, result in measure(options.cases, quick=options.quick, schedules=options.schedules).items():
        events = result.pop("events", []) if isinstance(result, dict) else []
        print(json.dumps({name: result}))
        for event in events if options.events else []:
            print("   ", json.dumps(event))


if __name__ == "__main__":
    main()
