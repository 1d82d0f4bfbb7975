"""A job that means harm, for `attacked.py`: OUTSIDE is the id of a process that is none of its business.

It writes what became of each attempt to told.json in its own directory, and then sleeps.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

outside = int(sys.argv[1])
own = Path(os.environ["SWELL_LOCAL_JOB"])
home = own.parents[1]
proc = Path(f"/proc/{outside}")


def tried(what: Callable[[], object]) -> str:
    try:
        return f"done: {what()!r:.60}"
    except OSError as error:
        return type(error).__name__


def command_lines() -> str:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(lines)


told = {
    "signal": tried(lambda: os.kill(outside, 0)),
    "prlimit": tried(lambda: resource.prlimit(outside, resource.RLIMIT_NOFILE, (77, 77))),
    "affinity": tried(lambda: os.sched_setaffinity(outside, {max(os.sched_getaffinity(0))})),
    "priority": tried(lambda: os.setpriority(os.PRIO_PROCESS, outside, 5)),
    "group": tried(lambda: os.setpriority(os.PRIO_PGRP, outside, 5)),
    "oom": tried(lambda: (proc / "oom_score_adj").write_text("900")),
    "environ": tried(lambda: (proc / "environ").read_bytes()),
    "cmdline": tried(lambda: (proc / "cmdline").read_bytes()),
    "pidfd": tried(lambda: os.pidfd_open(outside)),
    "orders": tried(lambda: list((home / "orders").iterdir())),
    "forge": tried(lambda: (home / "orders" / "attacker" / "exit.json").write_text("{}")),
}
told["lines"] = command_lines()

# What the platform once read from a job's own directory: whom to signal, which job this is, how it ended.
(own / "lock").write_text(f"{outside} {socket.gethostname()}")
request = {"name": "victim", "script": "/bin/true", "workdir": "/", "command": True}
order = {
    "job_id": "victim",
    "request": request,
    "max_workers": 1,
    "owner": "",
    "slots": [1],
    "placement": [1],
}
for name, content in (("start.json", order), ("exit.json", {"code": 0, "reason": ""})):
    (own / f"new-{name}").write_text(json.dumps(content))
    (own / f"new-{name}").replace(own / name)
(own / "runs" / "9999").symlink_to(own.parent / "victim" / "runs" / "0000")

(own / "new-told").write_text(json.dumps(told))
(own / "new-told").replace(own / "told.json")
time.sleep(300)
