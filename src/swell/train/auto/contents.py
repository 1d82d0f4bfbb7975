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
    """Sums over the tensors that a model is given, and over their sizes; a device is not made to wait."""
    found = []
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
            values = tensor.detach().to(torch.float64)
            found.append([float(values.sum()), float(values.abs().sum()), tensor.numel()])
    return found


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
