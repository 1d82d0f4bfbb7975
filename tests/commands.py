"""Runs `swell` commands as processes of their own, forked from one that has imported everything already.

A command spends most of its time importing. Each one here still has its own process, working directory,
environment, output and exit code; only the imports are shared.

As a program it is the process that forks. JSON lines in, each with words, cwd, env, out, err and timeout_s;
JSON lines out with the exit code, or null after a timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn


class Commands:
    """Runs commands one after the other."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, words: list[str], cwd: Path, env: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end; fails the test if it takes longer than `timeout_s`."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = {"words": words, "cwd": str(cwd), "env": env, "timeout_s": timeout_s}
            code = self._ask(asked | {"out": str(out), "err": str(err)})
            said = out.read_text(), err.read_text()
        assert code is not None, f"swell {' '.join(words)} took longer than {timeout_s:g} s: {said}"
        return subprocess.CompletedProcess(words, code, *said)

    def close(self) -> None:
        """End the process that forks."""
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait(120)

    def _ask(self, asked: dict[str, Any]) -> int | None:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        code: int | None = json.loads(self._server.stdout.readline())
        return code


def _import_all() -> None:
    """Everything that commands import, so that none of them has to."""
    import importlib

    from swell.cli import COMMANDS

    modules = {command.split(":")[0] for command, _ in COMMANDS.values()}
    parts = (
        "api.client",
        "api.server",
        "cli._platform",
        "cli._report",
        "control.plane",
        "engines.local",
        "sim.replay",
    )
    for name in sorted(modules | {f"swell.{part}" for part in parts}):
        importlib.import_module(name)
    # The first compiled function of a process takes a second: numba looks through all that it knows.
    compiling = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "compile.py"))
    compiling["compile_for"](("elasticflow", "max-min"))


def _be_a_command(asked: dict[str, Any]) -> NoReturn:
    """In the forked process: become the command and end with its exit code."""
    code: object = 1
    try:
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, asked["out"], 0), (2, asked["err"], 0)):
            opened = os.open(path, flags or os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.clear()
        os.environ.update(asked["env"])
        time.tzset()
        os.chdir(asked["cwd"])
        sys.argv = ["swell", *asked["words"]]
        from swell.cli import main

        main(prog_name="swell")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _wait(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child, or None if it had to be killed."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    """Fork commands until nobody asks for any."""
    # Where tests run in the background, interrupts are ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import_all()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_a_command(asked)
        sys.stdout.write(json.dumps(_wait(pid, asked["timeout_s"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
