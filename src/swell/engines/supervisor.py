"""One job's own process under the local engine: holds the job's lock, runs its launcher, keeps its exit code.

    python -m swell.engines.supervisor JOB_DIRECTORY

It is a session of its own, so it and the job outlive the control plane. The lock makes sure that a job never
runs twice at once, whoever starts it: a second supervisor finds it taken and leaves.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from swell.train.jobdir import JobDirectory
from swell.train.launcher import Launcher, RunConfig

STOPPED = "stopped"
"""Reason of a job that was asked to stop and saved its state."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a small file atomically, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_locked(directory: Path) -> bool:
    """Whether a supervisor of the job is alive."""
    try:
        with (directory / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except FileNotFoundError:
        return False


def supervise(directory: Path) -> int:
    """Run the job that `directory` describes to its end; returns its exit code."""
    with (directory / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # it runs already
        order = json.loads((directory / "start.json").read_text())
        (directory / "exit.json").unlink(missing_ok=True)
        run_dir = directory / "runs" / f"{order['run']:04d}"
        with (directory / "output.log").open("a") as output:
            code, reason = _run(order, directory, run_dir, output)
        write_json(directory / "exit.json", {"code": code, "reason": reason, "time_s": time.time()})
        return code


def _run(order: dict[str, Any], directory: Path, run_dir: Path, output: TextIO) -> tuple[int, str]:
    def say(line: str) -> None:
        output.write(line + "\n")
        output.flush()

    os.chdir(order["workdir"])
    try:
        config = RunConfig(
            script=order["command"][0],
            arguments=order["command"][1:],
            minimum=1,
            maximum=order["max_workers"],
            workers=order["workers"],
            name=order["job_id"],
            directory=run_dir,
            threads=1,
            env=order["env"],
            settings={
                "auto": order["auto"],
                "checkpoints": str(directory / "checkpoints"),
                "checkpoint_s": order["checkpoint_s"],
            },
        )
        launcher = Launcher(config, say)
    except (ValueError, OSError) as error:
        say(str(error))
        return 2, str(error)
    code = launcher.run()
    finish = [e for e in JobDirectory(run_dir).events() if e.get("event") == "finish"]
    reason = str(finish[-1].get("reason", "")) if finish else "ended by a signal"
    if code > 0:
        reason = _last_error(run_dir) or reason
    return code, reason


def _last_error(run_dir: Path) -> str:
    """The last line of the traceback of whichever worker failed first."""
    errors = sorted((run_dir / "logs").glob("*.error"), key=lambda path: path.stat().st_mtime)
    for path in errors:
        lines = path.read_text().strip().splitlines()
        if lines:
            return lines[-1][:300]
    return ""


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1])))
