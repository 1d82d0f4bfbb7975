"""Memory of members: segments that others may read, gradients and buffers as flat vectors in them,
allocations on a device that others map, and copies from one member to another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.agent.run_config import PER_GPU

# ---------------------------------------------------------------------- shared memory with one writer
# Shared memory with a single writer: the fast connection between workers on one host.
#
# A segment is an anonymous memory file. Its owner writes, peers map it read-only through the owner's
# descriptor table, and it vanishes with the last process that maps it, however that process ends: nothing
# is left behind in /dev/shm. A random token at its start proves that a peer opened the segment it was told
# about and not one of another process with the same number on another host.


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


# ---------------------------------------------------------------------- memory on a device
# Memory of a GPU that processes on one host share: the handles of the CUDA driver, for torch's tensors.
#
# A process describes its memory (`handle_of`), another one maps it (`Mapping.open`) and reads it at the
# speed of the device. This needs no copy through the host and no collective library, and it works for
# several processes on one GPU, where NCCL does not. Handles name whole allocations of the driver; torch
# puts several tensors into one, so a description says where in the allocation the memory begins. Where the
# driver refuses (another GPU, another container, virtual memory of torch's expandable segments) the answer
# is None, and data goes through sockets instead.


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


def handle_of(tensor: Tensor) -> dict[str, Any] | None:
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
        found = handle_of(self._data)
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


# ---------------------------------------------------------------------- gradients and buffers as vectors
# Gradients and buffers as flat vectors in a segment that peers can read.
#
# One bucket for each dtype, one place for each tensor, the same on every worker (checked by `digest`).
# Input and output are separate regions: a reduction never overwrites what went into it, so after a death
# the survivors still have their gradients. Buffers that a forward pass changes (batch norm's running
# statistics) travel at the end of their bucket and come back as the mean over samples.


_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Bucket:
    """One dtype's flat vector: where it lies in a region, and how much of it is gradients."""

    dtype: torch.dtype
    offset_bytes: int
    numel: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place."""

    name: str
    bucket: int
    offset: int
    numel: int
    shape: torch.Size
    buffer: bool


class Layout:
    """Where each trainable parameter and each float buffer lies; always the same for the same model."""

    def __init__(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        dtypes = list(dict.fromkeys(t.dtype for t in [*parameters.values(), *buffers.values()]))
        offset_bytes = 0
        for index, dtype in enumerate(dtypes):
            step = max(1, _ALIGN_BYTES // torch.empty((), dtype=dtype).element_size())
            position = gradients = 0
            for group, is_buffer in ((parameters, False), (buffers, True)):
                for name, tensor in group.items():
                    if tensor.dtype != dtype:
                        continue
                    self.slots.append(Slot(name, index, position, tensor.numel(), tensor.shape, is_buffer))
                    position += -(-tensor.numel() // step) * step
                if not is_buffer:
                    gradients = position
            self.buckets.append(Bucket(dtype, offset_bytes, position, gradients))
            offset_bytes += position * torch.empty((), dtype=dtype).element_size()
            offset_bytes = -(-offset_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.region_bytes = offset_bytes
        text = repr(
            [(s.name, tuple(s.shape), str(self.buckets[s.bucket].dtype), s.offset) for s in self.slots]
        )
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def views(self, flats: list[Tensor]) -> list[Tensor]:
        """Each slot as a view of the buckets' flat tensors."""
        return [flats[s.bucket][s.offset : s.offset + s.numel].view(s.shape) for s in self.slots]

    def flats(self, segment: Segment | DeviceSegment, region: int) -> list[Tensor]:
        """The buckets of region 0 (input) or 1 (output) of a segment."""
        base = region * self.region_bytes
        return [segment.tensor(b.dtype, base + b.offset_bytes, b.numel) for b in self.buckets]


