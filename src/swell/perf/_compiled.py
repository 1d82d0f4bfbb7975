"""One way to compile hot loops: numba, cached on disk, typed for the checker.

Modules that need compiled code import this one late, inside functions, because importing numba alone takes
a good part of a second and many commands never need it.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

import numba

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code: compiled when it is first called, then loaded from disk.

    numba keeps machine code beside the module or in the user's home. Where neither can be written, it is kept
    among the machine's temporary files, or else in memory alone.
    """
    try:
        return _njit(function, keep=True)
    except RuntimeError:  # numba found no place
        return _njit(function, keep=_other_place())


def _njit(function: F, *, keep: bool) -> F:
    return cast(F, numba.njit(cache=keep, error_model="numpy")(function))


@cache
def _other_place() -> bool:
    """Make numba cache machine code in a folder of this account alone; False if that is impossible."""
    try:
        path = Path(tempfile.gettempdir(), f"swell-compiled-{os.getuid()}")
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        mine = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
        if mine and os.access(path, os.W_OK):  # its content is executed, so no other account may write there
            numba.config.CACHE_DIR = str(path)  # type: ignore[attr-defined]
            return True
    except OSError:
        pass
    log.warning("policies are compiled at every start: set NUMBA_CACHE_DIR to a folder that can be written")
    return False
