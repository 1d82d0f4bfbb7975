"""A job's directory: its settings, address, saved membership, events and logs.

job.json          settings and secret (readable by the owner only)
coordinator.json  where the coordinator listens
state.json        what the coordinator must remember
generation.json   of a job that runs any program: the number of its generation, and its workers by rank
save-0001         the file that tells the workers of generation 1 of such a job to save their state and end
events.jsonl      what happened
logs/w0.log       a worker's output
checkpoints/      saved training states
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swell.train.agent.errors import TrainError
from swell.train.agent.protocol import JobFile, plain, read
from swell.train.agent.regular import read_regular

MOST_HISTORY_BYTES = 32 << 20


def home() -> Path:
    """Where jobs live: $SWELL_HOME, or ~/.swell."""
    return Path(os.environ.get("SWELL_HOME", Path.home() / ".swell"))


def own_host(config: JobFile) -> str:
    """The address of this process's own host, which may be another than the coordinator's."""
    return os.environ.get("SWELL_HOST") or config.listens_at


class JobDirectory:
    """Paths and small files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events = path / "events.jsonl"

    @classmethod
    def create(cls, path: Path, config: JobFile | Mapping[str, Any]) -> JobDirectory:
        """Make the directory ready for a run with these settings; checkpoints of earlier runs stay."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
        self = cls(path)
        launcher = self.lock("launcher", 0.5)
        try:
            self._begin(plain(config))
        except BaseException:
            os.close(launcher)  # the next attempt takes it again
            raise
        return self

    def _begin(self, config: dict[str, Any]) -> None:
        path = self.path
        coordinator = self.lock("coordinator", 5.0)  # wait for the coordinator of a killed run to end
        os.close(coordinator)
        for old in ("state.json", "coordinator.json", "events.jsonl", "generation.json"):
            (path / old).unlink(missing_ok=True)
        for old_file in (*path.glob("save-*"), *path.glob("master-*")):
            old_file.unlink()
        for log in (path / "logs").iterdir():
            log.unlink()
        shutil.rmtree(path / "private", ignore_errors=True)
        self._write("job.json", json.dumps(config, indent=1))

    @classmethod
    def find(cls, name: str) -> JobDirectory:
        """The directory of a job given by name or path."""
        for path in (home() / "jobs" / name, Path(name)):
            if (path / "job.json").exists():
                return cls(path)
        known = sorted(p.parent.name for p in (home() / "jobs").glob("*/job.json"))
        hint = f"; known jobs: {', '.join(known[-10:])}" if known else ": 'swell run --name NAME' starts one"
        raise TrainError(f"there is no job {name!r} here{hint}")

    def lock(self, role: str, wait_s: float) -> int:
        """Be the only process in this role for the job, until the returned descriptor is closed."""
        descriptor = os.open(self.path / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise TrainError(
                        f"job {self.path.name!r} is running already; choose another --name, or stop it first"
                    ) from None
                time.sleep(0.02)

    def config(self) -> JobFile:
        """The job's settings; Refused (a ValueError) if they are none."""
        return read(JobFile, json.loads(read_regular(self.path / "job.json")))

    def write_address(self, host: str, port: int, pid: int) -> None:
        """Write down where the coordinator listens."""
        self._write("coordinator.json", json.dumps({"host": host, "port": port, "pid": pid}))

    def address(self, wait_s: float = 0.0) -> tuple[str, int]:
        """Where the coordinator listens; ConnectionError if that is not known yet."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                data = json.loads(read_regular(self.path / "coordinator.json"))
                return str(data["host"]), int(data["port"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
                if time.monotonic() >= deadline:
                    raise ConnectionError("the coordinator does not listen yet; try again") from None
                time.sleep(0.01)

    def begin_generation(self, number: int, members: list[str]) -> None:
        """Write down who is in this generation of a job that runs any program."""
        self._write("generation.json", json.dumps({"number": number, "members": members}))

    def current_generation(self) -> tuple[int, list[str]]:
        """Number and members of the generation that began last."""
        data = json.loads(read_regular(self.path / "generation.json"))
        return int(data["number"]), [str(name) for name in data["members"]]

    def save_file(self, number: int) -> Path:
        """The file whose existence asks the workers of this generation to save and end."""
        return self.path / f"save-{number:04d}"

    def ask_to_save(self, number: int) -> None:
        """Ask the workers of this generation to save and end; on a full disk they are ended unasked later."""
        with contextlib.suppress(OSError):
            self.save_file(number).touch()

    def rendezvous_file(self, number: int) -> Path:
        """The file in which rank 0 of this generation says where the other ranks may meet it."""
        return self.path / f"master-{number:04d}"

    def write_rendezvous(self, number: int, host: str, port: int) -> None:
        """Say where ranks of this generation may meet."""
        self._write(self.rendezvous_file(number).name, f"{host} {port}")

    def load_state(self) -> dict[str, Any] | None:
        """The coordinator's saved state, or None for a job that never ran."""
        try:
            data: dict[str, Any] = json.loads((self.path / "state.json").read_text())
        except FileNotFoundError:
            return None
        return data

    def save_state(self, text: str) -> None:
        """Replace the coordinator's saved state atomically."""
        self._write("state.json", text)

    def append_event(self, record: dict[str, Any]) -> None:
        """Add a line to the job's history; left out on a full disk, or if the history is too long."""
        with contextlib.suppress(OSError), self._events.open("a") as file:
            if file.tell() < MOST_HISTORY_BYTES:
                file.write(json.dumps(record) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """The job's history so far."""
        try:
            lines = self._events.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]  # a full disk cuts a line

    def log(self, worker: str) -> Path:
        """The file with a worker's output."""
        return self.path / "logs" / f"{worker}.log"

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(self.path / name)
