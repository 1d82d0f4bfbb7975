"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Refuse an output file that cannot be written now, rather than after an hour of work."""
    from swell.domain import InputError

    folder = path.parent
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give the name of a file to write")
    if not folder.is_dir():
        raise InputError(f"{path}: there is no directory '{folder}'; make it, or give another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{path}: cannot be written: permission denied; give another file")
