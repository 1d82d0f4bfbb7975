"""The supervisor of one job: holds the job's lock, waits for its launcher, and keeps its exit code.

    python -m swell.engines.supervisor JOB_DIRECTORY
    python -m swell.engines.supervisor --trial [ACCOUNT]    exit code 0 if jobs can be walled off, else why

The supervisor has a session of its own, so it and the job outlive the control plane. The lock makes sure that
a job never runs twice at once: a second supervisor finds the lock taken and ends. A supervisor that follows
one that was killed first kills all processes which that one left.

It is a process of the platform, with the platform's account, and touches nothing that a job may write: its
files are in `orders/JOB` of the home (`order`). Its child, the launcher, has the job's account and is behind
the wall (below). In the job's own directory are

    runs/0000     a run of the job, see `swell.train.agent.jobdir`; the next run after a stop is 0001
    checkpoints   shared by all runs
    output.log    what the workers printed, in all runs
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from swell.domain import gpu_of_slot
from swell.engines import accounts, groups, wall
from swell.engines.accounts import Account
from swell.engines.order import EXIT, LOCK, JobOrder, folder_of, order_outdated
from swell.engines.processes import descendants, end_descendants, memory_bytes, processes, sweep, write_json
from swell.engines.wall import Wall
from swell.train.agent import children
from swell.train.agent.launcher import Launcher
from swell.train.agent.outputs import FILE, OutputFile
from swell.train.agent.regular import open_regular, read_regular
from swell.train.agent.run_config import PER_GPU, RunConfig
from swell.train.agent.worker_processes import LocalWorkers

T = TypeVar("T")

STOPPED = "stopped"
"""Reason of a job that was asked to stop and saved its state."""
MOST_REASON = 4000
"""Longest reason of a job's end, in characters."""
OUT_OF_MEMORY = 137
"""Exit code of a job that was ended because a worker used too much memory."""
MEMORY_EVERY_S = 1.0
_LOCK_S = 3.0
"""How long to try for the lock, which a supervisor that is just ending may still hold."""
_ROOM_S = 600.0
"""How long to wait for room on a full disk."""
_SWEEP_S = 20.0
"""Longest wait for the end of processes that were killed."""
_MOST_MESSAGE = 3000
"""Most characters of an exception's message that become the reason of a failure."""
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_MOST_REPORT = 32 << 10
"""Most characters of a last report; a longer one is not kept, so that exit.json can always be read."""
_GROUP_S = 10.0
"""How long to wait for the engine to put this process into the job's control group."""
_FLOCK = "hhqqi4x"
"""Layout of `struct flock`, which the kernel fills in with the holder of a lock."""
_ELSEWHERE = 0


def supervisor_of(directory: Path) -> int | None:
    """The id of the process that holds the job's lock, as the kernel has it: never what a file says.

    `_ELSEWHERE` if that process is on another machine, and None if there is none. (A process that opens and
    closes the file loses its own lock on it, so a supervisor does not call this.)
    """
    try:
        with open_regular(folder_of(directory) / LOCK) as lock:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return None
            here = lock.read(512).decode(errors="replace") == socket.gethostname()
            return int(pid) if here and pid > 0 else _ELSEWHERE
    except OSError:
        return None  # absent


def is_locked(directory: Path) -> bool:
    """Whether a supervisor of the job is alive."""
    return supervisor_of(directory) is not None


def signal_supervisor(directory: Path, number: signal.Signals) -> bool:
    """Send a signal to the job's supervisor, never to another process; True if sent."""
    pid = supervisor_of(directory)
    if not pid:
        return False  # there is none, or the home is shared and it runs on another machine
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The descriptor belongs to the process that has the id now. If it holds the lock still, it is the
        # supervisor, and not a later process with the same id.
        if supervisor_of(directory) != pid:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def supervise(directory: Path) -> int:
    """Run the job in `directory` as the platform's order says, to its end; returns its exit code."""
    if not _in_group():
        return 1  # the engine was killed as it started this process; the next one will try again
    folder = folder_of(directory)
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return 0  # the job was ended and forgotten before it began
    with os.fdopen(descriptor, "r+b") as lock:
        if not _take(lock):
            return 0  # the job runs already
        if not sweep(directory, _SWEEP_S):
            return 1  # processes of an earlier supervisor cannot be killed; the engine will try again
        try:
            order = JobOrder.read(directory)
        except FileNotFoundError:
            return 0  # the job was ended before it began
        if order_outdated(order.extras):
            return 0  # another control plane leads by now, and may have decided otherwise
        account = None if order.account is None else accounts.find(order.account)
        (folder / EXIT).unlink(missing_ok=True)
        code, said = run(lambda: _launch(directory, order), _wall(directory, order), account)
        end_descendants(_SWEEP_S)
        sweep(directory, _SWEEP_S)
        outcome = _outcome(said)
        if outcome is None:
            return code if code > 0 else 1  # it was ended from outside
        content = outcome | {"time_s": time.time()}
        _with_room(lambda: write_json(folder / EXIT, content))  # else the job would run again
        return int(outcome["code"])


