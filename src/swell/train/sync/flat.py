"""Gradients and buffers as flat vectors in a segment that peers can read.

One bucket for each dtype, one place for each tensor, the same on every worker (checked by `digest`). Input
and output are separate regions: a reduction never overwrites what went into it, so after a death the
survivors still have their gradients. Buffers that a forward pass changes (batch norm's running statistics)
travel at the end of their bucket and come back as the mean over samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
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

    def flats(self, segment: Segment, region: int) -> list[Tensor]:
        """The buckets of region 0 (input) or 1 (output) of a segment."""
        base = region * self.region_bytes
        return [segment.tensor(b.dtype, base + b.offset_bytes, b.numel) for b in self.buckets]


class FlatModel:
    """A model's gradients and buffers, tied to a segment of this process."""

    def __init__(self, model: nn.Module, rank_buffers: dict[str, Tensor] | None = None) -> None:
        """With `rank_buffers` (consistent mode), these buffers travel instead of the model's own."""
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
        if rank_buffers is not None:
            self.buffers = {n: b for n, b in rank_buffers.items() if b.numel()}
        else:
            persistent = set(model.state_dict(keep_vars=True))
            self.buffers = {
                n: b
                for n, b in model.named_buffers()
                if n in persistent and b.is_floating_point() and b.numel()
            }
        self.layout = Layout(dict(self.parameters), self.buffers)
        self.segment = Segment.create(2 * self.layout.region_bytes)
        self.segment.touch()
        self.inputs = self.layout.flats(self.segment, 0)
        self.outputs = self.layout.flats(self.segment, 1)
        self.direct = False
        """True if the next sum is made on the device, so that gradients need not go through host memory."""
        self.summed_on_device = False
        """True if the last sum is on the device, False if it is in the output segment."""
        self._staged = self.device.type != "cpu"
        if self._staged:
            self.device_inputs = [t.to(self.device) for t in self.inputs]
            self.device_outputs = [t.to(self.device) for t in self.outputs]
        else:
            self.device_inputs, self.device_outputs = self.inputs, self.outputs
        into = self.layout.views(self.device_inputs)
        out = self.layout.views(self.device_outputs)
        place = {(s.name, s.buffer): i for i, s in enumerate(self.layout.slots)}
        self.grad_in = [into[place[n, False]] for n in self.parameters]
        self._grad_out = [out[place[n, False]] for n in self.parameters]
        self._buffer_in = [into[place[n, True]] for n in self.buffers]
        self._buffer_out = [out[place[n, True]] for n in self.buffers]

    def gather(self, weight: float) -> list[int]:
        """Copy gradients, and buffers times `weight`, into the input; returns parameters without gradient."""
        unused: list[int] = []
        places: list[Tensor] = []
        gradients: list[Tensor] = []
        for index, parameter in enumerate(self.parameters.values()):
            if parameter.grad is None:
                unused.append(index)
                self.grad_in[index].zero_()
            else:
                places.append(self.grad_in[index])
                gradients.append(parameter.grad)
        if places:
            torch._foreach_copy_(places, gradients)
        if self._buffer_in:
            torch._foreach_copy_(self._buffer_in, [b.detach() for b in self.buffers.values()])
            if weight != 1.0:
                torch._foreach_mul_(self._buffer_in, weight)
        if self._staged and not self.direct:
            torch._foreach_copy_(self.inputs, self.device_inputs)
        return unused

    @torch.no_grad()
    def gather_ranks(self, fresh: dict[str, Tensor]) -> None:
        """Copy the buffers of this worker's logical ranks into the input; gradients are there already."""
        for place, name in zip(self._buffer_in, self.buffers):
            if name in fresh:
                place.copy_(fresh[name])
            else:
                place.zero_()
        if self._staged:
            torch._foreach_copy_(self.inputs, self.device_inputs)

    def adopt_inputs(self) -> None:
        """Use the inputs as the sum, for a single member."""
        for parameter, gradient in zip(self.parameters.values(), self.grad_in):
            parameter.grad = gradient

    def adopt(self, unused: set[int]) -> None:
        """Make the reduced vectors the parameters' gradients and the model's buffers."""
        if self._staged and not self.summed_on_device:
            torch._foreach_copy_(self.device_outputs, self.outputs)
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = None if index in unused else self._grad_out[index]
        if self._buffer_out:
            with torch.no_grad():
                torch._foreach_copy_(list(self.buffers.values()), self._buffer_out)

    @property
    def sums(self) -> list[Tensor]:
        """The last sum, on the device or in the output segment."""
        return self.device_outputs if self.summed_on_device else self.outputs

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
