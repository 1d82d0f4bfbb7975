"""Jobs as another account: `swell up --run-as NAME`, or `--run-as submitter` for that of a job's owner.

Only a platform that runs as root may do this. A job then cannot read the platform's tokens, its store or its
memory, nor (with `submitter`) the files of other users. Where jobs run as the platform's own account, nothing
on the machine keeps them from any of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from swell.domain import InputError
from swell.train.agent.regular import Met, folder, walk

SUBMITTER = "submitter"
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this machine."""

    name: str
    uid: int
    gid: int
    home: str

    @property
    def environment(self) -> dict[str, str]:
        """What a program of this account expects to find."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self) -> None:
        """Make this process one of the account, for good. Its groups are the account's."""
        os.initgroups(self.name, self.gid)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        # A process that gave up rights is closed to its new account: it could not read its own /proc entries.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)

    def own(self, directory: Path) -> None:
        """Give a job's directory to the account, with all in it that belonged to the directory's owner.

        The directory was a job's own before, if it ran as another account then: what it linked here from
        elsewhere stays what it is.
        """
        with folder(directory.parent, directory.name) as top:
            owner = os.fstat(top).st_uid
            if owner == self.uid:
                return
            for met in walk(top):
                hand_over(met, owner, self.uid, self.gid)
            os.fchown(top, self.uid, self.gid)

    def can_read(self, path: Path) -> bool:
        """Whether a process of the account can read this file: its modes, its lists, all above it."""
        done = subprocess.run(
            ["test", "-f", str(path), "-a", "-r", str(path)],
            user=self.uid,
            group=self.gid,
            extra_groups=os.getgrouplist(self.name, self.gid),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10.0,
        )
        return done.returncode == 0


def hand_over(met: Met, before: int, uid: int, gid: int) -> None:
    """Give a file or folder of the account `before` to another one, unless it has names elsewhere too."""
    with contextlib.suppress(FileNotFoundError):
        seen = os.open(met.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=met.folder)
        try:
            facts = os.fstat(seen)
            if facts.st_uid == before and (met.is_folder or facts.st_nlink == 1):
                os.chown(f"/proc/self/fd/{seen}", uid, gid)  # the descriptor cannot be swapped
        finally:
            os.close(seen)


def no_script(path: Path) -> InputError:
    """The refusal of a script that the job could not read, whether it is there or not."""
    return InputError(f"script: there is no file '{path}' that the job can read", field="script")


def find(name: str) -> Account:
    """The account of this name; raises InputError if there is none, or if it is root."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise InputError(
            f"run_as: this machine has no account '{name}'; 'getent passwd' lists those it has",
            field="run_as",
        ) from None
    if entry.pw_uid == 0:
        raise InputError(
            f"run_as: jobs must not run as root, got '{name}'; name another account", field="run_as"
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


def check(run_as: str) -> None:
    """Refuse a setting that can never work."""
    if os.geteuid() != 0:
        raise InputError(f"run_as: only root can run jobs as '{run_as}'; start swell as root", field="run_as")
    if run_as != SUBMITTER:
        find(run_as)


def of_job(run_as: str | None, owner: str) -> Account | None:
    """The account that a job of this owner runs as; None for the platform's own."""
    if run_as is None:
        return None
    return find(owner if run_as == SUBMITTER else run_as)
