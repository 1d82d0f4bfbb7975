"""The fork server, in a fork of the test itself: it starts what it is told, and says how that ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.train.start import bootstrap, zygote


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A zygote's socket, as lines; its workers end with the code in their order, or sleep without one."""

    def child(order: dict[str, Any]) -> int:
        while "code" not in order:
            time.sleep(60)
        return int(order["code"])

    monkeypatch.setattr(zygote, "child", child)
    monkeypatch.setattr(bootstrap, "leave", os._exit)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            zygote.Zygote(theirs).run()
        finally:
            os._exit(7)
    theirs.close()
    ours.settimeout(30)
    with ours.makefile("rwb", buffering=0) as lines:
        yield lines
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, "it ends when its launcher hangs up"


def order(line: Any, **what: Any) -> None:
    line.write(json.dumps(what).encode() + b"\n")


def test_workers_are_forked_and_their_ends_are_told(line: Any) -> None:
    order(line, spawn="w0", code=3)
    order(line, spawn="w1")
    heard = [json.loads(line.readline()) for _ in range(3)]
    pids = {m["started"]: m["pid"] for m in heard if "started" in m}
    assert [m for m in heard if "exited" in m] == [{"exited": "w0", "pid": pids["w0"], "code": 3}]
    assert os.getpgid(pids["w1"]) == pids["w1"], "a group of its own"
    os.killpg(pids["w1"], signal.SIGKILL)
    assert json.loads(line.readline()) == {"exited": "w1", "pid": pids["w1"], "code": -9}


def test_workers_outlive_their_zygote(line: Any) -> None:
    order(line, spawn="w0")
    pid = json.loads(line.readline())["pid"]
    line.close()
    os.kill(pid, 0)
    os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not _runs(pid), 30, "the worker to end")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
