"""Take the lead from one control plane after another while jobs train and people submit; see what is lost.

    python -m benchmarks.platform.failover [--times 20] [--clients 4] [--seed 0] [--most-s 1200]

Two `swell up --ha` share a home and a real Postgres of their own. In turn the leader is killed with -9,
frozen (SIGSTOP, and continued once the other leads), cut off from its database by a cable that swallows
everything, and stopped in good order. Several clients, who know both addresses, submit all the time.
Checked at the end, with the jobs' own files, /proc and the database as witnesses:

- every submission that was answered is in the store, once; so is every one whose answer was lost;
- no job ran twice at once, a training job made all its steps in the same processes, no slot had two jobs;
- every fencing number wrote from one process only, and numbers only grow along the event log;
- how long it took until the other one led.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.platform.audit import most_slots_held, overlapping_runs
from benchmarks.platform.postgres import PostgresServer
from swell.api.client import Client
from swell.control.errors import Conflict
from swell.domain import Event
from swell.engines.processes import processes_of, workers_of

TOY = Path(__file__).parents[2] / "tests" / "engines" / "toy.py"
UP_S = 180.0
LEAD_S = 120.0
SLOTS = 2
SHORT = """
import os, sys, torch, swell
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
model = torch.nn.Linear(2, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
for _ in job.epochs(1):
    for (x,) in loader:
        job.step(model(x).sum())
"""
WITNESS = """
CREATE TABLE witness (seq BIGINT, number BIGINT, writer TEXT);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO witness SELECT NEW.seq, number, current_setting('application_name') FROM lease;
    RETURN NEW;
END $$;
CREATE TRIGGER note AFTER INSERT ON events FOR EACH ROW EXECUTE FUNCTION note();
"""
"""Has the database itself note who wrote each event, and under which fencing number."""


class Cable:
    """A TCP connection to the database that can be cut: then it stays open and swallows everything."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing through any more, in either direction."""
        self._whole.clear()

    def mend(self) -> None:
        """Let new connections through; those of before are gone."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._whole.set()

    def close(self) -> None:
        """End it."""
        self.mend()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self._whole.wait()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if not self._whole.is_set():
                    continue
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Plane:
    """One `swell up --ha` that can be killed, frozen and continued."""

    def __init__(self, home: Path, store: str, *words: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._home = home
        self._words = ["up", "--ha", "--home", str(home), "--port", str(self.port), *words]
        self._env = {**os.environ, "SWELL_STORE": store}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `wait` until it answers."""
        self._home.mkdir(parents=True, exist_ok=True)
        with (self._home / f"up-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swell", *self._words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._env,
            )

    def wait(self) -> None:
        """Wait until it answers."""
        give_up_s = time.monotonic() + UP_S
        while self.health() is None:
            assert self.process is not None
            if time.monotonic() > give_up_s or self.process.poll() is not None:
                raise RuntimeError((self._home / f"up-{self.port}.log").read_text()[-2000:])
            time.sleep(0.05)

    def health(self, timeout_s: float = 5.0) -> dict[str, Any] | None:
        """What /healthz says; None if it does not say that all is well."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/healthz", timeout=timeout_s) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return None

    @property
    def leads(self) -> bool:
        """Whether it says that it leads."""
        health = self.health()
        return health is not None and health["role"] == "leader"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait for that; if it does not end, kill it."""
        assert self.process is not None
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@dataclass
class Account:
    """What was seen."""

    took_s: dict[str, list[float]] = field(default_factory=dict)
    """By how the lead was lost: seconds until the other one led."""
    keys: dict[str, str] = field(default_factory=dict)
    """Job by idempotency key, as the clients were told."""
    asked: set[str] = field(default_factory=set)
    """Every key that was sent."""
    refused: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    """The longest that a client waited for the answer to a submission."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    ran: int = 0
    two_writers: list[str] = field(default_factory=list)
    numbers: int = 0
    moved: list[str] = field(default_factory=list)
    """Training jobs whose processes changed, or whose steps are not complete."""
    slots: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.doubled or self.two_writers or self.moved or self.slots or self.refused)


def submit_all(
    client: Client, number: int, script: Path, account: Account, stop: threading.Event, pause_s: float
) -> None:
    """Hand in short jobs one after the other, whatever happens to the control planes."""
    for i in itertools.count():
        if stop.wait(pause_s):
            return
        key, began_s = f"client{number}-{i}", time.monotonic()
        account.asked.add(key)
        try:
            view = client.submit(
                script, args=[str(script.parent / key)], name=key, max_workers=1, idempotency_key=key
            )
            account.keys[key] = view.job_id
        except Exception as error:
            account.refused.append(f"{key}: {error!r}")
        account.slowest_s = max(account.slowest_s, time.monotonic() - began_s)


def wait_for(condition: Callable[[], object], most_s: float, what: str) -> float:
    """Wait until a condition holds; returns how long that took."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > most_s:
            raise RuntimeError(f"waited {most_s:g} s for {what}")
        time.sleep(0.05)
    return time.monotonic() - began_s


@dataclass
class Stage:
    """Two control planes, each with its own cable to the database."""

    planes: list[Plane]
    cables: list[Cable]

    def leader(self) -> int:
        """The number of the one that leads."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [i for i, plane in enumerate(self.planes) if plane.leads]
            return bool(found)

        wait_for(look, LEAD_S, "a leader")
        return found[0]

    def take_over(self, kind: str, account: Account) -> None:
        """Take the lead from the leader in one of the ways, then bring it back as a standby."""
        old = self.leader()
        plane, other = self.planes[old], self.planes[1 - old]
        other.wait()
        ways: dict[str, Callable[[], None]] = {
            "kill -9": lambda: plane.end(signal.SIGKILL),
            "frozen": lambda: plane.send(signal.SIGSTOP),
            "cut off": self.cables[old].cut,
            "down": lambda: plane.send(signal.SIGTERM),
        }
        began_s = time.monotonic()
        ways[kind]()
        wait_for(lambda: other.leads, LEAD_S, f"another leader ({kind})")
        account.took_s.setdefault(kind, []).append(time.monotonic() - began_s)
        if kind == "frozen":
            plane.send(signal.SIGCONT)
        elif kind == "cut off":
            self.cables[old].mend()
        else:
            plane.end()
            plane.start()
        plane.wait()
        wait_for(lambda: (plane.health() or {}).get("role") == "standby", LEAD_S, "a standby")


def pids(home: Path, job_id: str) -> set[int]:
    """The processes of a job that train."""
    return set(workers_of(home / "jobs" / job_id))


def run(
    home: Path, *, times: int, clients: int = 4, steps: int = 1600, seed: int = 0, most_s: float = 1200.0
) -> Account:
    """The whole story; returns the account. After `most_s` no further take-over is begun."""
    import psycopg

    account, chance, until_s = Account(), random.Random(seed), time.monotonic() + most_s
    with PostgresServer(tcp=True) as postgres:
        cables = [Cable(postgres.port) for _ in range(2)]
        urls = [f"postgresql://swell@127.0.0.1:{cable.port}/postgres" for cable in cables]
        words = ["--slots", str(SLOTS), "--policy", "afs-l"]
        stage = Stage([Plane(home, url, *words) for url in urls], cables)
        stop, people = threading.Event(), list[threading.Thread]()
        try:
            for plane in stage.planes:
                plane.start()
                plane.wait()
            stage.leader()
            with psycopg.connect(postgres.url, autocommit=True) as witness:
                witness.execute(WITNESS)
            work = home.parent / "work"
            work.mkdir()
            (work / "short.py").write_text(SHORT)
            both = ",".join(plane.url for plane in stage.planes)
            options: dict[str, Any] = {"token": (home / "tokens" / "admin").read_text().strip()}
            admin = Client(both, **options, retry_s=120.0)
            epochs = ["--epochs", str(steps // 16), "--sample-ms", "2"]
            trained = admin.submit(TOY, name="training", args=epochs, max_workers=1).job_id
            wait_for(lambda: pids(home, trained), UP_S, "the training to begin")
            at_first = pids(home, trained)
            for i in range(clients):
                client = Client(both, **options, retry_s=300.0)
                args = (client, i, work / "short.py", account, stop, 1.0)
                people.append(threading.Thread(target=submit_all, args=args, daemon=True))
                people[-1].start()
            kinds = itertools.cycle(["kill -9", "frozen", "cut off", "down"])
            for kind in itertools.islice(kinds, times):
                if time.monotonic() > until_s:
                    break
                time.sleep(chance.uniform(0.2, 1.5))
                stage.take_over(kind, account)
            if admin.job(trained).phase == "running" and pids(home, trained) != at_first:
                account.moved.append(f"{trained}: {sorted(at_first)} became {sorted(pids(home, trained))}")
            stop.set()
            for one in people:
                one.join(timeout=320)
            _settle(admin, account, trained)
            _audit(admin, home, work, account, trained)
            with psycopg.connect(postgres.url) as witness:
                rows = witness.execute("SELECT number, writer FROM witness ORDER BY seq").fetchall()
            _writers([(int(number), str(writer)) for number, writer in rows], account)
            admin.close()
        finally:
            stop.set()
            for plane in stage.planes:
                if plane.process is not None:
                    plane.process.send_signal(signal.SIGCONT)
                    plane.end()
            for cable in cables:
                cable.close()
            for folder in (home / "jobs").glob("*"):
                for pid in processes_of(folder):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
    return account


def _settle(admin: Client, account: Account, trained: str) -> None:
    """Cancel what still waits, then wait until everything is over."""
    for view in [*admin.jobs(phase="queued"), admin.job(trained)]:
        with contextlib.suppress(Conflict):  # it has ended meanwhile
            admin.cancel(view)
    for job_id in [trained, *account.keys.values()]:
        admin.wait(job_id, timeout_s=300)


def _audit(admin: Client, home: Path, work: Path, account: Account, trained: str) -> None:
    """Compare what the clients were told with the store, and the store with what really ran."""
    jobs = {view.job_id: view for view in admin.jobs()}
    by_name = Counter(view.name for view in jobs.values())
    for key in account.asked:
        if account.keys.get(key) not in jobs:
            account.lost.append(key)
        if by_name[key] > 1:
            account.doubled.append(f"{key} is in the store {by_name[key]} times")
    for key, job_id in account.keys.items():
        runs = (work / key).read_text().split() if (work / key).exists() else []
        phase = jobs[job_id].phase.value if job_id in jobs else "lost"
        account.ran += bool(runs)
        if len(runs) > 1:
            account.doubled.append(f"{key} ran {len(runs)} times")
        if phase == "finished" and not runs:
            account.lost.append(f"{key} is {phase} and never ran")
        if phase not in ("finished", "cancelled"):
            account.lost.append(f"{key} is {phase}")
    lines = (home / "jobs" / trained / "output.log").read_text().splitlines()
    made = [line.split("| step ")[1].split() for line in lines if "| step " in line]
    seen, processes = {int(step[0]) for step in made}, {step[4] for step in made}
    if overlapping_runs(lines) or seen != set(range(1, len(seen) + 1)) or len(processes) > 1:
        account.moved.append(f"{trained}: its steps are not those of one run, by {sorted(processes)}")
    events = [Event(e.time_s, e.kind, e.job_id, e.node, e.data) for e in admin.events(since=0, follow=False)]
    try:
        most_slots_held(events, SLOTS)
    except AssertionError as error:
        account.slots = str(error)


def _writers(rows: list[tuple[int, str]], account: Account) -> None:
    """One writer per fencing number, and numbers that only grow."""
    writers: dict[int, set[str]] = {}
    for number, writer in rows:
        writers.setdefault(number, set()).add(writer)
    account.numbers = len(writers)
    account.two_writers = [f"{n}: {sorted(who)}" for n, who in writers.items() if len(who) > 1]
    if [n for n, _ in rows] != sorted(n for n, _ in rows):
        account.two_writers.append("an earlier number wrote after a later one")


def _lines(account: Account) -> Iterator[str]:
    every = [s for took in account.took_s.values() for s in took]
    yield f"fail-overs                  {len(every)}"
    yield f"until the other leads       median {median(every):.1f} s, most {max(every):.1f} s"
    for kind, took in account.took_s.items():
        yield f"  {kind:<25} {', '.join(f'{s:.1f}' for s in sorted(took))} s"
    answered = f"answered {len(account.keys)}; {account.ran} jobs ran"
    yield f"submissions                 {len(account.asked)}, {answered}"
    yield f"slowest answer              {account.slowest_s:.1f} s"
    yield f"refused                     {len(account.refused)} {account.refused[:5]}"
    yield f"lost                        {len(account.lost)} {account.lost[:5]}"
    yield f"doubled                     {len(account.doubled)} {account.doubled[:5]}"
    yield f"fencing numbers that wrote  {account.numbers}; with two writers {account.two_writers}"
    yield f"training disturbed          {account.moved}"
    yield f"slots held twice            {account.slots or 'none'}"


def main() -> None:
    """Run it and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=160_000, help="steps of the job that trains meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=1200.0)
    parser.add_argument("--home", type=Path, help="keep everything there, to look at afterwards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swell-failover-") as folder:
        options = vars(args) | {"home": args.home or Path(folder) / "home"}
        account = run(**options)
    for line in _lines(account):
        print(line)
    print("nothing was lost, nothing doubled" if account.clean else "SOMETHING WENT WRONG")
    sys.exit(0 if account.clean else 1)


if __name__ == "__main__":
    main()
