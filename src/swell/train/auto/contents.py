"""What is in a batch, as a few numbers that workers compare: they differ where the batches do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_LEAVES = 1_000
"""Of a batch at most about so many things are compared."""
_LOOKED_AT = 1 << 18
"""Of a large tensor at most about so many elements are compared."""


def sums(given: Sequence[Any]) -> list[list[float]]:
    """Sums over the tensors on this machine that a model is given, and over their sizes."""
    found = []
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
            values = tensor.detach().to(torch.float64)
            found.append([float(values.sum()), float(values.abs().sum()), tensor.numel()])
    return found


class LateSums:
    """Sums over tensors on a device, which are read with the next batch: reading them at once would wait for
    all that the device has to do."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._copied: tuple[int, Tensor, Any] | None = None
        """Those of the batch before: its generation, the sums, and the event of their arrival here."""

    def add(self, given: Sequence[Any]) -> None:
        """Take the sums over these tensors, those on a device."""
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "meta") and tensor.numel():
                values = tensor.detach()
                if values.is_complex():
                    values = torch.view_as_real(values.resolve_conj())
                elif values.element_size() == 1:  # these have no absolute values
                    values = values.float()
                self._sums += [values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)]

    def batch_computed(self, generation: int) -> None:
        """The batch is over: its sums begin to be copied."""
        taken, self._sums = self._sums, []
        self._copied = None
        if taken:
            sums_ = torch.stack(taken)
            event = torch.cuda.Event() if sums_.device.type == "cuda" else None  # type: ignore[no-untyped-call]
            copied = sums_.to("cpu", non_blocking=event is not None)
            if event is not None:
                event.record()
            self._copied = generation, copied, event

    def read(self, generation: int) -> list[list[float]]:
        """The sums of the batch before, if the members are the same as then."""
        if self._copied is None or self._copied[0] != generation:
            return []
        _, copied, event = self._copied
        if event is not None:
            event.synchronize()
        values = copied.tolist()
        return [[total, sizes, 1] for total, sizes in zip(values[::2], values[1::2])]


def contents(batch: Any) -> list[list[float]]:
    """Numbers that differ if two batches do: sums over tensors, and sums of the bits of anything else."""
    found: list[list[float]] = []
    ahead: list[Any] = [batch]
    while ahead and len(found) < _MOST_LEAVES:
        item = ahead.pop()
        item = item.item() if isinstance(item, np.generic) else item
        if isinstance(item, np.ndarray) and item.dtype.kind in "biuf":
            item = torch.from_numpy(np.ascontiguousarray(item))
        if isinstance(item, Tensor) and item.layout is torch.strided:
            flat = item.reshape(-1)
            found += [*sums([flat[:: max(1, flat.numel() // _LOOKED_AT)]]), [float(flat.numel()), 0.0, 1]]
        elif isinstance(item, Mapping):
            ahead += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            ahead += item
        elif isinstance(item, bool | int | float):
            found.append([float(item), abs(float(item)), 1])
        elif item is None or isinstance(item, str | bytes):
            found.append([float(zlib.crc32(repr(item).encode())), 0.0, 1])
        elif hasattr(item, "__dict__"):
            ahead += [type(item).__name__, vars(item)]
    return found
