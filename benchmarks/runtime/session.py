"""One `swell run` in a process of its own, with a client to resize, watch and hurt it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from swell.train.agent.client import JobClient
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory


class Session:
    """A job under way. Leaving the context ends it, whatever state it is in."""

    def __init__(
        self,
        home: Path,
        script: Path,
        arguments: list[str],
        *,
        workers: str = "1:3",
        start: int = 1,
        spares: int = 0,
        name: str = "job",
        threads: int = 1,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`prefix` goes before the command, say `("unshare", "-m", "sh", "-c", ...)`."""
        self.directory = home / "jobs" / name
        self.log = home / f"{name}.log"
        home.mkdir(parents=True, exist_ok=True)
        command = [
            *prefix,
            sys.executable, "-c", "from swell.cli import main; main()", "run", "--workers", workers,
            "--start", str(start), "--spares", str(spares), "--threads", str(threads), "--name", name,
            str(script), *arguments,
        ]  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "SWELL_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(15)

    @property
    def running(self) -> bool:
        """Whether the launcher is still there."""
        return self.process.poll() is None

    def status(self, wait_s: float = 10.0) -> dict[str, Any] | None:
        """The coordinator's view, or None when the job is over (or does not answer in time)."""
        with (
            contextlib.suppress(OSError, TrainError, ValueError),
            JobClient(JobDirectory(self.directory), wait_s=wait_s if self.running else 0.0) as client,
        ):
            return client.status()
        return None

    def resize(self, workers: int) -> bool:
        """Ask for that many workers; False if the job is over."""
        with (
            contextlib.suppress(OSError, TrainError, ValueError),
            JobClient(JobDirectory(self.directory), wait_s=2.0) as client,
        ):
            client.resize(workers)
            return True
        return False

    def kill_workers(self, status: dict[str, Any], *, one: bool = False) -> int:
        """Kill -9 all workers of a status (spares included), or the last member only; how many."""
        names = status["members"][-1:] if one else list(status["pids"])
        killed = 0
        for name in names:
            pid = status["pids"].get(name)
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        return killed

    def until(
        self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 120.0
    ) -> dict[str, Any] | None:
        """Wait until the status fulfils `condition`; None if the job ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status() if self.running else None
            if status is None and not self.running:
                return None
            if status is not None and condition(status):
                return status
            time.sleep(0.02)
        raise TimeoutError(f"waited {timeout_s:g} s; see {self.log}")

    def wait(self, timeout_s: float = 300.0) -> int:
        """The job's exit code."""
        return self.process.wait(timeout_s)

    def output(self) -> str:
        """Everything the launcher and the workers said."""
        logs = sorted((self.directory / "logs").glob("*.log")) if self.directory.exists() else []
        return "\n".join(path.read_text(errors="replace") for path in [self.log, *logs])


def print_figures(what: str, measure: Callable[[bool], dict[str, Any]]) -> None:
    """The command line of a benchmark by itself: `measure` (quickly or not), print, and write if asked to."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(measure(options.quick), indent=1)
    if options.out:
        options.out.write_text(text)
    print(text)
