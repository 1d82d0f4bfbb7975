"""A control group (cgroup v2) for each run of a job: everything that it started is in it, and ends with it.

A process may shed its environment, its session and its parents (`env -i setsid sleep 1d`), but a child is
always in the group of its parent. So the engine puts each supervisor into a group of its own, whose name ends
with the supervisor's process id. A group without its supervisor is what a supervisor that was killed has
left: the engine ends it by `cgroup.kill`.

No controller is needed for this, so it works wherever this process may make a group below its own: as root,
or in a group that was delegated to its account (`Delegate=yes` in a unit of systemd). Elsewhere `where` is
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
"""Environment variable that tells a supervisor how the name of the group begins which it will be put into."""
PREFIX = "swell-"
_LOOKS = 10
_LOOK_S = 0.003


class ControlGroup:
    """The group of one run of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> set[int]:
        try:
            return set(map(int, (self.path / "cgroup.procs").read_text().split()))
        except OSError:
            return set()

    @property
    def led(self) -> bool:
        """Whether the supervisor that the group was made for is in it."""
        return int(self.path.name.rpartition("-")[2]) in self.members()

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


def beginning(directory: Path) -> str:
    """How the names of the groups of the job in this directory begin."""
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    return f"{PREFIX}{digest[:16]}-"


def enter(directory: Path, supervisor: int) -> None:
    """Put the supervisor of a job, and all that it will start, into a new group; OSError if that fails."""
    base = where()
    if base is None:
        return
    path = base / f"{beginning(directory)}{supervisor}"
    for attempt in range(3):
        path.mkdir(exist_ok=True)
        try:
            (path / "cgroup.procs").write_text(str(supervisor))
            return
        except FileNotFoundError:  # removed as empty, by an engine that tidied up
            if attempt == 2:
                raise


def is_entered(beginning_: str) -> bool:
    """Whether this process is in a group of its own whose name begins like this."""
    return _own_path().rpartition("/")[2] == f"{beginning_}{os.getpid()}"


def of(directory: Path) -> list[ControlGroup]:
    """The groups of the job in this directory."""
    base = where()
    return [] if base is None else [ControlGroup(path) for path in base.glob(f"{beginning(directory)}*")]


def end_orphans(directory: Path) -> bool:
    """End what supervisors of this job have left; False if some of it is still ending."""
    left = [group for group in of(directory) if not group.led and not group.kill()]
    return not left


def end_all(directory: Path) -> None:
    """End all that is in groups of the job in this directory."""
    for group in of(directory):
        group.kill()


def tidy() -> None:
    """Remove groups of jobs that have ended: no process is in them."""
    base = where()
    for path in [] if base is None else base.glob(f"{PREFIX}*"):
        ControlGroup(path).remove()


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
