"""Files and folders that a job may have replaced by something else, and files that a crash must not lose.

A job can put anything in the place of its own files: a pipe that blocks its reader, a link to a file
that is none of its business, a file of two gigabytes, a thousand folders inside each other. The platform
reads, measures and removes what jobs own only through this module: by descriptor, so that nothing can be
swapped between a look and the use of what was seen, and never through a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 4 << 20
"""Most bytes that are read of a small file."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BEAT_ENTRIES = 1000
"""After so many entries of a folder a caller may give a sign of life."""


@dataclass(frozen=True, slots=True)
class Met:
    """Something that `walk` met in a folder, as it was at that moment."""

    folder: int
    """Descriptor of the folder that it is in; open until the next entry is taken."""
    above: Sequence[str]
    """The names of the folders that lead to it; changes with the next entry."""
    name: str
    facts: os.stat_result
    """Of the entry itself, never of what a link leads to."""

    @property
    def path(self) -> str:
        """Where it is, relative to the folder that is walked through."""
        return "/".join((*self.above, self.name))

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder. All that `walk` meets in it comes before it."""
        return stat.S_ISDIR(self.facts.st_mode)


@dataclass(slots=True)
class _Level:
    """A folder on the way down."""

    name: str
    facts: os.stat_result
    left: list[str]
    """Entries that have not been met."""


def open_regular(path: str | Path, within: int | None = None) -> BinaryIO:
    """Open a plain file for reading, without ever blocking; OSError if it is something else or a link.

    `within`: the descriptor of the folder that the path begins in.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=within)
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


@contextlib.contextmanager
def folder(top: Path | int, *parts: str) -> Iterator[int]:
    """A descriptor of a folder below `top`, which is a descriptor, or a path that no job can change. None of
    `parts` may be a link, or OSError is raised."""
    here = os.dup(top) if isinstance(top, int) else os.open(top, _FOLDER)
    try:
        for part in parts:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def walk(
    top: int,
    *,
    failed: Callable[[OSError], None] | None = None,
    unlock: bool = False,
    most_depth: int | None = None,
    enter: Callable[[str, os.stat_result], bool] = lambda name, facts: True,
) -> Iterator[Met]:
    """Everything in a folder and in the folders below it; a folder comes after its content.

    Links are met, never followed. Two descriptors are enough for any depth. `failed` receives what cannot be
    read, which is then left out; without it the OSError is raised. `unlock`: give this process the right
    to change folders of its own account. `most_depth`: OSError if folders are nested more deeply. `enter`:
    by its name and facts, whether to look into a folder.
    """
    here = os.dup(top)
    try:
        above, levels = list[str](), [_Level("", os.fstat(here), _names(here))]
        while True:
            level = levels[-1]
            if not level.left:
                levels.pop()
                if not levels:
                    return
                here = _up(here, levels[-1].facts)
                above.pop()
                yield Met(here, above, level.name, level.facts)
                continue
            name = level.left.pop()
            try:
                found = os.stat(name, dir_fd=here, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode) or not enter(name, found):
                    yield Met(here, above, name, found)
                    continue
                below, names = _down(name, here, level.facts, unlock=unlock)
            except FileNotFoundError:
                continue
            except OSError as error:
                if failed is None:
                    raise
                failed(error)
                continue
            os.close(here)
            here = below
            above.append(name)
            levels.append(_Level(name, os.fstat(here), names))
            if most_depth is not None and len(above) > most_depth:
                raise OSError(errno.ENAMETOOLONG, f"folders are nested more than {most_depth} deep")
    finally:
        os.close(here)


def _down(name: str, here: int, facts: os.stat_result, *, unlock: bool) -> tuple[int, list[str]]:
    """Open a folder of the folder `here`, whose facts are given; returns its descriptor and its content."""
    if unlock:
        _unlock(name, here)
    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
    try:
        # A folder without the right to pass through it cannot be left again.
        if not os.path.samestat(os.stat("..", dir_fd=below), facts):
            raise OSError(errno.EAGAIN, "a folder was moved while it was read", name)
        return below, _names(below)
    except BaseException:
        os.close(below)
        raise


def _names(descriptor: int) -> list[str]:
    return os.listdir(descriptor)


def _up(here: int, facts: os.stat_result) -> int:
    """Leave a folder for the one above it, which must be the one with these facts; returns its descriptor."""
    above = os.open("..", _FOLDER, dir_fd=here)
    if not os.path.samestat(os.fstat(above), facts):
        os.close(above)
        raise OSError(errno.EAGAIN, "a folder was moved while it was read")
    os.close(here)
    return above


def _unlock(name: str | Path, within: int | None) -> None:
    """Give the owner of a folder every right to it, if this process may."""
    with contextlib.suppress(OSError):
        seen = os.open(
            name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within
        )  # needs no right to the folder itself
        try:
            if os.fstat(seen).st_mode & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{seen}", 0o700)  # noqa: PTH101 - the descriptor cannot be swapped
        finally:
            os.close(seen)


def _on_disk_of(top: int) -> Callable[[str, os.stat_result], bool]:
    """Whether a folder is on the same file system as the folder `top`: what is mounted below it is spared."""
    device = os.fstat(top).st_dev
    return lambda name, facts: facts.st_dev == device


def used_bytes(path: str | Path, within: int | None = None, beat: Callable[[], None] = lambda: None) -> int:
    """The disk space that the files in a folder use, each file once; 0 if it is no folder.

    What cannot be read is left out. `beat` is called now and then.
    """
    total, counted = 0, set[int]()
    with contextlib.suppress(OSError):
        top = os.open(path, _FOLDER | os.O_NOFOLLOW, dir_fd=within)
        try:
            for number, entry in enumerate(walk(top, failed=lambda error: None, enter=_on_disk_of(top))):
                if number % _BEAT_ENTRIES == 0:
                    beat()
                if entry.is_folder or entry.facts.st_ino in counted:
                    continue
                if entry.facts.st_nlink > 1:
                    counted.add(entry.facts.st_ino)
                total += entry.facts.st_blocks * 512
        finally:
            os.close(top)
    return total


def remove_tree(path: str | Path, within: int | None = None, beat: Callable[[], None] = lambda: None) -> None:
    """Remove a folder of any depth with all that is in it; a link or a file of this name is removed itself.

    Raises the first OSError if something is left. `beat` is called now and then.
    """
    errors: list[OSError] = []
    _unlock(path, within)
    try:
        top = os.open(path, _FOLDER | os.O_NOFOLLOW, dir_fd=within)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(path, dir_fd=within)
        return
    try:
        for number, entry in enumerate(walk(top, failed=errors.append, unlock=True, enter=_on_disk_of(top))):
            if number % _BEAT_ENTRIES == 0:
                beat()
            try:
                (os.rmdir if entry.is_folder else os.unlink)(entry.name, dir_fd=entry.folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append(error)
    finally:
        os.close(top)
    if errors:
        raise errors[0]
    os.rmdir(path, dir_fd=within)


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
