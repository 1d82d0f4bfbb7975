"""A wall around a job: it sees neither the platform's home nor other jobs, though it has the same account.

The process in which a job runs gets behind the wall before any code of the job runs, and all its children
inherit it:

- A mount namespace in which the home is empty but for the job's own directory and what its request names. So
  no path leads to tokens, store or other jobs' files.
- A PID namespace with a /proc of its own. A process outside has no number there, so the job can neither
  signal it, nor change its limits, its priority or its processors, nor read its command line.
- A Landlock domain. A process in it cannot undo the mounts, and neither read the memory of a process outside
  nor reach files through it, should it ever get hold of one.

A job that may write files of its account can still plant something that the account runs later, outside: in
~/.bashrc, say. Against that only another account helps (`swell up --run-as`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from swell.engines.processes import write_json

FILE = "wall.json"
"""File of a home in which a control plane says whether its jobs are to be walled off; see `WallSetting`."""
VARIABLE = "SWELL_WALL"
"""Environment variable that tells a supervisor, as JSON, what to hide; see `swell.engines.local`."""
OWN = frozenset(("tokens", "jobs", "orders", "gpus", "planes", "rented"))
"""Directories of a home that belong to the platform: none of them is shown because a request names it."""

_NEWNS, _NEWUSER, _NEWPID = 0x00020000, 0x10000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _SLAVE = 32, 4096, 16384, 1 << 19
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LEAST_ABI, _SIGNAL_ABI = 2, 6
_MAKE_BLOCK, _REFER = 1 << 11, 1 << 13
_SCOPE_SIGNAL = 1 << 1
_CAPABILITIES_V3, _PR_CAPBSET_DROP = 0x20080522, 24
_ROOT_KEEPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 23, 24)
"""Numbers of capabilities: files of others, signals, accounts, ports, raw sockets, pinned memory, priorities
and resource limits."""
_PROC = Path("/proc")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """What a job must not see or change. The methods are called in their order; each is for good, and raises
    OSError if this machine does not allow it."""

    home: Path
    visible: tuple[Path, ...] = ()
    """The only paths of the home that are there behind the wall."""
    read_only: tuple[Path, ...] = ()
    """Mounts that cannot be changed from behind the wall."""

    def enter_namespaces(self) -> None:
        """Enter namespaces of one's own. The next child is process 1 of the PID namespace. For a process with
        one thread."""
        os.chdir("/")  # a working directory in the home would still be the real one
        _unshare()

    def hide(self) -> None:
        """As process 1: hide what is to be hidden."""
        _mount(None, Path("/"), None, _REC | _SLAVE)
        _hide_home(self.home.resolve(), self.visible)
        for path in self.read_only:
            flags = os.statvfs(path).f_flag & (_NOSUID | _NODEV | _NOEXEC)
            _mount(path, path, None, _BIND | _REC)
            _mount(None, path, None, _REMOUNT | _BIND | _RDONLY | flags)
        _hide_processes()

    def restrict(self) -> None:
        """Give up the rights that made the mounts, once the process has the job's account."""
        _restrict()


