"""What `--auto` finds out about a script from outside: its model, its batches, its variables.

The functions here only look at the script and copy values; `auto` decides how workers share the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from swell.train.data import plan
from swell.train.data.plan import Range
from swell.train.state import statetree

_MAX_ITEMS = 10_000
"""A variable with more parts than this counts as data, not as state."""
_MOST_MEMBERS = 32
"""Own objects are looked for in lists of at most this length (callbacks, say)."""


class Parts(nn.Module):
    """Several modules and loose parameters that one optimizer trains, as one model."""

    def __init__(self, modules: list[nn.Module], loose: list[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.loose = nn.ParameterList(loose)


def find_model(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """The module whose parameters the optimizers train; several modules are combined into one."""
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    place = {id(p): index for index, p in reversed(list(enumerate(trained)))}
    objects = gc.get_objects()  # hundreds of thousands, of some thousand types
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    modules: list[nn.Module] = [o for o in objects if type(o) in kinds]
    del objects
    inner = {id(child) for module in modules for child in list(module.modules())[1:]}
    owners: list[tuple[int, nn.Module]] = []
    for module in modules:
        if id(module) in inner:
            continue
        own = [place[id(p)] for p in module.parameters() if id(p) in place]
        if own:
            owners.append((min(own), module))
    owners.sort(key=lambda owner: owner[0])  # the same order on every worker
    covered = {id(p) for _, module in owners for p in module.parameters()}
    loose = [p for p in trained if id(p) not in covered]
    if len(owners) == 1 and not loose:
        return owners[0][1]
    return Parts([module for _, module in owners], [_as_parameter(p) for p in loose])


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    tensor.__class__ = nn.Parameter  # a bare tensor with requires_grad: as a parameter it can be registered
    return tensor  # type: ignore[return-value]


def part(size: int, rank: int, world: int) -> tuple[Range, bool]:
    """This worker's range of a batch, and whether its gradient counts.

    No worker gets a single sample of a larger batch, because batch norm refuses it. A worker for which
    nothing is left computes another worker's samples without effect, because its script expects a batch.
    """
    busy = max(1, min(world, size // 2))
    return plan.parts(size, busy)[rank % busy], rank < busy


# ---------------------------------------------------------------------- the script's variables

FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "pytorch_lightning", "accelerate")
"""Packages whose loops count steps and epochs: their variables travel like the script's own."""

_LIBRARIES = tuple(
    {
        f"{Path(folder).resolve()}{os.sep}"
        for folder in (*site.getsitepackages(), *sysconfig.get_paths().values(), *sys.path_importer_cache)
        if "site-packages" in str(folder) or "dist-packages" in str(folder)
    }
    | {f"{Path(sysconfig.get_paths()['stdlib']).resolve()}{os.sep}"}
)
_SWELL = f"{Path(__file__).resolve().parents[2]}{os.sep}"


def is_own(module: str, file: str) -> bool:
    """Whether code is the script's: its file, packages beside it or on its path, or a framework's loop."""
    if module.startswith(FRAMEWORKS):
        return True
    if not file or file.startswith(("<", _SWELL)):
        return False
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def script_frames() -> list[FrameType]:
    """The active calls of the script's own code, outermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def variables(frames: list[FrameType]) -> dict[str, Any]:
    """Numbers, texts and collections of them in the script's variables and in its own objects, by name.

    Names are 'depth.name' for a variable of the call at that depth, 'depth.name.attribute' inside objects.
    Tensors of one element, in which scripts add up losses, belong to them.
    """
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in _walk(frames)
        if _is_plain(value) or _is_number(value)
    }


def set_variables(frames: list[FrameType], values: dict[str, Any]) -> None:
    """Set the script's variables to other values in place, as a debugger does."""
    found = dict(_walk(frames))
    owners = {name: vars(value) for name, value in found.items() if _is_own(value)}
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        here = found.get(name)
        if isinstance(value, Tensor):
            if isinstance(here, Tensor) and _is_number(here) and here.dtype == value.dtype:
                here.copy_(value)
        elif owner in owners:
            with contextlib.suppress(AttributeError):  # a frozen object
                owners[owner][key] = value
        elif owner.isdigit() and int(owner) < len(frames):
            frame = frames[int(owner)]
            if _is_plain(frame.f_locals.get(key)):
                frame.f_locals[key] = value
                _to_fast(frame)


def stateful(frames: list[FrameType], besides: set[int]) -> dict[str, Any]:
    """Schedulers, scalers, averaged models and the like: variables with state_dict and load_state_dict."""
    out: dict[str, Any] = {}
    seen = set(besides)
    for name, item in _walk(frames):
        if id(item) in seen or isinstance(item, type | DataLoader):
            continue
        if not callable(getattr(item, "load_state_dict", None)) or not callable(
            getattr(item, "state_dict", None)
        ):
            continue
        seen.add(id(item))
        wrapped = getattr(item, "optimizer", None)
        if id(wrapped) in besides and hasattr(item, "step") and hasattr(item, "zero_grad"):
            continue  # a framework's wrapper of an optimizer, which travels itself
        if ".loops." in type(item).__module__:
            continue  # Lightning's loops: their counters travel as variables
        try:
            statetree.split(item.state_dict())
        except Exception:
            continue  # this worker keeps the object as its own script made it
        out[name] = item
    return out


def _walk(frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
    """All variables of the script's calls and, a few levels down, attributes of its own objects."""
    seen: set[int] = set()

    def inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        yield name, value
        if not depth:
            return
        if type(value) in (list, tuple) and len(value) <= _MOST_MEMBERS:
            for index, item in enumerate(value):
                if _is_own(item):
                    yield from inside(f"{name}[{index}]", item, depth - 1)
        elif _is_own(value) and id(value) not in seen:
            seen.add(id(value))
            for key, item in list(vars(value).items()):
                yield from inside(f"{name}.{key}", item, depth - 1)

    for index, frame in enumerate(frames):
        for key, value in list(frame.f_locals.items()):
            if not key.startswith(("__", ".")):
                yield from inside(f"{index}.{key}", value, 5)


def _is_own(value: Any) -> bool:
    """An object of a class that the script (or a framework's trainer) defines, besides modules and data."""
    kind = type(value)
    if kind.__module__ == "builtins" or isinstance(value, nn.Module | Dataset | DataLoader | type):
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    own = kind.__module__ == "__main__" or is_own(kind.__module__, file)
    return own and hasattr(value, "__dict__")


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def _is_plain(value: Any) -> bool:
    budget = _MAX_ITEMS

    def look(item: Any) -> bool:
        nonlocal budget
        budget -= 1
        if budget < 0:
            return False
        kind = type(item)
        if item is None or kind in (bool, int, float, str, bytes):
            return True
        if kind in (list, tuple, set, frozenset):
            return len(item) <= budget and all(look(i) for i in item)
        if kind is dict:
            return len(item) <= budget and all(look(k) and look(v) for k, v in item.items())
        return False

    return look(value)


def _to_fast(frame: FrameType) -> None:
    """Write `f_locals` back into a function's variables; Python 3.13 does so by itself."""
    if frame.f_code.co_name == "<module>" or sys.version_info >= (3, 13):
        return
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
