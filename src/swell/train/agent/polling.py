"""Which of a few descriptors can be read or written: `select.select` without its limit of 1,024 descriptors.

`select.select` raises ValueError for descriptors from 1024 on, and a process gets there by having many files
or connections open, its own or a stranger's. So nothing in swell uses it (ruff refuses it).
This wraps `select.poll` directly, because members of a job call it for every message and the module
`selectors` takes four times as long.
"""

from __future__ import annotations

import math
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


File = TypeVar("File", bound=int | _HasDescriptor)


def readable(files: Iterable[File], timeout_s: float | None = None) -> list[File]:
    """Those of the files that can be read, or have ended, within `timeout_s`; without one, wait for one.

    A file that is closed already is left out: reading it is an error that its owner finds.
    """
    poller = select.poll()
    by_descriptor: dict[int, File] = {}
    for file in files:
        descriptor = file if isinstance(file, int) else file.fileno()
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
            by_descriptor[descriptor] = file
    wait_ms = None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1e3)
    return [by_descriptor[descriptor] for descriptor, _ in poller.poll(wait_ms)]


def writable(file: _HasDescriptor) -> bool:
    """Whether some hundred bytes can be sent without waiting."""
    poller = select.poll()
    poller.register(file.fileno(), select.POLLOUT)
    return bool(poller.poll(0))
