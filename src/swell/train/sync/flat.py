"""Gradients and buffers as flat vectors in a segment that peers can read.

One bucket for each dtype, one place for each tensor, the same on every worker (checked by `digest`). Input
and output are separate regions: a reduction never overwrites what went into it, so after a death the
survivors still have their gradients. Buffers that a forward pass changes (batch norm's running statistics)
travel at the end of their bucket and come back as the mean over samples.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.sync.device import DeviceSegment, keep_to_part
from swell.train.sync.segment import Segment

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