class FlatModel:
    """A model's gradients and buffers, and the memory from which peers read them."""

    sharded = False
    """Whether each worker has only its part of the parameters (see `replicas/sharded`)."""
    stride = 1
    """Workers of a replica: members whose ranks differ by a multiple of it hold the same part."""
    position = 0
    """This worker's place in its replica."""

    def __init__(self, model: nn.Module, buffers: dict[str, Tensor] | None = None) -> None:
        """With `buffers` these travel instead of all of the model's own."""
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise UsageError(
                "model: it has no parameter that requires a gradient, so there is nothing to train"
            )
        devices = {p.device for p in self.parameters.values()}
        if len(devices) > 1:
            raise UsageError(
                "model: its parameters are on several devices "
                f"({', '.join(map(str, sorted(devices, key=str)))}); "
                "move all of it to one with model.to(device)"
            )
        self.device = devices.pop()
        self._ordered = list(self.parameters.values())
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"model: it is on {self.device}; elastic jobs train on cpu or cuda")
        keep_to_part(self.device)
        if buffers is not None:
            self.buffers = {n: b for n, b in buffers.items() if b.numel()}
        else:
            persistent = set(model.state_dict(keep_vars=True))
            self.buffers = {
                n: b
                for n, b in model.named_buffers()
                if n in persistent and b.is_floating_point() and b.numel()
            }
        self.layout = Layout(dict(self.parameters), self.buffers)
        self._memory: Memory | None = None
        self._lock = threading.Lock()
        self._hooks: list[Any] = []

    @property
    def digest(self) -> str:
        """What all workers must have in common."""
        return self.layout.digest

    def memory(self) -> Memory:
        """The memory that peers read, allocated when it is first needed: a job of one worker has none."""
        with self._lock:
            if self._memory is None:
                self._memory = Memory(self)
            return self._memory

    def describe(self) -> dict[str, Any] | None:
        """What a peer needs to read this worker's memory."""
        return self.memory().segment.describe()

    def open(self, description: dict[str, Any] | None) -> Segment | DeviceSegment | None:
        """A peer's memory, or None if it cannot be read from here."""
        if self.device.type == "cuda":
            return DeviceSegment.open(description, self.device)
        return Segment.open(description)

    @property
    def inputs(self) -> list[Tensor]:
        """What goes into the sum, by bucket."""
        return self.memory().inputs

    @property
    def outputs(self) -> list[Tensor]:
        """The sum, by bucket."""
        return self.memory().outputs

    @property
    def grad_in(self) -> list[Tensor]:
        """The place of each parameter's gradient in the input."""
        return self.memory().grad_in

    def watch(self, ready: Callable[[int], None] | None) -> None:
        """Have `ready` called with a parameter's index when backward has its gradient; None: no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if ready is not None:
            for index, parameter in enumerate(self.parameters.values()):
                hook = functools.partial(_told, ready, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    @property
    def watched(self) -> bool:
        """Whether a function is called for each gradient."""
        return bool(self._hooks)

    @torch.no_grad()
    def keep(self, index: int) -> bool:
        """Move a parameter's gradient into its place in the input, and make the gradient a view of that.

        Later micro-batches then add to the input itself. False if that cannot be done (a sparse gradient).
        """
        parameter, place = self._ordered[index], self.memory().grad_in[index]
        gradient = parameter.grad
        if gradient is place:
            return True
        if gradient is None or gradient.layout != torch.strided:
            return False
        place.copy_(gradient)
        parameter.grad = place
        return True

    def gather(self, weight: float) -> list[int]:
        """Complete the input: gradients that are elsewhere (as they are), and buffers times `weight`.

        Returns the parameters that have no gradient.
        """
        memory, unused = self.memory(), []
        places: list[Tensor] = []
        gradients: list[Tensor] = []
        for index, parameter in enumerate(self._ordered):
            gradient, place = parameter.grad, memory.grad_in[index]
            if gradient is None:
                unused.append(index)
                place.zero_()
            elif gradient is not place:
                places.append(place)
                gradients.append(gradient)
        if places:
            torch._foreach_copy_(places, gradients)
        if memory.buffer_in:
            torch._foreach_copy_(memory.buffer_in, [b.detach() for b in self.buffers.values()])
            if weight != 1.0:
                torch._foreach_mul_(memory.buffer_in, weight)
        return unused

    @torch.no_grad()
    def take_back(self, unused: list[int]) -> None:
        """Give the parameters the gradients that `gather` put into the input, after a sum that broke.

        The gradients may be views of the output, which the sum has begun to overwrite.
        """
        for index, (parameter, place) in enumerate(zip(self._ordered, self.memory().grad_in)):
            if index not in unused and parameter.grad is not None and parameter.grad is not place:
                parameter.grad.copy_(place)

    @torch.no_grad()
    def gather_ranks(self, fresh: dict[str, Tensor]) -> None:
        """Copy the buffers of this worker's logical ranks into the input; gradients are there already."""
        for place, name in zip(self.memory().buffer_in, self.buffers):
            if name in fresh:
                place.copy_(fresh[name])
            else:
                place.zero_()

    def adopt_inputs(self) -> None:
        """Use the inputs as the sum, for a single member."""
        for parameter, gradient in zip(self.parameters.values(), self.grad_in):
            parameter.grad = gradient

    def adopt(self, unused: set[int]) -> None:
        """Make the reduced vectors the parameters' gradients and the model's buffers."""
        memory = self.memory()
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = None if index in unused else memory.grad_out[index]
        if memory.buffer_out:
            with torch.no_grad():
                torch._foreach_copy_(list(self.buffers.values()), memory.buffer_out)

    def settle(self) -> None:
        """Wait until the device has done what it was told, before a peer is told that it may read."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


def _told(ready: Callable[[int], None], index: int, _: Tensor) -> None:
    ready(index)


class Memory:
    """Input and output of the sum, where the model is: in shared memory of the host, or on the GPU."""

    def __init__(self, flat: FlatModel) -> None:
        layout, size = flat.layout, 2 * flat.layout.region_bytes
        self.segment: Segment | DeviceSegment
        if flat.device.type == "cuda":
            self.segment = DeviceSegment.create(size, flat.device)
        else:
            self.segment = Segment.create(size)
            self.segment.touch()
        self.inputs = layout.flats(self.segment, 0)
        self.outputs = layout.flats(self.segment, 1)
        for one, other in zip(self.inputs, self.outputs):  # a device loads its code when it is first used
            torch._foreach_copy_([other[:1]], [one[:1]])
            torch.add(one[:1], one[:1], out=other[:1])
        into, out = layout.views(self.inputs), layout.views(self.outputs)
        place = {(s.name, s.buffer): i for i, s in enumerate(layout.slots)}
        self.grad_in = [into[place[n, False]] for n in flat.parameters]
        self.grad_out = [out[place[n, False]] for n in flat.parameters]
        self.buffer_in = [into[place[n, True]] for n in flat.buffers]
        self.buffer_out = [out[place[n, True]] for n in flat.buffers]


# ---------------------------------------------------------------------- copies from member to member
# How a state travels to newcomers: staged in one piece of memory, and loaded in place.
#
# `statetree` takes a state apart into a JSON document and tensors. This module lays the tensors out one
# after the other in a segment, which newcomers on the same host map and others receive through a socket.
# Models and optimizers are loaded *in place*: views of gradients and compiled code stay valid, and nothing
# is allocated while other workers wait.


_LET_GO_AFTER_S = 1.0


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here: the tensor itself, unless it is sharded (a DTensor)."""
    to_local: Callable[[], Tensor] | None = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def describe(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Shape and dtype of each tensor, for JSON."""
    return [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]


def _offsets(description: list[list[Any]]) -> tuple[list[int], int]:
    offsets, position = [], 0
    for shape, dtype in description:
        offsets.append(position)
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        position += count * torch.empty((), dtype=getattr(torch, dtype)).element_size()
        position = -(-position // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, position


def staged_bytes(description: list[list[Any]]) -> int:
    """How much memory a staged copy of these tensors takes."""
    return _offsets(description)[1]


def staged(description: list[list[Any]], segment: Segment) -> list[Tensor]:
    """Views of a segment that hold tensors of this description one after the other."""
    out = []
    for (shape, dtype), offset in zip(description, _offsets(description)[0]):
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        out.append(segment.tensor(getattr(torch, dtype), offset, count).view(shape))
    return out


class HostBytes:
    """Tensors as raw memory of the host, to be sent (`filled`) or to be received and stored."""

    def __init__(self, tensors: list[Tensor], filled: bool = False) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for tensor in (t.detach() for t in tensors):
            host = tensor
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                host = torch.empty(tensor.shape, dtype=tensor.dtype)
                if filled:
                    host.copy_(tensor)
            self._pairs.append((tensor, host))
        flat = [host.reshape(-1).view(torch.uint8) for _, host in self._pairs if host.numel()]
        self.views = [memoryview(part.numpy().data) for part in flat]

    @torch.no_grad()
    def store(self) -> None:
        """Put what was received where it belongs."""
        for tensor, host in self._pairs:
            if tensor is not host:
                tensor.copy_(host)


def let_go(memory: list[Any]) -> None:
    """Unmap memory of other workers, but later, so that the next step does not wait for it."""
    if memory:
        timer = threading.Timer(_LET_GO_AFTER_S, memory.clear)
        timer.daemon = True
        timer.start()


@torch.no_grad()
def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor, in one call where the devices allow it."""
    if destinations and all(d.device == s.device for d, s in zip(destinations, sources)):
        torch._foreach_copy_(destinations, sources)
    else:
        for destination, source in zip(destinations, sources):
            destination.copy_(source)


@torch.no_grad()
def load_model(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy parameters and buffers in place, so that gradients' views and compiled code stay valid."""
    own = {name: local(tensor) for name, tensor in model_tensors(model).items()}
    if own.keys() != values.keys():
        odd = sorted(own.keys() ^ values.keys())
        raise UsageError(
            f"model: the saved state and this model differ in {', '.join(odd[:5])}; build the model that"
            " the job began with, or start a new job"
        )
    for name, tensor in own.items():
        if tensor.shape != values[name].shape:
            raise UsageError(
                f"model: {name} has shape {tuple(tensor.shape)} here and "
                f"{tuple(values[name].shape)} in the state"
            )
    copy_all([own[name] for name in values], list(values.values()))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, including buffers that state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """Like load_state_dict, but in place where the optimizer has such state already."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(_cloned(values))
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_groups = values["param_groups"]
    if sum(len(g["params"]) for g in saved_groups) != len(parameters):
        raise UsageError(
            "optimizer: the saved state has another number of parameters; build the optimizer that the job"
            " began with, or start a new job"
        )
    if len(values["state"]) and not all(p in optimizer.state for p in parameters[:1]):
        optimizer.load_state_dict(_cloned(values))
        return
    destinations: list[Tensor] = []
    sources: list[Tensor] = []
    for index, parameter in enumerate(parameters):
        saved = values["state"].get(index)
        if saved is None:
            optimizer.state.pop(parameter, None)
            continue
        mine = optimizer.state[parameter]
        for key in [k for k in mine if k not in saved]:
            del mine[key]
        for key, value in saved.items():
            here = mine.get(key)
            same = isinstance(value, Tensor) and isinstance(here, Tensor)
            if same and here.shape == value.shape and here.dtype == value.dtype:
                destinations.append(local(here))
                sources.append(local(value))
            elif isinstance(value, Tensor):
                keep = key == "step" and not value.dim()
                mine[key] = value.clone() if keep else value.to(parameter.device, copy=True)
            else:
                mine[key] = value
    copy_all(destinations, sources)
    for group, saved_group in zip(optimizer.param_groups, saved_groups):
        for key, value in saved_group.items():
            if key != "params":
                group[key] = _cloned(value)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(v) for v in value)
    return value
