"""A platform with a job that means harm beside an honest one: prints, as JSON, what became of both.

    python -m tests.engines.attacked HOME [--no-wall] [--run-as ACCOUNT]

`tests/engines/test_wall.py` runs it under several accounts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from swell.cli._platform import prepare
from swell.domain import JobRequest
from swell.engines import Launch
from swell.engines.local import LocalSite
from swell.engines.processes import processes_of
from swell.engines.supervised import SupervisedEngine

ATTACKER = Path(__file__).with_name("attacker.py")
PATIENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--no-wall", action="store_true")
    parser.add_argument("--run-as")
    options = parser.parse_args()
    home: Path = options.home
    prepare(home, pass_through=options.run_as is not None)
    outside = subprocess.Popen(["sleep", "298"], stdout=subprocess.DEVNULL, start_new_session=True)
    made = {"walled": not options.no_wall, "run_as": options.run_as}
    try:
        print(json.dumps(_attacked(home, outside.pid, made)))
    finally:
        outside.kill()
        for job in ("victim", "attacker"):
            for pid in processes_of(home / "jobs" / job):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _attacked(home: Path, outside: int, made: dict[str, Any]) -> dict[str, Any]:
    before = _facts(outside)
    first = _engine(home, made)
    victim = _launch(home, "victim", "/bin/sleep", "299")
    first.apply(victim, (1,))
    wait_until(lambda: _sleeping(home), PATIENCE_S, lambda: _said(home, "victim"))
    attacker = _launch(home, "attacker", sys.executable, str(ATTACKER), str(outside))
    first.apply(attacker, (0,))
    told = home / "jobs" / "attacker" / "told.json"
    wait_until(told.exists, PATIENCE_S, lambda: _said(home, "attacker"))
    first.close()

    second = _engine(home, made)
    try:
        jobs = second._jobs
        victims = set(_sleeping(home))
        wait_until(lambda: jobs["victim"].line.connection, PATIENCE_S, "the honest job")
        found = {job_id: state.state for job_id, state in second.observe().items()}
        deceived = jobs["attacker"].line.connection is not None
        second.end("attacker")
        wait_until(lambda: "attacker" not in jobs, PATIENCE_S, "the end of the attacker")
        return {
            "told": json.loads(told.read_text()),
            "found": found,
            "deceived": deceived,
            "outside": [before, _facts(outside)],
            "victim": [second.observe()["victim"].state, bool(victims), victims == set(_sleeping(home))],
            "left": len(processes_of(home / "jobs" / "attacker")),
        }
    finally:
        second.end("victim")
        wait_until(lambda: "victim" not in second._jobs, PATIENCE_S, "the end of the honest job")
        second.close()


def _engine(home: Path, made: dict[str, Any]) -> SupervisedEngine:
    engine = SupervisedEngine(LocalSite(home, slots=2, **made))
    engine.start(lambda: None)
    return engine


def _launch(home: Path, job_id: str, *words: str) -> Launch:
    request = JobRequest(name=job_id, script=words[0], args=words[1:], workdir="/", command=True)
    return Launch(job_id=job_id, request=request, job_dir=home / "jobs" / job_id, owner=job_id)


def _said(home: Path, job_id: str) -> str:
    files = (home / "jobs" / job_id / "output.log", home / "orders" / job_id / "supervisor.log")
    return "\n".join(path.read_text() for path in files if path.exists())


def _sleeping(home: Path) -> list[int]:
    found = []
    for pid in processes_of(home / "jobs" / "victim"):
        with contextlib.suppress(OSError):  # it has just ended
            if b"299" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _facts(pid: int) -> dict[str, Any]:
    """What an attack could change about a process."""
    return {
        "state": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0],
        "limits": resource.prlimit(pid, resource.RLIMIT_NOFILE),
        "affinity": sorted(os.sched_getaffinity(pid)),
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "oom": Path(f"/proc/{pid}/oom_score_adj").read_text(),
    }


if __name__ == "__main__":
    main()
