"""The process in which a job runs: a child of its supervisor, behind the wall and as the job's account.

The supervisor itself stays outside. It holds the job's lock, waits, and writes how the job ended where no job
can write. So nothing that the platform relies on is in reach of the job's code:

    supervisor    the platform's account, outside; forks
      first       enters the namespaces, forks and ends; only behind a wall
        inside    process 1 of its PID namespace: the launcher, from which all processes of the job descend

When the launcher ends, the kernel ends every process of its namespace, and when the supervisor is killed, the
kernel kills the launcher. A process with threads (numpy starts some) must not enter a user namespace. A fork
has one thread, so the way in is the same for a supervisor that was forked from the nursery and for one that
has just imported everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable

from swell.engines.accounts import Account
from swell.engines.wall import Wall
from swell.train.agent import children

MOST_SAID = 1 << 16
"""Most bytes that the process inside may report of the job's end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


def run(action: Callable[[], bytes], wall: Wall | None, account: Account | None) -> tuple[int, bytes]:
    """Run `action` inside, to the end of every process it leaves behind the wall.

    Returns the exit code, and the bytes that `action` returned: none if the process was killed, or could not
    get inside, which its standard error explains. What is returned is no more to be trusted than the job.
    Signals that end a job are passed on to it.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the process inside becomes a child of this one
    said, say = os.pipe()
    wait, let_go = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is somebody to pass them on to
    sys.stdout.flush()
    sys.stderr.flush()
    first = os.fork()
    if first == 0:
        _leave(lambda: _enter(action, wall, account, say, wait))
    os.close(say)
    os.close(wait)
    try:
        return _outside(first, said, let_go, behind=wall is not None)
    finally:
        os.close(said)
        os.close(let_go)


def _outside(first: int, said: int, let_go: int, *, behind: bool) -> tuple[int, bytes]:
    """Let the process inside begin, and wait for its end."""
    pid = first
    if behind:
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        if code != 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            return code, b""
        pid = int.from_bytes(os.read(said, 4), "little")
    descriptor = os.pidfd_open(pid)  # it is a child that was not waited for, so the id is still its own

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(let_go, b"!")
        code = _end_of(pid)
        os.set_blocking(said, False)  # a process without a wall may have left the other end open somewhere
        with contextlib.suppress(BlockingIOError):
            return code, os.read(said, MOST_SAID)
        return code, b""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(descriptor)


def _end_of(pid: int) -> int:
    """The exit code of the process inside; orphans that this process has adopted are waited for, too."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _enter(
    action: Callable[[], bytes], wall: Wall | None, account: Account | None, say: int, wait: int
) -> int:
    """Get inside, and run the action there."""
    children.close_all_but((say, wait))
    if wall is not None:
        wall.enter_namespaces()
        pid = os.fork()
        if pid:
            os.write(say, pid.to_bytes(4, "little"))
            return 0
    os.setsid()  # a signal to its process group must not reach anybody outside
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os._exit(128 + number))  # until the launcher has its own
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    children.set_name("swell-launcher")
    if not os.read(wait, 1):
        return 1  # the supervisor was killed
    if wall is not None:
        wall.hide()
    if account is not None:
        account.become()
    if wall is not None:
        wall.restrict()
    # Only now: a process that changes its account, or whose parent ends, loses this.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poll = select.poll()
    poll.register(wait, 0)
    if poll.poll(0):
        return 1  # the supervisor was killed before
    os.close(wait)
    os.write(say, action()[:MOST_SAID])
    return 0


def _leave(action: Callable[[], int]) -> None:
    """End this fork with the exit code of the action, whatever happens in it."""
    code = 1
    try:
        code = action()
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
