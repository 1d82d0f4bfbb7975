"""What a script holds, written down as plain values and tensors, without pickle.

Each object is a *node* with a number, so what is referred to twice, or refers to itself, is written once. A
node is a dict with its kind in "t"; a reference to it is `{"n": number}`; numbers and texts stand for
themselves. `statetree` makes JSON and raw memory of all this. Objects are written as the name of their class
and their attributes: nothing of the script runs when they are written or read.

Not written is what belongs to one process or cannot be taken apart. For that there is a node "kept", with its
class: a worker that has such an object in the same place keeps its own.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from swell.train.auto import held
from swell.train.auto.held import Data, Holder, OfRuntime

Packed = dict[str, Any]
"""`nodes`, and `places`: by name their variables, each a value or a reference."""

PLAIN = (type(None), bool, int, float, complex, str, bytes)
SEQUENCES = (list, tuple, set, frozenset, deque)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
TEXTS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (lambda t: [t.days, t.seconds, t.microseconds], lambda v: datetime.timedelta(*v)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    uuid.UUID: (str, uuid.UUID),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    torch.Size: (list, torch.Size),
    range: (lambda r: [r.start, r.stop, r.step], lambda v: range(*v)),
    slice: (lambda s: [s.start, s.stop, s.step], lambda v: slice(*v)),
}
"""Values that are written as a text or as numbers: how they are written and read."""
_TABLES = ("pandas:DataFrame", "pandas.core.frame:DataFrame")
_FEW = 64
"""Longer lists of numbers are written as one tensor."""
_DEEPEST = 100
_MOST_NODES = 500_000
_MOST_OF_A_LIBRARY = 2_000
"""An object of a library that is made of more parts is kept."""
_OF_PROCESS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.FrameType),
    *(types.GeneratorType, types.CoroutineType, types.TracebackType, types.CodeType, types.MappingProxyType),
    *(io.IOBase, weakref.ref, BaseException, DataLoader, Dataset, torch.device, torch.dtype),
    *(torch.memory_format, torch.layout, type),
)
"""What belongs to one process, or is made by running the script: no worker lacks it."""
_TOOLS = (
    "swell", "torch.utils.data", "torch.utils.tensorboard", "torch.distributed", "torch.jit", "torch.fx",
    "torch._dynamo", "torch.profiler", "torch.cuda", "transformers", "tokenizers", "datasets", "wandb",
    "mlflow", "matplotlib", "tqdm", "logging", "threading", "concurrent", "multiprocessing", "asyncio",
    "subprocess", "contextlib", "functools", "itertools", "tempfile", "argparse", "rich", "pandas",
    "unittest", "_pytest",
)  # fmt: skip
"""Libraries whose objects are tools of one process, and not what a script has learned."""


class _Whole(Exception):
    """An object of a library has a part that cannot travel, so that it is kept as a whole."""


class Packer:
    """Writes down what is reachable from the places of a script."""

    def __init__(self, runtime: OfRuntime | None, data: Data | None) -> None:
        """Without `data`, it only looks for `large` things, and their items are not written."""
        self._runtime = runtime
        self._data = data
        self.large: list[Any] = []
        self._nodes: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # objects that are referred to by their id must not go
        self._most = _MOST_NODES
        self._whole = 0
        """How many objects of libraries it is inside of."""
        self._cut = False
        """True if there is too much of it, or it is nested too deep."""

    def pack(self, places: list[Holder]) -> Packed:
        """All variables of these places."""
        written = [
            [place.name, [[key, self._ref(value, 0)] for key, value in place.values.items()]]
            for place in places
        ]
        return {"places": written, "nodes": self._nodes, "cut": self._cut}

    # ------------------------------------------------------------------ one value

    def _ref(self, value: Any, depth: int) -> Any:
        """A value as it is, or the reference to its node."""
        if type(value) in PLAIN or (isinstance(value, np.generic) and not value.dtype.hasobject):
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._add(value, depth)
        return {"n": number}

    def _add(self, value: Any, depth: int) -> int:
        number = len(self._nodes)
        self._numbers[id(value)] = number
        self._alive.append(value)
        node: dict[str, Any] = {}
        self._nodes.append(node)
        if depth > _DEEPEST or number > self._most:
            node |= self._kept(value)
            self._cut = True
        else:
            try:
                node |= self._node(value, depth + 1)
            except _Whole:
                raise
            except Exception:  # its class does not let itself be looked at: it is nobody's failure
                node |= self._kept(value)
        return number

    def _node(self, value: Any, depth: int) -> dict[str, Any]:
        kind = type(value)
        name = None if self._runtime is None else self._runtime.name(value)
        if name is not None:
            return {"t": "theirs", "of": name}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind in SEQUENCES or kind in MAPPINGS:
            return self._collection(value, depth)
        if kind in TEXTS:
            return {"t": "text", "c": class_name(kind), "v": TEXTS[kind][0](value)}
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, enum.Enum):
            return {"t": "member", "c": class_name(kind), "v": value.name}
        if class_name(kind) in _TABLES:
            return self._table(value, depth)
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
            node = {"t": "random", "c": class_name(kind), "v": self._ref(random_state(value), depth)}
            return node | {"d": value.device.type if isinstance(value, torch.Generator) else "cpu"}
        if isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__:
            return self._named(value, depth)
        if kind is types.FunctionType and held.is_of_script(value) and value.__closure__:
            return self._closure(value, depth)
        return self._object(value, depth)

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            return self._kept(value)
        seen_as = None if self._runtime is None else self._runtime.seen_as(value)
        if seen_as is not None:
            return {"t": "alias", "of": seen_as}
        if self._runtime is not None and self._runtime.shares(value):
            return self._kept(value, harmless=True)  # a part of the model's tensor: each has its own
        if value.requires_grad and not value.is_leaf and held.is_large(value):
            return self._kept(value, harmless=True)  # a step's result; small ones are carried on
        if held.is_large(value) and self._is_data(value):
            return {"t": "data", "c": class_name(type(value))}
        needs = value.requires_grad and value.is_leaf
        node = {"t": "tensor", "c": class_name(type(value)), "v": value.detach(), "grad": needs}
        return node | {"d": value.device.type}

    def _array(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        if value.dtype.hasobject or value.dtype.names:
            return self._kept(value)
        if held.is_large(value) and self._is_data(value):
            return {"t": "data", "c": "numpy:ndarray"}
        raw = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        memory = torch.from_numpy(raw.copy())
        return {"t": "array", "c": "numpy:ndarray", "d": value.dtype.str, "s": list(value.shape), "v": memory}

    def _collection(self, value: Any, depth: int) -> dict[str, Any]:
        kind = type(value)
        if held.is_large(value) and self._is_data(value):
            return {"t": "data", "c": class_name(kind)}
        node: dict[str, Any] = {"c": class_name(kind)}
        if kind is deque:
            node["most"] = value.maxlen
        if kind is defaultdict:
            node["default"] = self._ref(value.default_factory, depth)
        return node | self._items(value, depth)

    def _table(self, value: Any, depth: int) -> dict[str, Any]:
        """A table of pandas, by columns."""
        if held.is_large(value.to_numpy()) and self._is_data(value):
            return {"t": "data", "c": class_name(type(value))}
        columns = [value.iloc[:, at] for at in range(value.shape[1])]
        if value.index.nlevels > 1 or value.columns.nlevels > 1:
            return self._kept(value)
        parts = {
            "index": value.index.tolist(),
            "name": value.index.name,
            "columns": value.columns.tolist(),
            "types": [str(column.dtype) for column in columns],
            "values": [column.tolist() for column in columns],
        }
        return {"t": "table", "c": class_name(type(value)), "v": self._ref(parts, depth)}

    def _items(self, value: Any, depth: int) -> dict[str, Any]:
        """The items of a collection, also of one of the script's own classes."""
        if isinstance(value, dict):
            pairs = [[self._ref(k, depth), self._ref(v, depth)] for k, v in list(value.items())]
            return {"t": "mapping", "v": pairs}
        if isinstance(value, list) and len(value) > _FEW:
            kinds = set(map(type, value))
            if kinds == {float} or kinds == {int}:
                with contextlib.suppress(OverflowError, RuntimeError):  # larger than 64 bits
                    wide = torch.float64 if kinds == {float} else torch.int64
                    return {"t": "numbers", "v": torch.tensor(list(value), dtype=wide)}
        return {"t": "sequence", "v": [self._ref(item, depth) for item in list(value)]}

    def _module(self, value: nn.Module, depth: int) -> dict[str, Any]:
        """A module that is not trained: an average of the model, or its best state so far."""
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        node: dict[str, Any] = {"t": "module", "c": class_name(type(value))}
        node["like"] = None if self._runtime is None else self._runtime.like(value)
        node["v"] = [[name, self._ref(tensor, depth)] for name, tensor in tensors.items()]
        node["more"] = [
            [name, key, self._ref(item, depth)]
            for name, module in value.named_modules()
            for key, item in held.attributes_of(module).items()
        ]
        return node

    def _named(self, value: Any, depth: int) -> dict[str, Any]:
        node: dict[str, Any] = {"t": "named", "c": class_name(value)}
        if isinstance(value, types.FunctionType) and value.__dict__ and held.is_of_script(value):
            node["state"] = [[key, self._ref(item, depth)] for key, item in value.__dict__.items()]
        return node

    def _closure(self, value: types.FunctionType, depth: int) -> dict[str, Any]:
        """A function that a function of the script has made: its variables of that call."""
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it has no value yet
                cells.append([name, self._ref(cell.cell_contents, depth)])
        return {"t": "closure", "c": class_name(value), "v": cells}

    def _object(self, value: Any, depth: int) -> dict[str, Any]:
        kind = type(value)
        if hasattr(value, "zero_grad") and isinstance(getattr(value, "optimizer", None), Optimizer):
            return self._kept(
                value, harmless=True
            )  # a framework's wrapper of an optimizer, which travels itself
        if held.is_of_script(kind) or held.is_of_framework(kind):
            return self._own(value, depth)
        if isinstance(value, (*_OF_PROCESS, Iterator)):
            return self._kept(value, harmless=True)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return self._stateful(value, depth)
        if is_tool(kind):
            return self._kept(value, harmless=True)
        return self._of_library(value, depth)

    def _own(self, value: Any, depth: int) -> dict[str, Any]:
        """An object of the script's own class, or of a framework's loop: its attributes and items."""
        if isinstance(value, DataLoader | io.IOBase | BaseException):
            return self._kept(value, harmless=True)
        if isinstance(value, torch.optim.Optimizer):
            return self._stateful(value, depth)
        wrapped = getattr(value, "optimizer", None)
        if hasattr(value, "zero_grad") and self._runtime is not None and self._runtime.name(wrapped):
            return self._kept(value, harmless=True)  # a framework's wrapper of an optimizer
        if not hasattr(value, "__dict__") and not _slots(type(value)) and not isinstance(value, SEQUENCES):
            return self._kept(value)
        return self._state(value, depth)

    def _state(self, value: Any, depth: int) -> dict[str, Any]:
        node: dict[str, Any] = {"t": "object", "c": class_name(type(value))}
        pairs = list(getattr(value, "__dict__", {}).items())
        pairs += [(key, getattr(value, key)) for key in _slots(type(value)) if hasattr(value, key)]
        node["state"] = [[key, self._ref(item, depth)] for key, item in pairs]
        if isinstance(value, (*SEQUENCES, dict)):
            node["items"] = self._items(value, depth)
        return node

    def _stateful(self, value: Any, depth: int) -> dict[str, Any]:
        """A scheduler, a scaler and the like of a library: what it gives by itself."""
        try:
            state = value.state_dict()
        except Exception:  # whatever its own code raises: this worker keeps the object that its script made
            return self._kept(value, harmless=True)
        return {"t": "stateful", "c": class_name(type(value)), "v": self._ref(state, depth)}

    def _of_library(self, value: Any, depth: int) -> dict[str, Any]:
        """An object of a library: its attributes, if all of them can be written, else nothing of it."""
        if not hasattr(value, "__dict__") or type(value).__module__ == "builtins":
            return self._kept(value)
        begin, most = len(self._nodes), self._most
        self._whole += 1
        self._most = min(most, begin + _MOST_OF_A_LIBRARY)
        try:
            return self._state(value, depth)
        except _Whole:
            for part in self._alive[begin:]:
                del self._numbers[id(part)]
            del self._nodes[begin:], self._alive[begin:]
            if self._whole > 1:
                raise
        finally:
            self._whole -= 1
            self._most = most
        return {"t": "kept", "c": class_name(type(value)), "harmless": False}

    def _kept(self, value: Any, *, harmless: bool = False) -> dict[str, Any]:
        if self._whole:
            raise _Whole
        harmless = harmless or isinstance(value, (*_OF_PROCESS, Iterator))
        return {"t": "kept", "c": class_name(type(value)), "harmless": harmless}

    def _is_data(self, value: Any) -> bool:
        self.large.append(value)
        return self._data is None or self._data.has(value)


def is_tool(kind: type) -> bool:
    """Whether objects of this class are tools of one process; a script's options are none."""
    return _is_tool(f"{kind.__module__}.{kind.__qualname__}")


@functools.cache
def _is_tool(name: str) -> bool:
    return name != "argparse.Namespace" and any(name.startswith(f"{library}.") for library in _TOOLS)


def class_name(kind: Any) -> str:
    """How a class or a function is called in what is written."""
    return f"{kind.__module__}:{kind.__qualname__}"


def random_state(generator: Any) -> Any:
    """The state of a random generator that the script has made."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for one in kind.__mro__:
        names = one.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
