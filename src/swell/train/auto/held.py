"""What a script holds: everything that its code can reach, and what of it is not to travel.

A newcomer must go on with what the others hold: best scores, averages of weights, histories, counters. From
outside nobody can tell which of a script's variables will matter, so all of them count: the local variables
of its active calls, the globals of its modules, data attributes of its classes, and plain attributes of its
model. `packing` writes down what is reachable from there, and `unpacking` puts it into another worker's
script.

Three kinds of things stay where they are:

- what the runtime moves itself: the model that is trained, its parameters and its optimizers;
- large data that were there at the script's first step and have not changed since: a newcomer has made the
  same data by running the same lines;
- what belongs to one process: files, threads, iterators, devices, the loaders.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import site
import sys
import sysconfig
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "pytorch_lightning", "accelerate")
"""Packages whose loops count steps and epochs: what they hold travels like what the script itself holds."""

_LARGE_ITEMS = 1_000
"""A collection with more items counts as data as long as it is the same one as at the script's first step."""
_LARGE_BYTES = 1 << 20
"""A tensor or an array that is larger counts as data in the same way."""
_LOOKED_AT = 1 << 18
"""Of a large array at most about so many elements are compared."""

_LIBRARIES = tuple(
    {
        f"{Path(folder).resolve()}/"
        for folder in (*site.getsitepackages(), *sysconfig.get_paths().values(), *sys.path_importer_cache)
        if "site-packages" in str(folder) or "dist-packages" in str(folder)
    }
    | {f"{Path(sysconfig.get_paths()['stdlib']).resolve()}/"}
)
_SWELL = f"{Path(__file__).resolve().parents[2]}/"
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module of torch has: its parameters, its buffers, its parts, its hooks."""


# ---------------------------------------------------------------------- whose code it is


def is_own(module: str, file: str) -> bool:
    """Whether code is the script's: its file, packages beside it or on its path, or a framework's loop."""
    return module.startswith(FRAMEWORKS) or _is_of_script(file)


@functools.cache
def _is_of_script(file: str) -> bool:
    if not file or file.startswith(("<", _SWELL)):
        return False
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def is_of_script(kind: Any) -> bool:
    """Whether the script (or a package beside it) defines this class or function."""
    name = getattr(kind, "__module__", None)
    if name in ("__main__", "__mp_main__"):
        return True
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and _is_of_script(getattr(module, "__file__", None) or "")


def is_of_framework(kind: type) -> bool:
    """Whether a framework's loop defines this class."""
    return kind.__module__.startswith(FRAMEWORKS)


def script_frames() -> list[FrameType]:
    """The active calls of the script's own code, outermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def script_modules() -> list[ModuleType]:
    """The script's file and the modules of its own that it has imported."""
    return _script_modules(len(sys.modules))  # it takes 10 ms to look through those of a large library


@functools.lru_cache(1)
def _script_modules(imported: int) -> list[ModuleType]:
    found = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    return [m for m in found if _is_of_script(getattr(m, "__file__", None) or "")]


# ---------------------------------------------------------------------- the places where it is held


@dataclass(frozen=True, slots=True)
class Holder:
    """Variables that belong together: those of a call, of a module, of a class, or of the model."""

    name: str
    values: dict[str, Any]
    put: Callable[[str, Any], None]
    """Sets a variable to another value, as a debugger does."""
    must: bool = False
    """True if a worker whose script has not all of these variables cannot follow."""


def places(frames: list[FrameType], modules: Iterable[ModuleType], model: nn.Module | None) -> list[Holder]:
    """All places where a script holds something, in the same order on every worker."""
    found: list[Holder] = []
    shown: set[int] = set()  # the globals of a module whose code is active are the variables of that call
    for index, frame in enumerate(frames):
        if frame.f_code.co_name == "<module>":
            shown.add(id(frame.f_globals))
        framework = str(frame.f_globals.get("__name__", "")).startswith(FRAMEWORKS)
        name = f"{index}:{frame.f_code.co_name}"
        found.append(Holder(name, _variables(frame.f_locals), _setter(frame), must=not framework))
    classes: dict[int, type] = {}
    for space in [frame.f_globals for frame in frames] + [vars(module) for module in modules]:
        name = str(space.get("__name__", ""))
        if name.startswith(FRAMEWORKS):
            continue
        for value in list(space.values()):
            if isinstance(value, type) and value.__module__ == name and not issubclass(value, enum.Enum):
                classes.setdefault(id(value), value)
        if id(space) not in shown:
            shown.add(id(space))
            found.append(Holder(f"module {name}", _variables(space), space.__setitem__, must=True))
    for kind in classes.values():
        values = {key: value for key, value in _variables(vars(kind)).items() if _is_datum(value)}
        if values:
            put = functools.partial(setattr, kind)
            found.append(Holder(f"class {kind.__module__}.{kind.__qualname__}", values, put))
    if model is not None:
        found += [place for name, module in model.named_modules() for place in _attributes(name, module)]
    return found


def _attributes(name: str, module: nn.Module) -> Iterator[Holder]:
    """What a module of the model holds beside its parameters and buffers."""
    values = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
    if values:
        yield Holder(f"model {name}", values, vars(module).__setitem__)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's own."""
    return {key: value for key, value in vars(module).items() if key not in _OF_MODULES}


