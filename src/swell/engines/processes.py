"""What /proc says about processes: their descendants, their job, their memory.

Every process of a job inherits an environment variable with the job's directory. A process is found by that
mark even if its parents are gone or it made a session of its own, so no process of a job goes unnoticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Small files that are never half-written, even if their writer is killed; and folders of one user alone.


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a small file atomically. Only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Never through a link or into a pipe that somebody put there: the directory may be a job's own.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def own_folder(name: str) -> Path:
    """This user's directory of this name among the machine's temporary files. It is made if needed, and
    refused if another user owns it or can enter it."""
    path = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{path} belongs to another user or is open to others: remove it")
    return path


# The environment of jobs: what their owner gave, and of the platform's own only what programs need to run.
#
# The operator's environment may hold anything: passwords of databases, keys of clouds, Ray's token. So a job
# gets the names on a list and no others. `swell up --pass-env NAME` adds one.


NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "HOSTNAME"),
        *(
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "XDG_CACHE_HOME",
            "XDG_RUNTIME_DIR",
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "SWELL_DATA"),
    )
)
PREFIXES = ("LC_", "PYTHON", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "NUMBA_", "TORCH_")


def for_jobs(environment: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """The part of an environment that jobs may have; `passed`: further names that the operator allows."""
    allowed = NAMES | set(passed)
    return {
        name: value
        for name, value in environment.items()
        if name in allowed or (name.startswith(PREFIXES) and "TOKEN" not in name)
    }


MARK = "SWELL_LOCAL_JOB"
"""Environment variable that all processes of a job carry."""
MARK_BYTES = 1024
"""Bytes reserved for a job's mark in the environment of a process that forks them (`children.show`)."""


def processes() -> list[int]:
    """All processes that this one can see."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent(pid: int) -> int | None:
    """The parent of a process; None if the process is gone."""
    try:
        # The command may contain spaces and brackets, so read the fields after the last bracket.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def descendants(pid: int) -> list[int]:
    """All children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for one in processes():
        above = parent(one)
        if above is not None:
            children.setdefault(above, []).append(one)
    found, unvisited = [], [pid]
    while unvisited:
        for child in children.get(unvisited.pop(), []):
            found.append(child)
            unvisited.append(child)
    return found


def memory_bytes(pid: int) -> int:
    """Resident memory of a process without what it shares; 0 if the process is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def lock_holder(path: Path) -> int | None:
    """The id of the process that holds this lock file, which it wrote into the file; None if it is free."""
    try:
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0) or None
    except (OSError, ValueError):
        pass
    return None


def mark(directory: Path) -> str:
    """The value of the environment variable MARK in processes of the job in `directory`."""
    return str(directory.resolve())


def processes_of(directory: Path) -> list[int]:
    """Every living process of the job in `directory`, whatever its parent, except the caller."""
    wanted, found = f"{MARK}={mark(directory)}".encode(), []
    for pid in processes():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def workers_of(directory: Path) -> list[int]:
    """The processes of the job in `directory` that train: those forked for it, or started cold."""
    return [pid for pid in processes_of(directory) if is_worker(pid)]


def is_worker(pid: int) -> bool:
    """Whether this process trains, for whatever job."""
    with contextlib.suppress(OSError):
        name, command = Path(f"/proc/{pid}/comm").read_text(), Path(f"/proc/{pid}/cmdline").read_bytes()
        return re.fullmatch(r"swell-w\d+\n", name) is not None or b"swell.train.start.bootstrap" in command
    return False


def end_descendants(wait_s: float) -> bool:
    """Kill everything that descends from this process; True if nothing is left within `wait_s`.

    This process must adopt orphans (PR_SET_CHILD_SUBREAPER). Then it finds processes that shed their
    environment and their session too, such as `env -i setsid sleep 1d`.
    """
    deadline = time.monotonic() + wait_s
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def sweep(directory: Path, wait_s: float = 0.0) -> bool:
    """Kill all processes that are left of a job; True if none is left within `wait_s`."""
    deadline = time.monotonic() + wait_s
    while left := processes_of(directory):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def how_ended(code: object) -> str:
    """In words, which signal ended a process, from its negative exit code."""
    try:
        return f"ended by {signal.Signals(-int(str(code))).name}"
    except ValueError:
        return f"ended with code {code}"
