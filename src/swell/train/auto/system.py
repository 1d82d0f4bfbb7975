"""The system's own calls for files, taken before those of an unmodified script are redirected (`files`)."""

from __future__ import annotations

import contextlib
import io
import os
import shutil

open_file = io.open
open_descriptor = os.open
stat, mkdir, listdir = os.stat, os.mkdir, os.listdir
link, scandir, replace, remove = os.link, os.scandir, os.replace, os.remove
copyfile, rmtree = shutil.copyfile, shutil.rmtree


def open_log(path: os.PathLike[str]) -> io.FileIO:
    """A file that lines are added to, at once and not through a buffer."""
    return io.FileIO(path, "a")


def exists(path: str) -> bool:
    """Whether there is such a file or folder."""
    try:
        stat(path)
    except (OSError, ValueError):
        return False
    return True


def makedirs(path: str) -> None:
    """As `os.makedirs`, but by the system's own calls."""
    try:
        mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        makedirs(os.path.dirname(path))  # noqa: PTH120
        with contextlib.suppress(FileExistsError):
            mkdir(path)


def keep_all(path: str, place: str) -> None:
    """Keep a file or a folder that is removed next: by further links, without copying, where that works."""

    def keep(source: str, target: str) -> None:
        try:
            link(source, target)
        except OSError:
            copyfile(source, target)

    if os.path.isdir(path):  # noqa: PTH112
        shutil.copytree(path, place, copy_function=keep)
    else:
        keep(path, place)