def _variables(space: Any) -> dict[str, Any]:
    """Variables by name, without what only a `def`, a `class` or an `import` has put there."""
    return {
        key: value
        for key, value in list(space.items())
        if isinstance(key, str) and not key.startswith(("__", ".")) and not _is_definition(key, value)
    }


def _is_definition(key: str, value: Any) -> bool:
    if isinstance(value, ModuleType):
        return True
    if isinstance(value, types.FunctionType):
        return key == value.__name__ and value.__closure__ is None and not value.__dict__
    return isinstance(value, type | types.BuiltinFunctionType) and key == value.__name__


def _is_datum(value: Any) -> bool:
    """Whether an attribute of a class is a value, and not a method or a property."""
    return not hasattr(type(value), "__get__") and not isinstance(value, type)


def _setter(frame: FrameType) -> Callable[[str, Any], None]:
    if frame.f_code.co_name == "<module>":
        return frame.f_globals.__setitem__

    def put(key: str, value: Any) -> None:
        frame.f_locals[key] = value
        if sys.version_info < (3, 13):  # later versions write into the call by themselves
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    return put


# ---------------------------------------------------------------------- what the runtime moves


class OfRuntime:
    """The model that is trained, its parts, its parameters and its optimizers: they are only referred to."""

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.model = model
        self._by_name: dict[str, Any] = {}
        for name, module in model.named_modules():
            self._by_name[f"module {name}"] = module
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._by_name |= {f"tensor {name}": tensor for name, tensor in tensors.items()}
        for index, optimizer in enumerate(optimizers):
            self._by_name[f"optimizer {index}"] = optimizer
        self._names = {id(item): name for name, item in reversed(self._by_name.items())}
        self._storages = {_pointer(t): name for name, t in tensors.items() if t.numel()}

    def name(self, item: Any) -> str | None:
        """How all workers call this object, or None if it is not the runtime's."""
        return self._names.get(id(item))

    def get(self, name: str) -> Any:
        """This worker's object of that name, or None."""
        return self._by_name.get(name)

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of the model."""
        return _pointer(tensor) in self._storages if tensor.numel() else False

    def seen_as(self, tensor: Tensor) -> str | None:
        """The name of the model's tensor that `tensor` shows as it is (`state_dict()` does), or None."""
        name = self._storages.get(_pointer(tensor)) if tensor.numel() else None
        if name is None:
            return None
        whole = self._by_name[f"tensor {name}"]
        same = whole.shape == tensor.shape and whole.stride() == tensor.stride()
        return f"tensor {name}" if same and whole.data_ptr() == tensor.data_ptr() else None

    def like(self, module: nn.Module) -> str | None:
        """The name of a part of the model that `module` is a copy of, as far as its tensors show."""
        shapes = [(name, t.shape) for name, t in module.state_dict().items() if isinstance(t, Tensor)]
        for name, one in self._by_name.items():
            if type(one) is type(module) and name.startswith("module "):
                own = [(key, t.shape) for key, t in one.state_dict().items() if isinstance(t, Tensor)]
                if own == shapes:
                    return name
        return None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((t.device for t in self.model.parameters()), torch.device("cpu"))


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or of a subclass without memory of its own
        return id(tensor)


# ---------------------------------------------------------------------- data


class Data:
    """Large collections, tensors and arrays that were there at the script's first step."""

    def __init__(self) -> None:
        self._marks: dict[int, Any] = {}

    def note(self, found: Iterable[Any]) -> None:
        """Remember these things as they are now."""
        self._marks = {id(item): _mark(item) for item in found}

    def has(self, item: Any) -> bool:
        """Whether a large thing was there at the first step and is unchanged."""
        before = self._marks.get(id(item))
        return before is not None and before == _mark(item)


def is_large(item: Any) -> bool:
    """Whether a thing counts as data if it does not change."""
    if isinstance(item, Tensor):
        return item.layout is torch.strided and item.numel() * item.element_size() > _LARGE_BYTES
    if isinstance(item, np.ndarray):
        return item.nbytes > _LARGE_BYTES
    return len(item) > _LARGE_ITEMS


def _mark(item: Any) -> Any:
    """Something that differs when `item` has changed; changes inside its items do not count."""
    if isinstance(item, Tensor):
        try:
            return tuple(item.shape), _pointer(item), item._version
        except RuntimeError:  # made in inference mode: nobody counts its changes
            return tuple(item.shape), _pointer(item)
    if isinstance(item, np.ndarray):
        rows = item.reshape(1, -1) if item.ndim < 2 else item[:: max(1, len(item) // 512)]
        rows = rows.reshape(len(rows), -1)
        some = rows[:, :: max(1, rows.size // _LOOKED_AT)]
        return item.shape, item.dtype.str, 0 if item.dtype.hasobject else zlib.crc32(some.tobytes())
    if hasattr(item, "iloc"):  # a table of pandas
        return type(item), item.shape, hash(tuple(item.columns)), _mark(item.to_numpy())
    parts = (*item, *item.values()) if isinstance(item, dict) else tuple(item)
    try:
        return type(item), len(parts), hash(parts)
    except TypeError:  # lists and the like, which have no hash
        return type(item), len(parts), hash(tuple(map(id, parts)))
