"""How a state travels to newcomers: staged in one piece of memory, and loaded in place.

`statetree` takes a state apart into a JSON document and tensors. This module lays the tensors out one after
the other in a segment, which newcomers on the same host map and others receive through a socket. Models and
optimizers are loaded *in place*: views of gradients and compiled code stay valid, and nothing is allocated
while other workers wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.sync.segment import Segment

_ALIGN_BYTES = 64
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
