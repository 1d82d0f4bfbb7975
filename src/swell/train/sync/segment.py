"""Shared memory with a single writer: the fast connection between workers on one host.

A segment is an anonymous memory file. Its owner writes, peers map it read-only through the owner's descriptor
table, and it vanishes with the last process that maps it, however that process ends: nothing is left behind
in /dev/shm. A random token at its start proves that a peer opened the segment it was told about and not one
of another process with the same number on another host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

import torch

_HEADER_BYTES = 64
_TOKEN_BYTES = 32
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Used in place of `mmap` methods that would hold Python's global lock and so stop all other threads."""


class Segment:
    """A mapped piece of memory; `data` begins after the token."""

    def __init__(self, mapping: mmap.mmap, descriptor: int, token: bytes, owner: bool) -> None:
        self._map = mapping
        self._descriptor = descriptor
        self._token = token
        self._owner = owner
        self.data_bytes = len(mapping) - _HEADER_BYTES

    @classmethod
    def create(cls, data_bytes: int) -> Segment:
        """A fresh segment owned by this process; private memory where the system has no memory files."""
        size = _HEADER_BYTES + max(data_bytes, 1)
        token = os.urandom(_TOKEN_BYTES)
        if not hasattr(os, "memfd_create"):
            return cls(mmap.mmap(-1, size), -1, token, True)
        descriptor = os.memfd_create("swell", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
        mapping[:_TOKEN_BYTES] = token
        return cls(mapping, descriptor, token, True)

    @classmethod
    def open(cls, description: dict[str, Any] | None) -> Segment | None:
        """Map a peer's segment, or None where that cannot be done (another host, another user)."""
        if not description or description["descriptor"] < 0:
            return None
        size = int(description["bytes"])
        path = f"/proc/{int(description['pid'])}/fd/{int(description['descriptor'])}"
        try:
            # Opened for writing, because torch has no read-only tensors; but only the owner ever writes.
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != size:
                return None
            mapping = mmap.mmap(descriptor, size)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        token = bytes.fromhex(str(description["token"]))
        if mapping[:_TOKEN_BYTES] != token:
            return None
        if _libc is not None:  # without it, pages are mapped one by one when they are first read
            _libc.madvise(ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(size), _MADV_POPULATE_READ)
        return cls(mapping, -1, token, False)

    def describe(self) -> dict[str, Any]:
        """What a peer needs to open the segment."""
        return {
            "pid": os.getpid(),
            "descriptor": self._descriptor,
            "bytes": len(self._map),
            "token": self._token.hex(),
        }

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A flat tensor over a part of the data."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=_HEADER_BYTES + offset_bytes)

    def bytes(self, offset_bytes: int, count: int) -> memoryview:
        """Raw bytes of a part of the data."""
        begin = _HEADER_BYTES + offset_bytes
        return memoryview(self._map)[begin : begin + count]

    def touch(self) -> None:
        """Bring every page into memory now, so that no step waits for it later."""
        ctypes.memset(_address(self._map) + _HEADER_BYTES, 0, self.data_bytes)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
