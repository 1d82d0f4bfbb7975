"""A wall around a job: it sees neither the platform's home nor other jobs, though it has the same account.

    python -m swell.engines.wall       exit code 0 if this machine allows it, else a line that says why not

The supervisor of a job enters the wall before any code of the job runs, and all its children inherit it:

- A mount namespace in which the home is empty but for the job's own directory and what its request names. So
  no path leads to tokens, store or other jobs' files.
- A Landlock domain. A process in it can neither read the memory of a process outside nor reach files through
  it (/proc/PID/root), cannot undo the mounts, and from Landlock 6 on cannot send signals to the outside.

A job that may write files of its account can still plant something that the account runs later, outside: in
~/.bashrc, say. Against that only another account helps (`swell up --run-as`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "SWELL_WALL"
"""Environment variable that tells a supervisor, as JSON, what to hide; see `swell.engines.local`."""
OWN = frozenset(("tokens", "jobs", "gpus"))
"""Directories of a home that belong to the platform: none of them is shown because a request names it."""

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
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

_libc = ctypes.CDLL(None, use_errno=True)


def enter(home: Path, visible: Iterable[Path], read_only: Iterable[Path] = ()) -> None:
    """Put this process behind the wall, for good; OSError if that is not possible.

    Of `home` only the paths in `visible` are there afterwards, and what is mounted at the paths in
    `read_only` cannot be changed. The process must have no threads.
    """
    os.chdir("/")  # a working directory in the home would still be the real one
    home = home.resolve()
    _unshare()
    _mount(None, Path("/"), None, _REC | _SLAVE)
    kept = [(path, os.open(path, os.O_PATH)) for path in _below(home, visible)]
    _mount(Path("tmpfs"), home, b"tmpfs", _NOSUID | _NODEV, b"size=64k,mode=755")
    for path, descriptor in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Path(f"/proc/self/fd/{descriptor}")
        path.mkdir() if source.is_dir() else path.touch()
        _mount(source, path, None, _BIND | _REC)
        os.close(descriptor)
    _mount(None, home, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    for path in read_only:
        flags = os.statvfs(path).f_flag & (_NOSUID | _NODEV | _NOEXEC)
        _mount(path, path, None, _BIND | _REC)
        _mount(None, path, None, _REMOUNT | _BIND | _RDONLY | flags)
    _restrict()


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
    """A mount namespace of this process's own; without the right to one, in a user namespace of its own."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWNS) == 0:
        return
    if ctypes.get_errno() != errno.EPERM:
        raise _error("unshare")
    if _libc.unshare(_NEWNS | _NEWUSER) != 0:
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


def main() -> int:
    """Try the wall in this process, on a home of its own."""
    with tempfile.TemporaryDirectory(prefix="swell-wall-") as folder:
        home = Path(folder, "home")
        (home / "jobs" / "a").mkdir(parents=True)
        (home / "tokens").mkdir()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                enter(home, [home / "jobs" / "a"])
                code = 1 if (home / "tokens").exists() else 0
            except OSError as error:
                sys.stderr.write(f"{error.strerror}\n")
                sys.stderr.flush()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
