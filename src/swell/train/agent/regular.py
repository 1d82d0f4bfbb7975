"""Reading files that a job may have replaced by something else.

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
