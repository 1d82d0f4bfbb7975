"""What is done to the platform: kills, frozen processes, full disks, restarts, hostile jobs, strangers.

Every harm is one method of `Harm` whose name begins with `do_`. It does its damage and returns a word for the
count, or None if there was nothing to damage. What has to be undone later is undone by a timer.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak.scripts import HOSTILE
from benchmarks.soak.stage import SLOTS, Stage
from benchmarks.soak.vandal import remove
from swell.api.client import Client
from swell.cli.safekeeping import bring_back, save

WEIGHTS = {
    "kill": 8,
    "freeze": 4,
    "resize": 8,
    "pause": 2,
    "policy": 1,
    "hostile": 3,
    "stranger": 6,
    "disk": 1,
    "plane": 1,
    "nursery": 1,
    "vandal": 2,
    "backup": 1,
}
POLICIES = ("afs-l", "elasticflow", "tiresias", "fifo:backfill=true", "tide")
MOST_HOSTILE = 4
"""Hostile jobs that are there at a time."""
MOST_PLANE_FREEZE_S = 3.0
FREE_BYTES = 32 << 20
"""No backup is written to a fuller disk."""
_FILLER = "filler"


class Harm:
    """Draws harms from a seed, and keeps count of them."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.chance = random.Random(seed)
        self.count: Counter[str] = Counter()
        self.hostile: list[str] = []
        """Ids of hostile jobs that were accepted."""
        self.bad_backups: list[str] = []
        """What was wrong with backups."""
        self.keys = 0
        """Hostile jobs that were submitted."""
        self.back_s: list[float] = []
        """How long each restart of the control plane took."""
        self.sparing_plane = False
        """Set while memory is measured: the control plane is then neither killed nor frozen."""
        self.told = stage.work / "told"
        self._undo: dict[threading.Timer, Callable[[], None]] = {}
        """What has to be undone, each by a timer: a request to a frozen control plane would wait for ever."""
        self._frozen: set[int] = set()
        self._sockets: list[socket.socket] = []
        self._full = False

    def one(self) -> None:
        """Do one harm drawn at random."""
        (kind,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        done = getattr(self, f"do_{kind}")()
        if done is not None:
            self.count[done] += 1

    def stolen(self) -> list[str]:
        """What thieves could read."""
        path = self.told.with_suffix(".stolen")
        return list(json.loads(path.read_text())) if path.exists() else []

    # -- processes ---------------------------------------------------------------------------------------

    def do_kill(self) -> str | None:
        """Kill one process of one job, or all workers of one."""
        by_kind: dict[str, dict[str, list[int]]] = {}
        for pid, (job_id, kind) in self.stage.processes().items():
            for name in (kind, "all workers") if kind == "worker" else (kind,):
                by_kind.setdefault(name, {}).setdefault(job_id, []).append(pid)
        by_kind.pop("other", None)
        if not by_kind:
            return None
        kind = self.chance.choice(sorted(by_kind))
        pids = by_kind[kind][self.chance.choice(sorted(by_kind[kind]))]
        for pid in pids if kind == "all workers" else [self.chance.choice(sorted(pids))]:
            _send(pid, signal.SIGKILL)
        return f"killed: {kind}"

    def do_freeze(self) -> str | None:
        """Stop a process, and let it go on after a while."""
        by_kind: dict[str, list[int]] = {}
        for pid, (_, kind) in self.stage.processes().items():
            by_kind.setdefault(kind, []).append(pid)
        by_kind.pop("other", None)
        if "worker" not in by_kind:
            return None
        nursery, plane = self.stage.nursery(), self.stage.pid
        if nursery is not None:
            by_kind["nursery"] = [nursery]
        if plane is not None and not self.sparing_plane:
            by_kind["control plane"] = [plane]
        kind = self.chance.choice(sorted(by_kind))
        pid = self.chance.choice(sorted(by_kind[kind]))
        _send(pid, signal.SIGSTOP)
        self._frozen.add(pid)
        longest_s = MOST_PLANE_FREEZE_S if pid == plane else 9.0
        self._later(self.chance.uniform(0.5, longest_s), lambda: self._thaw(pid))
        return f"frozen: {kind}"

    def _thaw(self, pid: int) -> None:
        _send(pid, signal.SIGCONT)
        self._frozen.discard(pid)

    def _training(self) -> bool:
        """Whether a job trains. On a slow machine a platform that only ever starts would not be disturbed."""
        return any(kind == "worker" for _, kind in self.stage.processes().values())

    def do_nursery(self) -> str | None:
        """Kill the process that supervisors are forked from."""
        pid = self.stage.nursery()
        if pid is None or not self._training():
            return None
        _send(pid, signal.SIGKILL)
        return "killed: nursery"

    def do_plane(self, *, training: bool = True) -> str | None:
        """Kill the control plane with -9, and start it again later; by default only if a job trains."""
        with self.stage.lock:
            if self.sparing_plane or self.stage.pid is None or (training and not self._training()):
                return None
            self.stage.server.kill()
        self._later(self.chance.uniform(0.0, 4.0), self.bring_back)
        return "killed: control plane"

    def bring_back(self) -> None:
        """Start the control plane if it is down, with room on the disk."""
        with self.stage.lock:
            if self.stage.pid is None:
                self.back_s.append(self.stage.start(time.monotonic() + 120.0))

    # -- people ------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[Client], Any]) -> Any:
        """Ask the control plane; None if it is down or refuses."""
        with contextlib.suppress(Exception), self.stage.server.client(retry_s=0.0) as client:
            return call(client)
        return None

    def _job(self, *phases: str) -> str | None:
        jobs = self._ask(lambda client: client.jobs(limit=50)) or []
        found = sorted(job.job_id for job in jobs if job.phase.value in phases)
        return self.chance.choice(found) if found else None

    def do_resize(self) -> str | None:
        """Bound a job's workers by hand."""
        job_id, most = self._job("running", "queued"), self.chance.choice([1, 2, 3, SLOTS, None])
        if job_id is None:
            return None
        done = self._ask(lambda client: client.scale(job_id, 1, most))
        return None if done is None else "bounds changed"

    def do_pause(self) -> str | None:
        """Pause a job, and let it go on after a while."""
        job_id = self._job("running", "queued")
        if job_id is None or self._ask(lambda client: client.pause(job_id)) is None:
            return None
        self._later(self.chance.uniform(0.1, 6.0), lambda: self._ask(lambda client: client.resume(job_id)))
        return "paused and resumed"

    def do_policy(self) -> str | None:
        """Switch the policy; not while memory is measured, because another policy is more code."""
        if self.sparing_plane:
            return None
        name = self.chance.choice(POLICIES)
        return None if self._ask(lambda client: client.set_policy(name)) is None else "policy changed"

    def do_hostile(self) -> str | None:
        """Submit a hostile job; most are cancelled after a while."""
        return self._hostile(self.chance.choice(sorted(HOSTILE)))

    def do_vandal(self) -> str | None:
        """Submit a job that changes every byte of its directory, again and again."""
        return self._hostile("vandal")

    def _hostile(self, kind: str) -> str | None:
        jobs = self._ask(lambda client: client.jobs(limit=200)) or []
        there = [job for job in jobs if job.name.startswith("hostile") and job.ended_s is None]
        if len(there) >= MOST_HOSTILE:
            return None
        script = self.stage.work / f"{kind}.py"
        script.write_text(HOSTILE[kind])
        self.keys += 1
        key = f"hostile-{kind}-{self.keys}"
        args = [
            str(self.told),
            self.stage.naps,
            str(self.chance.randrange(1 << 32)),
            str(self.stage.pid or 1),
        ]
        job = self._ask(
            lambda client: client.submit(script, name=key, args=args, max_workers=1, idempotency_key=key)
        )
        if job is None:
            return None
        self.hostile.append(job.job_id)
        if kind != "vandal":  # that one ends by itself
            self._later(self.chance.uniform(4.0, 15.0), lambda: self._cancel(job.job_id))
        return f"hostile job: {kind}"

    def _cancel(self, job_id: str) -> None:
        self._ask(lambda client: client.cancel(job_id))

    @property
    def variants(self) -> int:
        """How often vandals have changed their directories."""
        path = Path(f"{self.told}.variants")
        return path.stat().st_size if path.exists() else 0

    def do_backup(self) -> str | None:
        """Write a backup, and bring it back in another home: no job may spoil what it has of the others."""
        file, new = self.stage.work / "backup.tar", self.stage.folder / "restored"
        if shutil.disk_usage(self.stage.home).free < FREE_BYTES:
            return None
        try:
            saved = save(self.stage.home, file)
            back = bring_back(new, file, paused=False, new_tokens=False, force=False)
            lacking = [job for job in {**saved.left_out, **back.left_out} if job.startswith("honest")]
            self.bad_backups += [f"a backup lacks what {job} has saved" for job in lacking]
        except Exception as error:
            if shutil.disk_usage(self.stage.home).free >= FREE_BYTES:
                self.bad_backups.append(repr(error))
            return None
        finally:
            remove(new)
        return "backup"

    # -- strangers ---------------------------------------------------------------------------------------

    def do_stranger(self) -> str | None:
        """Nonsense, half a request or silence, at the API's port or at a job's."""
        ports = self._ports()
        if not ports:
            return None
        kind = self.chance.choice(["nonsense", "half a request", "silence", "token"])
        for _ in range(self.chance.randrange(1, 30)):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", self.chance.choice(ports)), timeout=1.0)
                self._sockets.append(sock)
                body = self.chance.randbytes(self.chance.randrange(300))
                if kind == "nonsense":
                    length = self.chance.choice([len(body), self.chance.randrange(1 << 32)])
                    sock.sendall(struct.pack("!I", length) + body)
                elif kind == "half a request":
                    sock.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n")
                elif kind == "token":
                    secret = secrets.token_urlsafe(32).encode()
                    sock.sendall(
                        b"GET /v1/jobs HTTP/1.1\r\nAuthorization: Bearer swell_" + secret + b"\r\n\r\n"
                    )
        while len(self._sockets) > 60:
            self._sockets.pop(0).close()
        return f"stranger: {kind}"

    def _ports(self) -> list[int]:
        found = []
        for path in [
            *self.stage.home.glob("jobs/*/runs/*/coordinator.json"),
            self.stage.home / "server.json",
        ]:
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(path.read_text())
                found.append(int(said["port"]) if "port" in said else int(said["url"].rpartition(":")[2]))
        return found[-8:]

    # -- the disk ----------------------------------------------------------------------------------------

    def do_disk(self) -> str | None:
        """Fill the disk of the home, and make room after a while."""
        if not self.stage.own_disk or self._full:
            return None
        self._full = True
        with contextlib.suppress(OSError), (self.stage.home / _FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 16))
        self._later(self.chance.uniform(2.0, 10.0), self._empty_disk)
        return "disk full"

    def _empty_disk(self) -> None:
        (self.stage.home / _FILLER).unlink(missing_ok=True)
        self._full = False

    # -- the end -----------------------------------------------------------------------------------------

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        def due() -> None:
            self._undo.pop(timer, None)
            what()

        timer = threading.Timer(after_s, due)
        timer.daemon = True
        self._undo[timer] = what
        timer.start()

    def settle(self) -> None:
        """Undo everything: thaw, empty the disk, bring the control plane back, end hostile jobs."""
        for pid in list(self._frozen):
            self._thaw(pid)
        self._empty_disk()
        for timer, what in list(self._undo.items()):
            timer.cancel()
            what()
        for sock in self._sockets:
            sock.close()
        self.bring_back()
        with self.stage.server.client() as client:
            for job in client.jobs():
                if job.ended_s is None and job.name.startswith("hostile"):
                    client.cancel(job.job_id)
                elif job.phase.value == "paused":
                    client.resume(job.job_id)
                if job.ended_s is None and job.name.startswith("honest"):
                    with contextlib.suppress(Exception):
                        client.scale(job.job_id, 1, None)