@dataclass(frozen=True, slots=True, kw_only=True)
class WallSetting:
    """Whether the control plane that was started last in a home walls its jobs off."""

    walled: bool
    why_not: str = ""
    account: str | None = None
    """The account that jobs run as, if that is one and not the platform's own."""

    def write(self, home: Path) -> None:
        """Store it in the home, for `swell doctor`; on a full disk it is not stored."""
        with contextlib.suppress(OSError):
            write_json(home / FILE, asdict(self))

    @staticmethod
    def read(home: Path) -> WallSetting:
        """The setting in this home; a platform that has not started yet will try to have a wall."""
        try:
            raw = json.loads((home / FILE).read_text())
            return WallSetting(
                walled=bool(raw["walled"]), why_not=str(raw["why_not"]), account=raw["account"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return WallSetting(walled=True)


def _hide_home(home: Path, visible: Iterable[Path]) -> None:
    kept = [(path, os.open(path, os.O_PATH)) for path in _below(home, visible)]
    _mount(Path("tmpfs"), home, b"tmpfs", _NOSUID | _NODEV, b"size=64k,mode=755")
    masked = os.umask(0o022)  # the job may have another account, and passes through
    for path, descriptor in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Path(f"/proc/self/fd/{descriptor}")
        path.mkdir() if source.is_dir() else path.touch()
        _mount(source, path, None, _BIND | _REC)
        os.close(descriptor)
    os.umask(masked)
    _mount(None, home, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _hide_processes() -> None:
    """Show only the processes of this namespace, wherever the machine's were shown.

    What covers parts of /proc, as containers do to protect their host, covers the same parts of the new one.
    """
    mounts = list(_mounts())
    covers = [
        (path, os.open(path, os.O_PATH))
        for path, kind in mounts
        if path != _PROC and path.is_relative_to(_PROC) and kind not in ("autofs", "binfmt_misc")
    ]
    shown = {
        path for path, kind in mounts if kind == "proc" and not path.is_relative_to(_PROC) and path.exists()
    }
    for path in (_PROC, *sorted(shown)):
        _mount(Path("proc"), path, b"proc", _NOSUID | _NODEV | _NOEXEC)
    for path, descriptor in covers:
        _mount(Path(f"/proc/self/fd/{descriptor}"), path, None, _BIND | _REC)
        os.close(descriptor)


def _mounts() -> Iterator[tuple[Path, str]]:
    """Where something is mounted in this namespace, and which kind of file system it is."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        path = fields.split()[4].encode().decode("unicode_escape")  # a space is written as \040
        yield Path(path), kind.split(" ", 1)[0]


def shown(home: Path, directory: Path, named: Iterable[Path]) -> list[Path]:
    """What a job sees of the home: its own directory, and what its request names of other people's files.

    Those are whole directories beside the platform's own, and scripts.
    """
    home, found = home.resolve(), [directory.resolve()]
    for path in named:
        real = path.resolve()
        if not real.is_relative_to(home) or real == home:
            continue
        top = home / real.relative_to(home).parts[0]
        if top.name not in OWN and (top.is_dir() or top.suffix == ".py"):
            found.append(top)
    return found


def _below(home: Path, paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that exist below the home, each once."""
    return [path for path in dict.fromkeys(paths) if path.is_relative_to(home) and path.exists()]


def _unshare() -> None:
    """Mount and PID namespaces of this process's own; without the right to them, in a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWNS | _NEWPID) == 0:
        return
    if ctypes.get_errno() != errno.EPERM:
        raise _error("namespaces")
    if _libc.unshare(_NEWNS | _NEWPID | _NEWUSER) != 0:
        raise _error("a user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount(
    source: Path | None, target: Path, kind: bytes | None, flags: int, options: bytes | None = None
) -> None:
    given = None if source is None else os.fsencode(source)
    if _libc.mount(given, os.fsencode(target), kind, ctypes.c_ulong(flags), options) != 0:
        raise _error(f"mount {target}")


def _restrict() -> None:
    """Enter a Landlock domain that allows every path, and give up the rights that made the mounts."""
    abi = landlock_abi()
    if abi < _LEAST_ABI:
        raise OSError(errno.ENOSYS, f"Landlock {_LEAST_ABI} is needed, this kernel has {max(abi, 0)}")
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _error("no_new_privs")
    # Some right must be handled, or mounts could be undone; what is handled is then allowed everywhere.
    handled = _MAKE_BLOCK | _REFER
    words = (handled,) if abi < _SIGNAL_ABI else (handled, 0, _SCOPE_SIGNAL)
    attributes = (ctypes.c_uint64 * len(words))(*words)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)), 0)
    if ruleset < 0:
        raise _error("Landlock")
    root = os.open("/", os.O_PATH)
    rule = handled.to_bytes(8, sys.byteorder) + root.to_bytes(4, sys.byteorder)
    path_beneath = 1
    added = _libc.syscall(_ADD_RULE, ruleset, path_beneath, rule, 0)
    if added != 0 or _libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise _error("Landlock")
    os.close(root)
    os.close(ruleset)
    _give_up_rights()


def _give_up_rights() -> None:
    """Keep no capability, or as root those that programs of root expect and that do not reach outside."""
    held = int(Path("/proc/self/status").read_text().partition("CapPrm:")[2].split()[0], 16)
    keep = held & sum(1 << number for number in _ROOT_KEEPS) if os.geteuid() == 0 else 0
    for number in range(64):
        if not keep >> number & 1:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    low, high = keep & 0xFFFFFFFF, keep >> 32
    if _libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)) != 0:
        raise _error("capset")


def landlock_abi() -> int:
    """The version of Landlock that this kernel has; not positive if it has none."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
