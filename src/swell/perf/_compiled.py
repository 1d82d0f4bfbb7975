"""One way to compile hot loops: numba, cached on disk, typed for the checker.

Modules that need compiled code import this one late, inside functions, because importing numba alone takes
a good part of a second and many commands never need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code: compiled when it is first called, then loaded from disk."""
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))
