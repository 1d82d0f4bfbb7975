"""The process that feeds a job's trackers from what the job reports.

    python -m swell.train.track.process JOB_DIRECTORY

It listens to the job's coordinator, as `swell resize` and the engines do. So it needs nothing of the script,
works for every kind of job, and no step ever waits for a tracker. One run per job: what the trackers need to
go on with it and the last step are in tracking.json, which survives resizes, deaths and restarts of the job.
A job that went back to a checkpoint repeats steps; those are left out, so steps never go back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swell.train.agent.client import JobClient
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.polling import readable
from swell.train.agent.regular import read_regular
from swell.train.track.sinks import KINDS, Sink

FILE = "tracking.json"
SHARES = 1000
"""Steps of a job that reports its progress as a share of 1."""


def figures_of(report: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Step and figures of a worker's report; None if it is not the leader's, or has no (sound) progress."""
    done, of, metrics = (report.get(name) for name in ("done", "of", "metrics"))
    if report.get("rank", 0) != 0 or not _is_finite(done) or not _is_finite(of or 0):
        return None
    step = report["step"] if isinstance(report.get("step"), int) else int(done or 0)
    if "step" not in report and of is not None and 0 < of <= 1:
        step = round(done / of * SHARES)
    figures = {name: report[name] for name in ("loss", "lr") if report.get(name) is not None}
    figures |= metrics if isinstance(metrics, Mapping) else {}
    figures["swell/workers"] = report.get("workers") or report.get("world") or 1
    if of:
        figures["swell/progress"] = done / of
    return step, {str(name): float(value) for name, value in figures.items() if _is_finite(value)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and -1e300 < value < 1e300  # an int may be too large for a float


class Tracking:
    """All trackers of one job."""

    def __init__(self, names: list[str], job: str, memory: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = memory, say
        try:
            self._memory: dict[str, Any] = json.loads(read_regular(memory))
        except (OSError, ValueError):
            self._memory = {}
        self._step = int(self._memory.get("step", -1))
        self._last: dict[str, float] = {}
        self._sinks: dict[str, Sink] = {}
        for name in names:
            kind, _, where = name.partition(":")
            mine = self._memory.setdefault(name, {})
            self._try(name, lambda k=kind, w=where, m=mine: self._open(k, w, job, m))  # type: ignore[misc]
        self._remember()

    def _open(self, kind: str, where: str, job: str, memory: dict[str, Any]) -> None:
        self._sinks[f"{kind}:{where}"] = KINDS[kind](where, job, memory)

    def take(self, report: Mapping[str, Any]) -> None:
        """Pass on what a report adds, unless a later step, or this step of an earlier run, was passed on."""
        found = figures_of(report)
        if found is None or found[0] < self._step or (found[0] == self._step and not self._last):
            return
        step, figures = found
        # A metric that was computed once, such as that of an epoch, is repeated in reports: it is one point.
        fresh = {name: value for name, value in figures.items() if self._last.get(name) != value}
        if not fresh:
            return
        self._step, self._last = step, figures
        self._memory["step"] = step
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda s=sink: s.write(step, fresh))  # type: ignore[misc]
        self._remember()

    def end(self, outcome: str) -> None:
        """Close all trackers."""
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda s=sink: s.end(outcome))  # type: ignore[misc]
        self._remember()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Do something with a tracker. One that fails is given up and said so: the training goes on."""
        try:
            call()
        except Exception as error:
            self._sinks.pop(name, None)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"swell: tracking to {name} failed and was given up ({reason}); the job goes on")

    def _remember(self) -> None:
        with contextlib.suppress(OSError):
            new = self._path.with_name(f".{FILE}")
            new.write_text(json.dumps(self._memory))
            new.replace(self._path)


def follow(job: JobDirectory, tracking: Tracking, parent: int) -> str:
    """Pass reports on until the job is over, or the launcher is gone; how it ended."""
    while os.getppid() == parent:
        try:
            with JobClient(job, wait_s=1.0) as client, JobClient(job) as second:
                connection = client.listen()
                status = second.status()  # what came before this process was ready
                for report in (*status["reports"].values(), status["last_report"]):
                    tracking.take(report)
                if status["result"] is not None:
                    return _outcome(status["result"])
                while os.getppid() == parent:
                    if not readable([connection], 1.0):
                        continue
                    for message in connection.pending():
                        if message.get("type") == "report":
                            tracking.take(message["report"])
                        elif message.get("event") == "finish":
                            return _outcome(message)
        except (OSError, TrainError, KeyError, ValueError, TypeError):
            time.sleep(0.1)  # the coordinator is being restarted
    return "stopped"


def _outcome(finish: Mapping[str, Any]) -> str:
    return "failed" if int(finish["code"]) else "stopped" if finish["reason"] == "stopped" else "finished"


def main() -> None:
    """Track the job whose directory is given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    parent, job = os.getppid(), JobDirectory(Path(sys.argv[1]))
    config = job.config()
    home = Path(config.checkpoints).parent if config.checkpoints else job.path

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    tracking = Tracking(list(config.track), config.name, home / FILE, say)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the launcher is to end the job
    outcome = "failed"
    try:
        outcome = follow(job, tracking, parent)
    finally:
        tracking.end(outcome)


if __name__ == "__main__":
    main()
