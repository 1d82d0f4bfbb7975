"""Forks launchers on request from one prepared zygote: jobs in tests start in a fraction of a second.

JSON lines in: {"launch": {RunConfig...}} or {"wait": pid, "timeout_s": 30}; JSON lines out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from swell.train.launcher import Launcher, RunConfig, ZygoteProcess


def launch(zygote: ZygoteProcess, fields: dict[str, object]) -> int:
    directory = Path(str(fields.pop("directory")))
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        config = RunConfig(**fields, directory=directory)  # type: ignore[arg-type]
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "output.txt").open("a", buffering=1) as output:
            launcher = Launcher(config, lambda line: print(line, file=output), zygote)
            code = launcher.run()
    finally:
        os._exit(code & 0xFF)


def wait(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        zygote = ZygoteProcess(Path(folder) / "zygote.log")
        for line in sys.stdin:
            request = json.loads(line)
            if "launch" in request:
                answer: dict[str, object] = {"pid": launch(zygote, request["launch"])}
            else:
                answer = {"code": wait(request["wait"], request["timeout_s"])}
            print(json.dumps(answer), flush=True)
        zygote.close()


if __name__ == "__main__":
    main()
