"""The platform of the soak: a control plane in a home of its own, and its processes as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.platform.crash import Server
from swell.engines import groups
from swell.engines.processes import MARK, is_worker

DISK_BYTES = 256 << 20
SLOTS = 4
_KINDS = {
    "supervisor": (b"swell.engines.supervisor", "swell-superviso"),
    "coordinator": (b"swell.train.agent.coordinator", "swell-coordinat"),
    "zygote": (b"swell.train.start.zygote", "swell-zygote"),
}


@dataclass
class Stage:
    """A folder with a home, on a small disk of its own where that can be mounted, and a place for scripts."""

    seed: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="swell-soak-")))
    own_disk: bool = False
    no_disk: str = ""
    """Why the home has no disk of its own."""

    def __post_init__(self) -> None:
        self.home, self.work = self.folder / "home", self.folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.home)],
            capture_output=True,
            text=True,
        )
        self.own_disk, self.no_disk = done.returncode == 0, done.stderr.strip()
        self.server = Server(self.home, SLOTS, "afs-l")
        self.up_since_s = time.monotonic()
        self.lock = threading.RLock()
        """Held while the control plane is killed, frozen or started, so that nobody does two at once."""

    # -- the control plane -------------------------------------------------------------------------------

    def start(self, until_s: float) -> float:
        """Start the control plane; on a full disk it may take several attempts. Returns how long it took."""
        began_s = time.monotonic()
        with self.lock:
            while True:
                try:
                    self.server.start()
                    self.up_since_s = time.monotonic()
                    return self.up_since_s - began_s
                except RuntimeError:
                    self.server.kill()
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(1.0)

    @property
    def pid(self) -> int | None:
        """The control plane's process."""
        process = self.server._process
        return None if process is None or process.poll() is not None else process.pid

    def accepted(self) -> dict[str, tuple[str, str]]:
        """Id, name and phase of every job in the store, in order of submission."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home / 'store.db'}?mode=ro", uri=True)) as store:
            rows = store.execute(
                "SELECT job_id, json_extract(record, '$.request.name'), phase FROM jobs ORDER BY submitted_s"
            )
            return {job_id: (name, phase) for job_id, name, phase in rows}

    # -- processes ---------------------------------------------------------------------------------------

    def processes(self) -> dict[int, tuple[str, str]]:
        """Every process of this platform's jobs, with the job's id and its kind."""
        start = f"{MARK}={self.home.resolve()}/jobs/".encode()
        found = {}
        for pid in _pids():
            for entry in read(pid, "environ").split(b"\0"):
                if entry.startswith(start):
                    found[pid] = (entry.removeprefix(start).decode(errors="replace"), _kind(pid))
        return found

    def nursery(self) -> int | None:
        """The nursery: a child of the control plane."""
        mine = self.pid
        for pid in _pids():
            if b"swell.engines.nursery" in read(pid, "cmdline") and _parent(pid) == mine:
                return pid
        return None

    @property
    def naps(self) -> str:
        """A second argument of `sleep`: it tells what hostile jobs of this platform left from any other."""
        return f"0.{zlib.crc32(str(self.home).encode()):010}"

    def sleepers(self) -> list[int]:
        """The processes without an environment that hostile jobs have left."""
        words = f"sleep\0900\0{self.naps}\0".encode()
        return [pid for pid in _pids() if read(pid, "cmdline") == words]

    def strays(self) -> list[str]:
        """What is still alive of the jobs: by mark, by group, or by the words of what hostile jobs leave."""
        left = {pid: f"{kind} of {job_id}" for pid, (job_id, kind) in self.processes().items()}
        left |= dict.fromkeys(self.sleepers(), "a process that shed its environment")
        for job in (self.home / "jobs").glob("*"):
            for group in groups.of(job):
                left |= dict.fromkeys(group.members(), f"in a group of {job.name}")
        return [f"{pid} ({what}: {read(pid, 'cmdline')[:80]!r})" for pid, what in left.items()]

    def close(self) -> None:
        """End what the soak started, and nothing else; give the disk back."""
        with contextlib.suppress(Exception):
            self.server.stop()
        for pid in [*self.processes(), *self.sleepers()]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for job in (self.home / "jobs").glob("*"):
            for group in groups.of(job):
                group.kill()
        if self.own_disk:
            until_s = time.monotonic() + 10.0
            while subprocess.run(["umount", str(self.home)], capture_output=True).returncode:
                if time.monotonic() > until_s:
                    subprocess.run(["umount", "-l", str(self.home)], capture_output=True)
                    break
                time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)


def read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def rss_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    found = re.search(rb"VmRSS:\s+(\d+)", read(pid, "status"))
    return int(found[1]) / 1024 if found else 0.0


def descriptors(pid: int) -> int:
    """Open files of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    with contextlib.suppress(ValueError, IndexError):
        return int(read(pid, "stat").rpartition(b")")[2].split()[1])
    return 0


def _kind(pid: int) -> str:
    if is_worker(pid):
        return "worker"
    command, name = read(pid, "cmdline"), read(pid, "comm").decode(errors="replace").strip()
    for kind, (module, short) in _KINDS.items():
        if module in command or name == short:
            return kind
    return "other"
