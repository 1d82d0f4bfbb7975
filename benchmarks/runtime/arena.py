"""Plays random schedules of joins, leaves, kills and restarts against real jobs, and checks exactly once.

    echo '{"workers": 2, "events": [[0.2, "kill", 0]]}' | python -m benchmarks.runtime.arena

One prepared process serves all schedules, so a schedule takes a second or two. Events, each after a delay:

    resize N       kill I (the I-th member)      kill_all      coordinator      freeze I      restart
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.stage import Stage
from swell.train.agent.client import JobClient
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory

SCRIPT = Path(__file__).with_name("counting.py")
MAXIMUM = 4


class Arena:
    """Runs jobs one after the other from one prepared process."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="swell-arena-"))
        self._stage = Stage()
        self._played = 0

    def close(self) -> None:
        """End the prepared process and remove everything."""
        self._stage.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def play(self, schedule: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """Run one schedule; what went wrong is in `problem` (None: every sample exactly once)."""
        self._played += 1
        directory = self._root / f"job{self._played}"
        out = self._root / f"out{self._played}.json"
        begin = time.monotonic()
        deadline = begin + timeout_s
        launcher = self._launch(schedule, directory, out)
        log: list[str] = []
        try:
            for delay_s, kind, argument in schedule.get("events", []):
                time.sleep(delay_s)
                if out.exists() or time.monotonic() > deadline:
                    break
                if kind == "restart":
                    os.kill(launcher, signal.SIGKILL)
                    self._stage.wait(launcher, 10.0)
                    self._until_quiet(directory)
                    launcher = self._launch(schedule, directory, out)
                else:
                    with contextlib.suppress(OSError, TrainError, ValueError):
                        log.append(self._event(directory, kind, argument))
            code = self._stage.wait(launcher, max(deadline - time.monotonic(), 0.02))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL)
        problem = self._check(schedule, out, code)
        result = {"problem": problem, "wall_s": round(time.monotonic() - begin, 2), "done": log}
        if problem is not None:
            logs = {p.name: p.read_text()[-3000:] for p in (directory / "logs").iterdir()}
            result |= {"events": JobDirectory(directory).events(), "logs": logs}
        shutil.rmtree(directory, ignore_errors=True)
        return result

    def _launch(self, schedule: dict[str, Any], directory: Path, out: Path) -> int:
        names = ("samples", "batch", "epochs", "pace", "checkpoint_every", "mode", "loader_workers")
        arguments = ["--out", str(out)]
        for name in (*names, "micro_batch"):
            if name in schedule:
                arguments += [f"--{name.replace('_', '-')}", str(schedule[name])]
        return self._stage.launch(
            directory,
            script=str(SCRIPT),
            arguments=arguments,
            minimum=1,
            maximum=MAXIMUM,
            workers=schedule.get("workers", 2),
            silent_after_s=schedule.get("silent_after_s", 1.0),
            gather_s=0.2,
            threads=1,
        )

    def _event(self, directory: Path, kind: str, argument: int) -> str:
        with JobClient(JobDirectory(directory), wait_s=2.0) as client:
            status = client.status()
            members = [m for m in status["members"] if m in status["pids"]]
            if kind == "resize":
                client.resize(argument)
            elif kind in ("kill", "freeze") and members:
                number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                os.kill(status["pids"][members[argument % len(members)]], number)
            elif kind == "kill_all":
                for pid in status["pids"].values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            elif kind == "coordinator":
                data = json.loads((directory / "coordinator.json").read_text())
                os.kill(int(data["pid"]), signal.SIGKILL)
            return f"{kind} {argument} at step {status['step']} with {len(members)}"

    def _until_quiet(self, directory: Path) -> None:
        """The workers of a killed launcher end by themselves; nobody may be left when the next one starts."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and _alive(directory):
            time.sleep(0.01)

    def _check(self, schedule: dict[str, Any], out: Path, code: int | None) -> str | None:
        if code is None:
            return "it did not end in time"
        if code != 0:
            return f"exit code {code}"
        if not out.exists():
            return "it ended well but without a result"
        weight = json.loads(out.read_text())["weight"]
        return check_counts(weight, schedule.get("samples", 50), schedule.get("batch", 16))


def check_counts(weight: list[list[float]], samples: int, batch: int) -> str | None:
    """What is wrong with the counts: each entry must be one use in a step of its size."""
    rest = samples % batch
    expected = sorted([1 / batch] * (samples - rest) + [1 / rest if rest else 0] * rest)
    for epoch, row in enumerate(weight):
        if sorted(row) != expected:
            odd = {i: w for i, w in enumerate(row) if w not in expected}
            return f"epoch {epoch}: samples not used exactly once: {odd or row}"
    return None


def _alive(directory: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                if link.readlink().is_relative_to(directory):
                    return True
    return False


def main() -> None:
    """Play the schedules on stdin, one JSON object per line; one result per line on stdout."""
    arena = Arena()
    try:
        for line in sys.stdin:
            print(json.dumps(arena.play(json.loads(line))), flush=True)
    finally:
        arena.close()


if __name__ == "__main__":
    main()
