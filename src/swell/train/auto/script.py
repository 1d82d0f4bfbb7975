"""What `--auto` finds out about a script from outside: its model, its batches, its variables.

The functions here only look at the script and copy values; `auto` decides how workers share the training.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from swell.train.data import plan
from swell.train.data.plan import Range
from swell.train.state import statetree

_MAX_ITEMS = 10_000
"""A variable with more parts than this counts as data, not as state."""


class Parts(nn.Module):
    """Several modules and loose parameters that one optimizer trains, as one model."""

    def __init__(self, modules: list[nn.Module], loose: list[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.loose = nn.ParameterList(loose)


def find_model(optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module whose parameters `optimizer` trains; several modules are combined into one."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    place = {id(p): index for index, p in reversed(list(enumerate(trained)))}
    modules: list[nn.Module] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
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


def batches(loader: DataLoader[Any], seed: int) -> list[list[int]]:
    """The sample indices of each batch of one pass, as the loader's own sampler draws them under `seed`."""
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002 - scripts use the legacy generator
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
        for owner in (loader, loader.sampler, loader.batch_sampler):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        assert loader.batch_sampler is not None
        out = [list(batch) for batch in loader.batch_sampler]
    random.setstate(kept[0])
    np.random.set_state(kept[1])  # noqa: NPY002
    return out


def part(size: int, rank: int, world: int) -> tuple[Range, bool]:
    """This worker's range of a batch, and whether its gradient counts.

    No worker gets a single sample of a larger batch, because batch norm refuses it. A worker for which
    nothing is left computes another worker's samples without effect, because its script expects a batch.
    """
    busy = max(1, min(world, size // 2))
    return plan.parts(size, busy)[rank % busy], rank < busy


# ---------------------------------------------------------------------- the script's variables


def script_frames(root: Path) -> list[FrameType]:
    """The active calls of the script and of modules beside it, outermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    here = str(Path(__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(root)) and not name.startswith(here) and "site-packages" not in name:
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def variables(frames: list[FrameType], root: Path) -> dict[str, Any]:
    """Numbers, texts and collections of them in the script's variables and in its own objects, by name.

    Names are 'depth.name' for a variable of the call at that depth, 'depth.name.attribute' inside objects.
    """
    return {name: value for name, value in _walk(frames, root) if _is_plain(value)}


def set_variables(frames: list[FrameType], values: dict[str, Any], root: Path) -> None:
    """Set the script's variables to other values in place, as a debugger does."""
    owners = {name: vars(value) for name, value in _walk(frames, root) if _is_own(value, root)}
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        if owner in owners:
            owners[owner][key] = value
        elif owner.isdigit() and int(owner) < len(frames):
            frame = frames[int(owner)]
            if _is_plain(frame.f_locals.get(key)):
                frame.f_locals[key] = value
                _to_fast(frame)


def stateful(frames: list[FrameType], root: Path, besides: set[int]) -> dict[str, Any]:
    """Schedulers, scalers, averaged models and the like: variables with state_dict and load_state_dict."""
    out: dict[str, Any] = {}
    seen = set(besides)
    for name, item in _walk(frames, root):
        if id(item) in seen or isinstance(item, type):
            continue
        if not callable(getattr(item, "load_state_dict", None)) or not callable(
            getattr(item, "state_dict", None)
        ):
            continue
        seen.add(id(item))
        try:
            statetree.split(item.state_dict())
        except (statetree.UnsupportedState, TypeError, RuntimeError, NotImplementedError):
            continue  # this worker keeps the object as its own script made it
        out[name] = item
    return out


def instances(frames: list[FrameType], kind: type, root: Path) -> list[Any]:
    """The distinct objects of `kind` in the script's variables."""
    return list({id(item): item for _, item in _walk(frames, root) if isinstance(item, kind)}.values())


def _walk(frames: list[FrameType], root: Path) -> Iterator[tuple[str, Any]]:
    """All variables of the script's calls and, a few levels down, attributes of its own objects."""
    seen: set[int] = set()

    def inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        yield name, value
        if depth and _is_own(value, root) and id(value) not in seen:
            seen.add(id(value))
            for key, item in list(vars(value).items()):
                yield from inside(f"{name}.{key}", item, depth - 1)

    for index, frame in enumerate(frames):
        for key, value in list(frame.f_locals.items()):
            if not key.startswith(("__", ".")):
                yield from inside(f"{index}.{key}", value, 4)


def _is_own(value: Any, root: Path) -> bool:
    """An object of a class that the script defines, other than modules and data."""
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    return (
        (kind.__module__ == "__main__" or (file.startswith(str(root)) and "site-packages" not in file))
        and not isinstance(value, nn.Module | Dataset | type)
        and hasattr(value, "__dict__")
    )


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