class Watch(threading.Thread):
    """Looks at the platform every half second: memory, descriptors, supervisors, answers."""

    EVERY_S = 0.5

    def __init__(self, stage: Stage) -> None:
        super().__init__(daemon=True)
        self.stage = stage
        self.over = threading.Event()
        self.seen: list[tuple[float, int, float, int]] = []
        """Moment, process, MiB and descriptors of the control plane."""
        self.alone = False
        """Set once the control plane is neither killed nor frozen any more: answers are timed from then."""
        self.answers_ms: list[float] = []
        self.twice: list[str] = []
        """Jobs that had two supervisors in two looks in a row."""
        self.most_workers = 0
        """The most workers of honest jobs in one look."""

    def run(self) -> None:
        """Until `over` is set."""
        from benchmarks.platform.audit import supervisors, workers
        from benchmarks.soak.stage import descriptors, rss_mib

        before: set[str] = set()
        while not self.over.wait(self.EVERY_S):
            pid = self.stage.pid
            if pid is not None:
                self.seen.append((time.monotonic(), pid, rss_mib(pid), descriptors(pid)))
            now = {job_id for job_id, many in supervisors(self.stage.home).items() if many > 1}
            self.twice += sorted(now & before)
            before = now
            honest = [
                many for job_id, many in workers(self.stage.home).items() if job_id.startswith("honest")
            ]
            self.most_workers = max(self.most_workers, sum(honest))
            began_s = time.perf_counter()
            with contextlib.suppress(Exception), self.stage.server.client(retry_s=0.0) as client:
                client.jobs(limit=20)
                if self.alone:
                    self.answers_ms.append((time.perf_counter() - began_s) * 1e3)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