def _launch(directory: Path, order: JobOrder) -> bytes:
    """As the process inside: run the job; returns how it ended, as JSON."""
    run_dir = directory / "runs" / f"{len(list((directory / 'runs').glob('*'))):04d}"
    output = OutputFile(directory / FILE)
    code, reason, report = _run(order, run_dir, output.say)
    output.close()
    outcome = {"code": code, "reason": None if reason is None else reason[:MOST_REASON]}
    return json.dumps(
        outcome | ({"report": report} if len(json.dumps(report)) <= _MOST_REPORT else {})
    ).encode()


def _outcome(said: bytes) -> dict[str, Any] | None:
    """The end of a job as its launcher reported it; None if it reported none, or nothing that makes sense."""
    try:
        raw = json.loads(said)
        code, reason = raw["code"], raw["reason"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(reason, str) or isinstance(code, bool) or not isinstance(code, int) or abs(code) > 1000:
        return None
    outcome: dict[str, Any] = {"code": code, "reason": reason[:MOST_REASON]}
    report = raw.get("report")  # checked like every report when the engine reads it
    if isinstance(report, dict) and len(json.dumps(report)) <= _MOST_REPORT:
        outcome["report"] = report
    return outcome


def _in_group() -> bool:
    """Wait until this process is in the job's control group, if the engine said that it has one."""
    beginning, until_s = os.environ.pop(groups.VARIABLE, ""), time.monotonic() + _GROUP_S
    while beginning and not groups.is_entered(beginning):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.002)
    return True


def _wall(directory: Path, order: JobOrder) -> Wall | None:
    """What to hide from this job, if the engine asked for that.

    If it cannot be hidden this process ends, and the job is tried again: it never runs in the open.
    """
    text = os.environ.pop(wall.VARIABLE, "")
    if not text:
        return None
    told = json.loads(text)
    home, workdir = Path(told["home"]), order.launch.workdir
    visible = wall.shown(home, directory, [workdir, workdir / order.launch.request.script])
    return Wall(home=home, visible=tuple(visible), read_only=tuple(map(Path, told["read_only"])))


def _with_room(action: Callable[[], T]) -> T:
    """Do something that writes. While the disk is full, wait for room: that is not the job's fault."""
    until_s = time.monotonic() + _ROOM_S
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > until_s:
                raise
            time.sleep(1.0)


def _take(lock: IO[bytes]) -> bool:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    lock.truncate(0)
    lock.write(socket.gethostname().encode())
    lock.flush()
    return True


def _run(
    order: JobOrder, run_dir: Path, say: Callable[[str], None]
) -> tuple[int, str | None, dict[str, Any]]:
    """Run the job; its exit code, the reason of its end and its last report.

    There is no reason if it was ended from outside.
    """
    launch, request = order.launch, order.launch.request
    size = request.workers_per_replica
    try:
        os.chdir(launch.workdir)
        config = RunConfig(
            script=request.script,
            arguments=list(request.args),
            minimum=size,
            maximum=max(launch.max_workers - launch.max_workers % size, size),
            workers=len(order.slots),
            slots=list(order.slots),
            cold="ray" in order.extras,
            name=launch.job_id,
            directory=run_dir,
            threads=1,
            env=request.env,
            settings=request.for_runtime() | {"checkpoints": str(launch.job_dir / "checkpoints")},
        )
        launcher = _with_room(lambda: _launcher(order, config, say))
    except (ValueError, OSError) as error:
        say(str(error))
        # It is not the job's fault if Ray cannot be reached: without a reason the job is started again.
        return 2, None if isinstance(error, ConnectionError) else str(error), {}
    watch = _MemoryWatch(request.memory_bytes)
    code = launcher.run(watch.look)
    if watch.verdict:
        say(watch.verdict)
        return OUT_OF_MEMORY, watch.verdict, launcher.last_report
    reason = launcher.reason
    if reason.startswith("stopped by SIG"):
        return code, None, launcher.last_report
    return code, (_first_error(run_dir, request.script) if code > 0 else "") or reason, launcher.last_report


def _launcher(order: JobOrder, config: RunConfig, say: Callable[[str], None]) -> Launcher:
    """The launcher, for the place where the job's workers live."""
    if "ray" in order.extras:
        from swell.engines.ray.workers import RayWorkers

        return Launcher(config, say, RayWorkers(config, order))
    return Launcher(config, say, LocalWorkers(lambda slot: _gpu_env(slot, order.extras)))


