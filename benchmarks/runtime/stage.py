"""Starts jobs from one prepared process, each in a fraction of a second.

The process reads JSON lines, {"launch": {RunConfig...}} or {"wait": pid, "timeout_s": 30}, and answers with
JSON lines. Each job has a launcher, a coordinator and a zygote of its own, forked from it. With `hosts` its
workers are on those (`netns`), with `cwd` they run there. {"plain": script, ...} runs a script without swell,
as `python script.py` would: importing torch is what takes long, and that has been done here.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from swell.train.agent.run_config import same_hashes


class Stage:
    """The caller's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runtime.stage"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **same_hashes(os.environ)},
        )

    def launch(self, directory: Path, **config: Any) -> int:
        """Start a job with this configuration (see `RunConfig`; `hosts`, `cwd`): its launcher's id."""
        pid: int = self._ask({"launch": {**config, "directory": str(directory)}})
        return pid

    def plain(self, script: Path, *arguments: str, cwd: Path, output: Path, env: dict[str, str]) -> int:
        """Run a script as plain Python does, in `cwd`; its process id."""
        places = {"script": str(script), "cwd": str(cwd), "output": str(output)}
        pid: int = self._ask({"plain": {**places, "arguments": list(arguments), "env": env}})
        return pid

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a launcher, or None if it is not over in that time."""
        code: int | None = self._ask({"wait": pid, "timeout_s": timeout_s})
        return code

    def close(self) -> None:
        """End the prepared process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # a busy machine
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _launch(fields: dict[str, Any]) -> int:
    from swell.train.agent.launcher import Launcher
    from swell.train.agent.run_config import RunConfig

    directory = Path(fields.pop("directory"))
    hosts, cwd = fields.pop("hosts", None), fields.pop("cwd", None)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if cwd is not None:
            os.chdir(cwd)
        config = RunConfig(**fields, directory=directory)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "output.txt").open("a", buffering=1) as output:

            def say(line: str) -> None:
                print(line, file=output)

            if hosts is None:
                code = Launcher(config, say).run()
            else:
                from benchmarks.runtime.hosts_workers import HostsWorkers

                code = Launcher(config, say, HostsWorkers(config, hosts)).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _plain(script: str, arguments: list[str], cwd: str, output: str, env: dict[str, str]) -> int:
    import numpy as np
    import torch

    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.chdir(cwd)
        os.environ.update(env)
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        # As a new process has them: torch always the same, and the others by chance.
        torch.manual_seed(torch.initial_seed())
        random.seed()
        np.random.seed()  # noqa: NPY002
        torch.set_num_threads(1)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF if isinstance(code, int) else 1)


def _wait(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def main() -> None:
    """Launch and wait until standard input ends."""
    from swell.train.start import zygote

    zygote.prepare()
    import swell.train.agent.coordinator
    import swell.train.agent.launcher  # noqa: F401 - loaded here and not in each fork

    for line in sys.stdin:
        request = json.loads(line)
        if "launch" in request:
            answer: int | None = _launch(request["launch"])
        elif "plain" in request:
            answer = _plain(**request["plain"])
        else:
            answer = _wait(request["wait"], request["timeout_s"])
        print(json.dumps(answer), flush=True)
    os._exit(0)  # taking torch apart would take a second


if __name__ == "__main__":
    main()
