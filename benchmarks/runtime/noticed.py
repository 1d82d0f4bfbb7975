"""Is it noticed when one worker's number differs? 200 numbers are spoilt, in jobs of three workers.

    python -m benchmarks.runtime.noticed [--count 200] [--seed 1] [--json]

Each time one worker (the leader too) changes one number of its own: a weight, a number of the optimizer's
state or settings, a buffer, the inputs or the targets in its memory, the state of its random numbers, or a
variable of the script (noticed_script.py). It is noticed if within 50 steps a worker leaves for it, or
follows the leader, and an event says so. A figure for each kind: how often it was noticed, and after how many
steps at most. Exits with 1 if one was not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.runtime.gpu import Running

SCRIPT = Path(__file__).with_name("noticed_script.py")
KINDS = ("weight", "state", "setting", "moments", "buffer", "input", "target", "random", "counter")
WITHIN, SETTLED = 50, 55
"""Steps: in which it must be noticed, and after which a worker that came last counts as settled."""
PER_JOB = 9
"""A tensor that differs again and again is left alone after three times, so a job is spoilt only so often."""
SAYS = ("differs", "could_not_follow")


class Fewer(Exception):
    """A job goes on with fewer workers: when the leader's number is spoilt, the others leave, and after three
    in a row nobody else comes."""


def settled(job: Running) -> dict[str, Any]:
    """Wait until three workers have made some steps together."""
    deadline, members, begin = time.monotonic() + 60.0, [], 0
    while time.monotonic() < deadline:
        now = job.client.status()
        if now["confined"]:
            raise Fewer(now["confined"])
        if now["members"] != members:
            members, begin = now["members"], now["step"]
        if len(members) == 3 and now["step"] >= begin + SETTLED:
            return now
        time.sleep(0.02)
    raise Fewer(f"there are {members} after a minute")


def spoilt(job: Running, orders: Path, number: str, kind: str, draw: random.Random) -> int | None:
    """Spoil one number; returns after how many steps it was noticed, or None."""
    worker = draw.choice(settled(job)["members"])
    before = len(said(job))
    order = {"worker": worker, "number": number, "kind": kind, "seed": draw.randrange(2**31)}
    (orders / "new").write_text(json.dumps(order))
    (orders / "new").replace(orders / "order")
    done = orders / f"done-{number}"
    deadline = time.monotonic() + 60.0
    while not (done.exists() and done.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"worker {worker} did not take the order {number}")
        time.sleep(0.01)
    step = int(done.read_text())
    while True:
        status = job.client.status()
        found = [event["step"] for event in said(job)[before:] if event["step"] >= step - 1]
        if found:
            return max(min(found) - step, 0)
        if status["step"] > step + WITHIN + 30:
            return None
        time.sleep(0.02)


def said(job: Running) -> list[dict[str, Any]]:
    """The events of workers that differed."""
    return [event for event in job.directory.events() if event["event"] in SAYS]


def measure(count: int, seed: int) -> dict[str, Any]:
    """Spoil `count` numbers; by kind, after how many steps each was noticed."""
    draw = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    draw.shuffle(kinds)
    noticed: dict[str, list[int | None]] = defaultdict(list)
    numbers = list(enumerate(kinds))
    while numbers:
        with tempfile.TemporaryDirectory(prefix="swell-noticed-") as folder:
            root, orders = Path(folder), Path(folder) / "orders"
            orders.mkdir()
            limits = {"maximum": 3, "workers": 3, "threads": 1}
            job = Running(root, SCRIPT, ["1000000", str(orders)], {"auto": True, "limits": limits})
            try:
                for _ in range(min(PER_JOB, len(numbers))):
                    number, kind = numbers[0]
                    after = spoilt(job, orders, str(number), kind, draw)
                    noticed[kind].append(after)
                    numbers.pop(0)
                    print(f"[{number + 1}/{count}] {kind}: {after}", file=sys.stderr, flush=True)
            except Fewer as fewer:
                print(f"another job: {fewer}", file=sys.stderr, flush=True)
            finally:
                job.close()
    return dict(noticed)


def main() -> int:
    """Print a line for each kind, or a JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="how many numbers are spoilt (200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    noticed = measure(given.count, given.seed)
    missed = sum(after is None or after > WITHIN for found in noticed.values() for after in found)
    if given.json:
        print(json.dumps({"noticed_after": noticed, "missed": missed}))
    else:
        for kind, found in sorted(noticed.items()):
            known = [after for after in found if after is not None]
            print(f"{kind:8} {len(known)}/{len(found)} noticed, after at most {max(known, default=0)} steps")
        print(f"{missed} of {given.count} were not noticed within {WITHIN} steps")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
