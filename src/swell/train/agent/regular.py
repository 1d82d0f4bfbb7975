"""Files read without trust, and files written so that a crash of the machine does not lose them.

A job can put anything in the place of its own files: a pipe that blocks whoever opens it, a link to a file
that is none of its business, a file of two gigabytes. The platform reads a job's files only through this
module.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 4 << 20
"""Most bytes that are read of a small file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a plain file for reading, without ever blocking; OSError if it is something else or a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int = MOST_BYTES) -> bytes:
    """The content of a small plain file; OSError if it is something else or too large."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return data


def open_for_append(path: Path) -> BinaryIO:
    """Open a plain file to add to it, never through a link; OSError if it is something else."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "ab")


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file at once: a crash leaves the old content or the new one, and after this the new one."""
    new = path.with_name(f".{path.name}")
    try:
        write_synced(new, data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)  # half a file would keep a full disk full
        raise
    sync_directory(path.parent)
