"""Workers as processes of this machine: whose end is told, and what each slot's worker sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from swell.train.agent.protocol import Exited
from swell.train.agent.worker_processes import LocalWorkers


def order(worker: str, folder: Path, code: int = 0) -> dict[str, Any]:
    (folder / "ending.py").write_text(
        "import os, sys; print(os.environ.get('PLACE')); sys.exit(int(sys.argv[1]))"
    )
    what = {"module": "ending", "script": str(code), "arguments": [], "log": str(folder / f"{worker}.log")}
    return {"spawn": worker, "env": {"PYTHONPATH": str(folder)}, **what}


def test_an_exit_is_told_though_another_worker_is_started_before_it_is_heard(tmp_path: Path) -> None:
    """Python takes the exit codes of processes that nobody holds whenever it starts another one."""
    workers = LocalWorkers(lambda slot: {"PLACE": f"slot {slot}"})
    workers.spawn(order("w0", tmp_path, 0), 4)
    first = workers._pids["w0"]
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    workers.spawn(order("w1", tmp_path, 3), 5)
    second = workers._pids["w1"]
    assert workers.names() == ["w0", "w1"]
    for pid, ended in ((first, Exited("w0", 0)), (second, Exited("w1", 3))):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert workers.child_ended(pid, code, again=True) == [ended]
    assert workers.names() == [] and workers.child_ended(first, 0, again=True) == []
    assert [(tmp_path / f"w{i}.log").read_text() for i in (0, 1)] == ["slot 4\n", "slot 5\n"]


def test_a_worker_that_is_killed_is_told_once(tmp_path: Path) -> None:
    workers = LocalWorkers()
    workers.spawn(order("w0", tmp_path), None)
    pid = workers._pids["w0"]
    workers.kill_all()
    workers.kill("nobody")
    os.waitpid(pid, 0)
    assert workers.child_ended(pid, -9, again=False) == [Exited("w0", -9)]
    assert workers.names() == []
