"""Small files that are never half-written, even if their writer is killed; and folders of one user alone."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
