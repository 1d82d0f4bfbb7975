"""A control group (cgroup v2) for each job: everything that a job started is in it, and ends with one write.

A process may shed its environment, its session and its parents (`env -i setsid sleep 1d`), but a child is
always in the group of its parent. So the engine puts each supervisor into a group of its own, and ends what
an earlier supervisor left by `cgroup.kill`, even if that supervisor was killed at the same moment.

No controller is needed for this, so it works wherever this process may make a group below its own: as root,
or in a group that was delegated to its account (`Delegate=yes` in a unit of systemd). Elsewhere `of` returns
None, and processes are found by their mark and their descent alone (`processes`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from functools import cache
from pathlib import Path

VARIABLE = "SWELL_GROUP"
"""Environment variable that tells a supervisor the name of the group which it will be put into."""
PREFIX = "swell-"
_LOOKS = 10
_LOOK_S = 0.003


class Group:
    """The group of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the group's path."""
        return self.path.name

    def add(self, pid: int) -> None:
        """Put a process, and all that it will start, into the group; OSError if that is not allowed."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except FileNotFoundError:
            self.path.mkdir(exist_ok=True)  # removed as empty, by whoever tidied up
            (self.path / "cgroup.procs").write_text(str(pid))

    def kill(self) -> bool:
        """End every process of the group, and remove the group; False if some are still ending."""
        for _ in range(_LOOKS):
            if self.remove():
                return True
            with contextlib.suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
            time.sleep(_LOOK_S)
        return self.remove()

    def remove(self) -> bool:
        """Remove the group if no process is in it; True if it is gone."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def of(directory: Path) -> Group | None:
    """The group of the job in this directory, made if it is not there; None if this machine allows none."""
    base = where()
    if base is None:
        return None
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    group = Group(base / f"{PREFIX}{digest[:16]}")
    try:
        group.path.mkdir(exist_ok=True)
    except OSError:
        return None
    return group


def is_in(name: str) -> bool:
    """Whether this process is in the group of this name."""
    return _own_path().rpartition("/")[2] == name


def tidy() -> None:
    """Remove groups of jobs that have ended: no process is in them."""
    base = where()
    for path in [] if base is None else base.glob(f"{PREFIX}*"):
        Group(path).remove()


@cache
def where() -> Path | None:
    """The directory in which this process may make groups; None if there is none."""
    mounted = mount_point()
    if mounted is None:
        return None
    base = mounted / _own_path().lstrip("/")
    if base.name.startswith(PREFIX):
        base = base.parent  # this process was started by a job itself
    trial = base / f"{PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
        # To move a process takes the right to write the group that it is in, too.
        usable = (trial / "cgroup.kill").exists() and os.access(base / "cgroup.procs", os.W_OK)
        return base if usable else None
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            trial.rmdir()


def mount_point() -> Path | None:
    """Where this machine shows its groups of version 2; None if it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.split(" ", 1)[0] == "cgroup2" and fields.split()[3] == "/":
                return Path(fields.split()[4])
    return None


def _own_path() -> str:
    """The path of this process's group, from the root of the hierarchy."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line.removeprefix("0::")
    return "/"
