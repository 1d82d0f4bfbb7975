"""Start a module of ours as a process: a fork if this process has imported everything, else a new Python.

Importing torch takes seconds, and a job has several processes. A process that is *prepared* (see
`zygote.prepare`) forks them instead: the zygote, the coordinator, and the supervisor itself on a platform
with a nursery. A fork starts in milliseconds and shares the memory of what was imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

_PR_SET_NAME = 15
_prepared = False


def now_prepared() -> None:
    """Say that this process has imported what the others need, and runs no threads that a fork would miss."""
    global _prepared
    _prepared = True


def can_fork() -> bool:
    """Whether `start` forks. A process with threads does not: their locks would stay locked in the fork."""
    return _prepared and threading.active_count() == 1


class Forked:
    """A forked process, of this process or of another one; used as a `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit code; 0 for another process's child, whose code only that process learns."""
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor, self.returncode = -1, 0

    def poll(self) -> int | None:
        """The exit code, or None while the process lives."""
        if self.returncode is None and self._has_ended(0.0):
            self.returncode = 0
            with contextlib.suppress(ChildProcessError):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process; subprocess.TimeoutExpired if it takes longer."""
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.poll() or 0

    def fileno(self) -> int:
        """A descriptor that can be read from once the process has ended."""
        return self._descriptor

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, never to a later one with the same id."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


Child = subprocess.Popen[bytes] | Forked


def start(
    module: str,
    arguments: list[str],
    log: Path,
    *,
    keep: Collection[int] = (),
    env: Mapping[str, str] | None = None,
) -> Child:
    """Run `main` of a module in a session of its own, with its output appended to a file.

    Of the open files only those in `keep` are there in the new process. A new Python gets the variables in
    `env` too; a fork has the environment that it has.
    """
    if can_fork():
        return fork(module, arguments, log, keep=keep)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=tuple(keep),
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )


def fork(
    module: str,
    arguments: list[str],
    log: Path,
    *,
    keep: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    shown: Collection[str] = (),
) -> Forked:
    """As `start`, always by a fork. `env` replaces the environment; /proc shows the variables in `shown`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code: object = 1
    try:
        os.setsid()
        _reset_signals()
        _redirect(log)
        close_all_but(keep)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        for name in shown:
            show(name, os.environ[name])
        set_name(f"swell-{module.rpartition('.')[2]}")
        sys.argv = [module, *arguments]
        code = importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def show(name: str, value: str) -> None:
    """Change an environment variable of this process as other processes see it in /proc.

    /proc shows the memory of a process's first environment, and a fork has its parent's. So the variable is
    overwritten there, and the process that forks must be started with a value of it that is long enough.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, room = int(fields[47]), Path("/proc/self/environ").read_bytes()
    at = (b"\0" + room).find(f"\0{name}=".encode())
    if not begin or at < 0:
        return
    start = at + len(name) + 1
    length = room.index(b"\0", start) - start
    if len(value.encode()) <= length:
        ctypes.memmove(begin + start, value.encode().ljust(length, b"\0"), length)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _redirect(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)


def close_all_but(keep: Collection[int]) -> None:
    """Close what was inherited. A lock that the parent holds would else live as long as this process."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def set_name(name: str) -> None:
    """The name that `ps` and `top` show; without it, all forks look like the process that forked them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
