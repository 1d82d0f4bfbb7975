"""Kill the control plane again and again while jobs run and people submit; see what is lost.

    python -m benchmarks.platform.crash [--kills 20] [--jobs 8] [--slots 4] [--seed 0]

A real `swell up` is killed with -9 at random moments and started again after a random while. Checked, with
the jobs' own output and /proc as witnesses:

- every job that was accepted finishes, with all its steps, each by one leader at a time;
- jobs train on while there is no control plane;
- after a restart the queue is the one that was on disk;
- there are never more workers than slots;
- a job all of whose workers are killed goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.platform.audit import ProcessWatch, overlapping_runs, workers
from swell.api.client import Client
from swell.engines.processes import processes_of, workers_of
from swell.policies import DEFAULT

TOY = Path(__file__).parents[2] / "tests" / "engines" / "toy.py"
UP_S = 60.0


@dataclass
class Account:
    """What was seen."""

    kills: int = 0
    accepted: list[str] = field(default_factory=list)
    steps_while_away: int = 0
    away_with_jobs: int = 0
    """Times the control plane was away while a job trained."""
    stalled: int = 0
    """Of those, times when no job made a step."""
    queue_changed: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    most_workers: int = 0
    unfinished: list[str] = field(default_factory=list)
    overlaps: int = 0
    missing_steps: list[str] = field(default_factory=list)
    resumed_at: int | None = None
    """The first step of a job after all its workers were killed; None if none had a checkpoint by then."""

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        wrong = (self.stalled, self.queue_changed, self.unfinished, self.overlaps, self.missing_steps)
        return not any(wrong)


class Server:
    """A `swell up` that can be killed."""

    def __init__(self, home: Path, slots: int, policy: str) -> None:
        self.home = home
        self._words = ["up", "--home", str(home), "--slots", str(slots), "--policy", policy, "--port", "0"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it and wait until it answers; returns how long that took."""
        began_s = time.monotonic()
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swell", *self._words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        while time.monotonic() - began_s < UP_S and self._process.poll() is None:
            with contextlib.suppress(Exception), self.client(retry_s=0.0) as client:
                client.health()
                return time.monotonic() - began_s
            time.sleep(0.05)
        raise RuntimeError((self.home / "up.log").read_text()[-2000:])

    def kill(self) -> None:
        """As nobody would: at once, with no chance to tidy up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """In good order."""
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()

    def client(self, retry_s: float = 90.0) -> Client:
        """Somebody to talk to it."""
        return Client(home=self.home, role="admin", retry_s=retry_s)


def on_disk(home: Path) -> dict[str, str]:
    """Phase of every job, in order of submission, as the store has it."""
    with contextlib.closing(sqlite3.connect(f"file:{home / 'store.db'}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT record FROM jobs ORDER BY submitted_s, job_id").fetchall()
    records = [json.loads(row[0]) for row in rows]
    return {r["job_id"]: r["phase"] for r in records}


def printed(home: Path) -> dict[str, int]:
    """Steps each job has printed so far."""
    return {
        path.parent.name: path.read_text().count("| step ") for path in (home / "jobs").glob("*/output.log")
    }


def submit_all(server: Server, jobs: int, epochs: int, pause_s: float, account: Account) -> None:
    """Hand in jobs one after the other, whatever happens to the server."""
    with server.client() as client:
        for i in range(jobs):
            options = {"within_s": 900.0} if i % 3 == 0 else {}
            args = ["--epochs", str(epochs), "--seed", str(i), "--sample-ms", "2"]
            key = f"crash-{i}"
            view = client.submit(
                TOY, name=f"toy{i}", args=args, checkpoint_s=2.0, idempotency_key=key, **options
            )
            account.accepted.append(view.job_id)
            time.sleep(pause_s)


def kill_once(server: Server, account: Account, chance: random.Random) -> None:
    """Kill the control plane, watch the jobs without it, start it again, compare."""
    server.kill()
    account.kills += 1
    before = on_disk(server.home)
    # Let what was on its way out get there, then see who trains.
    time.sleep(0.3)
    running, steps = workers(server.home), printed(server.home)
    time.sleep(chance.uniform(1.0, 3.0))
    made = {n: count - steps.get(n, 0) for n, count in printed(server.home).items() if n in running}
    trained = [n for n in running if steps.get(n, 0) > 0 and n in workers(server.home)]
    account.steps_while_away += sum(made.values())
    if trained:
        account.away_with_jobs += 1
        account.stalled += sum(made[n] for n in trained) == 0
    account.back_s.append(server.start())
    with server.client() as client:
        after = {view.job_id: str(view.phase) for view in reversed(client.jobs())}
    known = [n for n in after if n in before]
    if known != list(before):
        account.queue_changed.append(f"{list(before)} became {known}")
    for name, phase in before.items():
        now = after.get(name)
        # Phases may have moved on by what happened meanwhile, never back out of an end.
        if now is None or (phase in ("finished", "failed", "cancelled") and now != phase) or now == "failed":
            account.queue_changed.append(f"{name} was {phase} and is {now}")


def _has_checkpoint(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("*/*"))


def kill_all_workers(server: Server, account: Account) -> None:
    """End every worker of one job; it must go on from its checkpoint, not from nothing."""
    until_s = time.monotonic() + 20.0
    while not (ready := [n for n in workers(server.home) if _has_checkpoint(server.home / "jobs" / n)]):
        if time.monotonic() > until_s:
            return
        time.sleep(0.1)
    steps = printed(server.home)
    name = max(ready, key=lambda n: steps.get(n, 0))
    log = server.home / "jobs" / name / "output.log"
    length = len(log.read_text())
    for pid in workers_of(server.home / "jobs" / name):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        new = [line for line in log.read_text()[length:].splitlines() if "| step " in line]
        if new:
            account.resumed_at = int(new[0].split()[2])
            return
        time.sleep(0.1)


def run(
    home: Path,
    *,
    kills: int,
    jobs: int,
    slots: int = 4,
    epochs: int = 10,
    seed: int = 0,
    policy: str = DEFAULT,
    finish_s: float = 300.0,
) -> Account:
    """The whole story; returns the account."""
    chance = random.Random(seed)
    account, server = Account(), Server(home, slots, policy)
    server.start()
    people = threading.Thread(target=submit_all, args=(server, jobs, epochs, 1.0, account), daemon=True)
    try:
        with ProcessWatch(home) as watch:
            people.start()
            time.sleep(2.0)
            for i in range(kills):
                time.sleep(chance.uniform(0.3, 2.5))
                kill_once(server, account, chance)
                if i == kills // 2:
                    kill_all_workers(server, account)
            people.join(timeout=300)
            deadline = time.monotonic() + finish_s
            while time.monotonic() < deadline:
                phases = on_disk(home)
                if all(phases.get(n) not in ("queued", "running") for n in account.accepted):
                    break
                time.sleep(0.5)
        account.most_workers = watch.most_workers
        phases = on_disk(home)
        account.unfinished = [
            f"{n}: {phases.get(n)}" for n in account.accepted if phases.get(n) != "finished"
        ]
        for name in account.accepted:
            lines = (home / "jobs" / name / "output.log").read_text().splitlines()
            account.overlaps += overlapping_runs(lines)
            seen = {int(line.split()[2]) for line in lines if "| step " in line}
            if seen != set(range(1, 16 * epochs + 1)):
                account.missing_steps.append(name)
        return account
    finally:
        server.stop()
        for folder in (home / "jobs").glob("*"):
            for pid in processes_of(folder):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _lines(account: Account, slots: int) -> Iterator[str]:
    back = sorted(account.back_s)
    yield f"control plane killed           {account.kills} times; up in {back[len(back) // 2]:.1f} s (median)"
    yield f"jobs accepted                  {len(account.accepted)}"
    yield f"not finished                   {len(account.unfinished)} {account.unfinished}"
    yield f"steps while it was away        {account.steps_while_away}"
    yield f"stood still while it was away  {account.stalled} of {account.away_with_jobs} times"
    yield f"queue differed after a restart {len(account.queue_changed)} {account.queue_changed}"
    yield f"two runs of a job at once      {account.overlaps}"
    yield f"jobs with steps missing        {len(account.missing_steps)} {account.missing_steps}"
    yield f"most workers at once           {account.most_workers} on {slots} slots"
    yield f"all workers killed             went on from step {account.resumed_at}"


def main() -> None:
    """Run it and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="keep everything there, to look at afterwards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swell-crash-") as folder:
        options = vars(args) | {"home": args.home or Path(folder) / "home"}
        account = run(**options)
    for line in _lines(account, args.slots):
        print(line)
    good = account.clean and account.most_workers <= args.slots
    print("nothing was lost" if good else "SOMETHING WENT WRONG")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