def _gpu_env(slot: int, extras: Mapping[str, Any]) -> dict[str, str]:
    """What makes a worker see only the GPU of its slot, if there are any."""
    if not extras.get("gpus", 0):
        return {}
    gpu = str(gpu_of_slot(slot, extras["gpus"]))
    return {"CUDA_VISIBLE_DEVICES": gpu, PER_GPU: str(extras.get("per_gpu", 1))}


class _MemoryWatch:
    """Ends the job once one of its processes uses too much memory; works without a control plane."""

    def __init__(self, limit: int | None) -> None:
        self.verdict = ""
        self._limit = limit
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look once a second; called in every turn of the launcher."""
        now_s = time.monotonic()
        if self._limit is None or self.verdict or now_s - self._looked_s < MEMORY_EVERY_S:
            return
        self._looked_s = now_s
        largest = max((memory_bytes(pid) for pid in descendants(os.getpid())), default=0)
        if largest > self._limit:
            self.verdict = (
                f"a worker used {largest / 2**20:.0f} MiB of memory; the job's limit is "
                f"{self._limit / 2**20:.0f} MiB for each worker"
            )
            os.kill(os.getpid(), signal.SIGTERM)


def _first_error(run_dir: Path, script: str) -> str:
    """The error of the worker that failed first, as a reason."""
    errors = sorted((run_dir / "logs").glob("*.error"), key=lambda path: path.stat().st_mtime)
    for path in errors:  # files of the job's own, so they may be anything
        if reason := reason_of(read_regular(path).decode(errors="replace"), Path(script).name):
            return reason
    return ""


def _try(account: str | None) -> int:
    """Try the wall as a job would meet it, on a home made for that; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="swell-wall-") as folder:
        Path(folder).chmod(0o711)
        home = Path(folder, "home").resolve()
        for name in ("jobs/a", "tokens"):
            (home / name).mkdir(parents=True)
        hidden = Wall(home=home, visible=(home / "jobs" / "a",))
        found = None if account is None else accounts.find(account)
        code, said = run(lambda: _seen(home), hidden, found)
        if code == 0 and said:
            sys.stderr.write(f"{said.decode()}\n")
        return code or int(bool(said))


def _seen(home: Path) -> bytes:
    """What is there behind the wall and should not be; nothing if all is well."""
    if (home / "tokens").exists() or not (home / "jobs" / "a").exists():
        return b"the home is not hidden"
    return b"" if processes() == [os.getpid()] else b"processes outside are not hidden"


def reason_of(traceback: str, script: str) -> str:
    """The type and the whole message of the exception in a traceback, and the line of the script.

    A text that is no traceback is the reason as it is. The middle of a long message is left out.
    """
    lines = traceback.strip("\n").splitlines()
    heads = [i for i, line in enumerate(lines) if line == "Traceback (most recent call last):"]
    block = lines[heads[-1] + 1 :] if heads else lines
    begin = next((i for i, line in enumerate(block) if line and not line.startswith(" ")), 0)
    message = "\n".join(block[begin:]).strip()
    frames = [found for line in block[:begin] if (found := _FRAME.match(line))]
    own = [frame for frame in frames if Path(frame[1]).name == script] or frames
    place = f" ({Path(own[-1][1]).name}, line {own[-1][2]})" if own else ""
    if len(message) > _MOST_MESSAGE:
        message = f"{message[: _MOST_MESSAGE // 2]} ... {message[-_MOST_MESSAGE // 2 :]}"
    first, newline, rest = message.partition("\n")
    return f"{first}{place}{newline}{rest}"


def main() -> int:
    """Supervise the job whose directory is given, or try the wall."""
    if sys.argv[1] == "--trial":
        return _try(sys.argv[2] if len(sys.argv) > 2 else None)
    return supervise(Path(sys.argv[1]))


# The process in which a job runs: a child of its supervisor, behind the wall and as the job's account.
#
# The supervisor itself stays outside. It holds the job's lock, waits, and writes how the job ended where no
# job can write. So nothing that the platform relies on is in reach of the job's code:
#
#     supervisor    the platform's account, outside; forks
#       first       enters the namespaces, forks and ends; only behind a wall
#         inside    process 1 of its PID namespace: the launcher, from which all processes of the job descend
#
# When the launcher ends, the kernel ends every process of its namespace, and when the supervisor is killed,
# the kernel kills the launcher. A process with threads (numpy starts some) must not enter a user namespace.
# A fork has one thread, so the way in is the same for a supervisor that was forked from the nursery and for
# one that has just imported everything.


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


if __name__ == "__main__":
    sys.exit(main())
