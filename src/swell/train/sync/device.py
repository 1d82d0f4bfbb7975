"""Memory of a GPU that processes on one host share: the handles of the CUDA driver, for torch's tensors.

A process describes its memory (`describe`), another one maps it (`Mapping.open`) and reads it at the speed of
the device. This needs no copy through the host and no collective library, and it works for several processes
on one GPU, where NCCL does not. Handles name whole allocations of the driver; torch puts several tensors into
one, so a description says where in the allocation the memory begins. Where the driver refuses (another GPU,
another container, virtual memory of torch's expandable segments) the answer is None, and data goes through
sockets instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

import torch
from torch import Tensor

from swell.train.agent.run_config import PER_GPU

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_SMALLEST = 1 << 9


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@functools.cache
def _driver() -> Any:
    """The CUDA driver's library, or None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    return library


@functools.cache
def _context(ordinal: int) -> ctypes.c_void_p:
    """The context of a device that torch uses too."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(ordinal))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    return context


def _enter(device: torch.device) -> bool:
    """Make the device's context that of this thread, as the driver's calls need; False without a driver."""
    driver = _driver()
    if driver is None:
        return False
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return not driver.cuCtxSetCurrent(_context(ordinal))


def keep_to_part(device: torch.device) -> None:
    """Where several workers share a GPU, have torch refuse this one more than its part of the memory."""
    workers = int(os.environ.get(PER_GPU) or 1)
    if device.type == "cuda" and workers > 1:
        torch.cuda.set_per_process_memory_fraction(1.0 / workers, device)


def identity(device: torch.device) -> str:
    """What names a GPU on every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocation(tensor: Tensor) -> tuple[int, int] | None:
    """Begin and size of the driver's allocation that a tensor's memory lies in."""
    base, size, pointer = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(tensor.data_ptr())
    if not _enter(tensor.device):
        return None
    failed = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
    return None if failed else (base.value, size.value)


def describe(tensor: Tensor) -> dict[str, Any] | None:
    """What another process needs to map the allocation around a tensor; None if that cannot be shared."""
    found = allocation(tensor)
    if found is None:
        return None
    handle = _Handle()
    if _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(found[0])):
        return None
    offset = tensor.data_ptr() - found[0]
    return {"handle": bytes(handle.reserved).hex(), "offset": offset, "bytes": found[1]}


class Mapping:
    """An allocation of another process, mapped into this one."""

    def __init__(self, base: int, size: int, device: torch.device) -> None:
        self._base, self._size, self._device = base, size, device

    @classmethod
    def open(cls, handle: str, size: int, device: torch.device) -> Mapping | None:
        """Map the allocation with this handle, or None where the driver refuses."""
        if not _enter(device):
            return None
        base = ctypes.c_uint64()
        raw = _Handle.from_buffer_copy(bytes.fromhex(handle))
        if _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), raw, _LAZY_PEER_ACCESS):
            return None
        return cls(base.value, size, device)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """A flat tensor over a part of the allocation; it keeps the mapping."""
        count = numel * torch.empty((), dtype=dtype).element_size()
        if offset_bytes < 0 or offset_bytes + count > self._size:
            raise ValueError(f"{count} bytes at {offset_bytes} are not within an allocation of {self._size}")
        view = _View(self, self._base + offset_bytes, count)
        return torch.as_tensor(view, device=self._device).view(dtype)

    def close(self) -> None:
        """Unmap the allocation; no tensor of it may be used any more."""
        base, self._base = self._base, 0
        if base and _enter(self._device):
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(base))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process there may be no driver any more
            self.close()


class _View:
    """Raw bytes on a device in the form that torch takes without a copy."""

    def __init__(self, owner: Mapping, pointer: int, count: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


class DeviceSegment:
    """Memory on a GPU with a single writer, as `Segment` is in shared memory of the host."""

    def __init__(self, data: Tensor | None, mapping: Mapping | None, offset_bytes: int) -> None:
        self._data, self._mapping, self._offset = data, mapping, offset_bytes
        self._token = os.urandom(16).hex()

    @classmethod
    def create(cls, data_bytes: int, device: torch.device) -> DeviceSegment:
        """Fresh memory of this process."""
        return cls(torch.zeros(max(data_bytes, _SMALLEST), dtype=torch.uint8, device=device), None, 0)

    @classmethod
    def open(cls, description: dict[str, Any] | None, device: torch.device) -> DeviceSegment | None:
        """Map a peer's memory, or None where that cannot be done."""
        if not description or device.type != "cuda" or description.get("gpu") != identity(device):
            return None
        mapping = Mapping.open(description["handle"], int(description["bytes"]), device)
        return None if mapping is None else cls(None, mapping, int(description["offset"]))

    def describe(self) -> dict[str, Any] | None:
        """What a peer needs to open this; None if the memory cannot be shared."""
        assert self._data is not None
        found = describe(self._data)
        if found is None:
            return None
        return found | {"gpu": identity(self._data.device), "token": self._token, "pid": os.getpid()}

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """A flat tensor over a part of the data."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if self._mapping is not None:
            return self._mapping.tensor(dtype, self._offset + offset_bytes, numel)
        assert self._data is not None
        count = numel * torch.empty((), dtype=dtype).element_size()
        return self._data[offset_bytes : offset_bytes + count].view(dtype)
