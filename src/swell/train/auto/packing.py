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
import copy
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import sys
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


# ---------------------------------------------------------------------- unpacking
# What another worker's script held, put into this worker's script.
#
# This worker runs the same script and stands at the same line, so it has objects of its own in nearly all
# of the same places. They are changed and not replaced: whatever else in the script refers to them goes on
# to see them. Only what this worker has not (a best model, say) is made anew.
#
# Tensors and arrays are changed in place too, unless they are in the memory of the model.


_ABSENT: Any = type("_Absent", (), {})()
"""In place of what this worker has, where it has nothing."""
_BUILT_IN = {class_name(kind): kind for kind in (*SEQUENCES, *MAPPINGS)}
_TEXTS = {class_name(kind): kind for kind in TEXTS}


class _Lacking(Exception):
    """This worker has no such object, and it could not be copied."""

    def __init__(self, where: str = "", *, harmless: bool = False) -> None:
        super().__init__(where)
        self.harmless = harmless


class Unpacker:
    """Puts what a `Packer` has written into the places of this worker's script."""

    def __init__(self, packed: Packed, runtime: OfRuntime) -> None:
        self._packed = packed
        self._nodes: list[dict[str, Any]] = packed["nodes"]
        self._runtime = runtime
        self._made: dict[int, Any] = {}
        self._lacking: dict[int, _Lacking] = {}
        self._used: set[int] = set()
        """This worker's objects by id, and its tensors' memory by address, that stand for a node already."""
        self._alive: list[Any] = []
        self._framework = 0
        self.lacks: list[str] = []
        """What this worker has not and could not be given: it cannot follow without."""
        self.keeps: list[str] = []
        """What this worker has not, and can do without: tools of another process."""

    def unpack(self, places: list[Holder]) -> None:
        """Set the variables of these places."""
        own = {place.name: place for place in places}
        for name, pairs in self._packed["places"]:
            place = own.get(name)
            if place is None:
                if name[0].isdigit() and pairs:  # a call of the script's that is not active here
                    self.lacks.append(f"the call {name.partition(':')[2]}()")
                continue
            self._framework += not place.must
            for key, ref in pairs:
                here = place.values.get(key, _ABSENT)
                try:
                    value = self._value(ref, here)
                except _Lacking as lacking:
                    self._note(f"{name.partition(':')[2] or name}: {key}{lacking}", lacking)
                    continue
                if value is not here:
                    place.put(key, value)
            self._framework -= not place.must
        if self._packed.get("cut"):
            self.lacks.append("more than can be sent, or collections that are nested too deep")

    def _note(self, where: str, lacking: _Lacking) -> None:
        (self.keeps if self._framework or lacking.harmless else self.lacks).append(where)

    # ------------------------------------------------------------------ one value

    def _value(self, ref: Any, here: Any) -> Any:
        """The value of a reference; `here`: what this worker has in its place."""
        if not isinstance(ref, dict):
            return ref
        number = ref["n"]
        if number in self._made:
            return self._made[number]
        if number in self._lacking:
            raise self._lacking[number]
        node = self._nodes[number]
        if id(here) in self._used:
            here = _ABSENT  # it stands for another object that was the same one only in this worker
        try:
            value = getattr(self, f"_{node['t']}")(number, node, here)
        except _Lacking as lacking:
            self._lacking[number] = lacking
            raise
        return self._made.setdefault(number, value)

    def _begin(self, number: int, value: Any) -> Any:
        """`value` stands for a node from now on, although its items are still to come."""
        self._made[number] = value
        self._used.add(id(value))
        self._alive.append(value)
        return value

    def _is(self, here: Any, node: dict[str, Any]) -> bool:
        return here is not _ABSENT and class_name(type(here)) == node["c"]

    def _theirs(self, number: int, node: dict[str, Any], here: Any) -> Any:
        found = self._runtime.get(node["of"])
        if found is None:
            raise _Lacking(f" ({node['of']})")
        return found

    def _alias(self, number: int, node: dict[str, Any], here: Any) -> Any:
        if isinstance(here, Tensor) and self._runtime.seen_as(here) == node["of"]:
            return here
        return self._theirs(number, node, here).detach()

    def _data(self, number: int, node: dict[str, Any], here: Any) -> Any:
        return self._keep(node, here)

    def _kept(self, number: int, node: dict[str, Any], here: Any) -> Any:
        return self._keep(node, here)

    def _keep(self, node: dict[str, Any], here: Any) -> Any:
        if not self._is(here, node):
            raise _Lacking(f" is a {node['c'].replace(':', '.')}", harmless=node.get("harmless", False))
        return here

    def _tensor(self, number: int, node: dict[str, Any], here: Any) -> Any:
        value: Tensor = node["v"]
        if isinstance(here, Tensor) and self._may_fill(here, value):
            with torch.no_grad():
                here.copy_(value)
            here.requires_grad_(node["grad"])
            return self._begin(number, here)
        away = torch.device("cpu") if node["d"] == "cpu" else self._runtime.device
        new = value.to(here.device if isinstance(here, Tensor) else away, copy=True)
        if node["c"] == class_name(nn.Parameter):
            new = nn.Parameter(new, requires_grad=node["grad"])
        return self._begin(number, new.requires_grad_(node["grad"]))

    def _may_fill(self, here: Tensor, value: Tensor) -> bool:
        same = here.shape == value.shape and here.dtype == value.dtype and here.is_leaf
        if not same or self._runtime.shares(here) or here.is_inference():
            return False
        if here.untyped_storage().nbytes() != here.numel() * here.element_size():
            return False  # a part of another tensor, the data for example, which must not change
        memory = held._pointer(here)
        first = memory not in self._used
        self._used.add(memory)
        return first

    def _array(self, number: int, node: dict[str, Any], here: Any) -> Any:
        raw = node["v"].cpu().numpy().tobytes()
        value = np.frombuffer(raw, np.dtype(node["d"])).reshape(node["s"])
        alike = self._is(here, node) and here.dtype == value.dtype and here.shape == value.shape
        if alike and here.flags.writeable and here.flags.owndata:  # not a part of another array
            here[...] = value
            return self._begin(number, here)
        return self._begin(number, value.copy())

    def _text(self, number: int, node: dict[str, Any], here: Any) -> Any:
        value = TEXTS[_TEXTS[node["c"]]][1](node["v"])
        return here if self._is(here, node) and here == value else value

    def _table(self, number: int, node: dict[str, Any], here: Any) -> Any:
        parts, pandas = self._value(node["v"], _ABSENT), sys.modules.get("pandas")
        if pandas is None:
            raise _Lacking(" is a table of pandas")
        typed = zip(parts["values"], parts["types"])
        columns = [pandas.Series(values, dtype=kind, index=parts["index"]) for values, kind in typed]
        new = pandas.concat(columns, axis=1) if columns else pandas.DataFrame(index=parts["index"])
        new.columns, new.index.name = parts["columns"], parts["name"]
        if not self._is(here, node):
            return self._begin(number, new)
        here.__init__(new)
        return self._begin(number, here)

    def _member(self, number: int, node: dict[str, Any], here: Any) -> Any:
        kind = _class(node["c"])
        if kind is None or not issubclass(kind, enum.Enum) or node["v"] not in kind.__members__:
            raise _Lacking(f" is a {node['c']}")
        return kind.__members__[node["v"]]

    def _random(self, number: int, node: dict[str, Any], here: Any) -> Any:
        state = self._value(node["v"], _ABSENT)
        if not self._is(here, node):
            device = "cpu" if node["d"] == "cpu" else str(self._runtime.device)
            here = _new_generator(node["c"], state, device)
        if isinstance(here, random.Random):
            here.setstate(state)
        elif isinstance(here, np.random.Generator):
            here.bit_generator.state = state
        else:
            here.set_state(state)
        return self._begin(number, here)

    # ------------------------------------------------------------------ collections

    def _numbers(self, number: int, node: dict[str, Any], here: Any) -> Any:
        target = self._begin(number, here if self._is(here, node) else [])
        target[:] = node["v"].tolist()
        return target

    def _sequence(self, number: int, node: dict[str, Any], here: Any) -> Any:
        kind = _BUILT_IN[node["c"]]
        mine = list(here) if self._is(here, node) and kind not in (set, frozenset) else []
        if kind in (tuple, frozenset):
            items = self._list(node, mine)
            same = len(items) == len(mine) and all(a is b for a, b in zip(items, mine))
            return here if same and mine else kind(items)
        if self._is(here, node) and (kind is not deque or here.maxlen == node["most"]):
            target = self._begin(number, here)
        else:
            target = self._begin(number, deque(maxlen=node["most"]) if kind is deque else kind())
        _fill(target, self._list(node, mine))
        return target

    def _list(self, node: dict[str, Any], mine: list[Any]) -> list[Any]:
        mine = mine + [_ABSENT] * (len(node["v"]) - len(mine))
        items = []
        for index, (ref, item) in enumerate(zip(node["v"], mine)):
            try:
                items.append(self._value(ref, item))
            except _Lacking as lacking:
                raise _Lacking(f"[{index}]{lacking}", harmless=lacking.harmless) from None
        return items

    def _mapping(self, number: int, node: dict[str, Any], here: Any) -> Any:
        kind = _BUILT_IN[node["c"]]
        target = self._begin(number, here if self._is(here, node) else kind())
        if kind is defaultdict and target is not here:
            target.default_factory = self._value(node["default"], _ABSENT)
        self._fill_mapping(node, target)
        return target

    def _fill_mapping(self, node: dict[str, Any], target: Any) -> None:
        pairs = []
        for key_ref, ref in node["v"]:
            key = self._value(key_ref, _ABSENT)
            mine = dict.get(target, key, _ABSENT)
            try:
                pairs.append((key, self._value(ref, mine)))
            except _Lacking as lacking:
                if mine is _ABSENT:
                    self._note(f"[{key!r}]{lacking}", lacking)
                else:
                    pairs.append((key, mine))
        base = OrderedDict if isinstance(target, OrderedDict) else dict  # whatever the script's class adds
        base.clear(target)
        for key, value in pairs:
            base.__setitem__(target, key, value)

    # ------------------------------------------------------------------ objects

    def _named(self, number: int, node: dict[str, Any], here: Any) -> Any:
        found = _named(node["c"])
        if getattr(here, "__qualname__", None) and class_name(here) == node["c"]:
            found = here  # by that name its module may have another now, which calls this one
        elif not isinstance(found, type | types.FunctionType) or class_name(found) != node["c"]:
            raise _Lacking(f" is {node['c']}", harmless=True)
        if "state" in node and isinstance(found, types.FunctionType):
            self._begin(number, found)
            self._attributes(node["state"], found.__dict__, found.__dict__.__setitem__)
        return found

    def _closure(self, number: int, node: dict[str, Any], here: Any) -> Any:
        if not isinstance(here, types.FunctionType) or class_name(here) != node["c"]:
            raise _Lacking(f" is the function {node['c']}")
        self._begin(number, here)
        cells = dict(zip(here.__code__.co_freevars, here.__closure__ or ()))
        for name, ref in node["v"]:
            try:
                mine = cells[name].cell_contents
            except (KeyError, ValueError):
                continue
            try:
                value = self._value(ref, mine)
            except _Lacking as lacking:
                self._note(f"{here.__qualname__}: {name}{lacking}", lacking)
                continue
            if value is not mine:
                cells[name].cell_contents = value
        return here

    def _object(self, number: int, node: dict[str, Any], here: Any) -> Any:
        items = node.get("items")
        mine = self._is(here, node)
        kind = type(here) if mine else _class(node["c"])
        if kind is None:
            raise _Lacking(f" is a {node['c'].replace(':', '.')}")
        if items is not None and issubclass(kind, tuple | frozenset):  # a named tuple, say
            return self._unchangeable(number, kind, items, here if mine else ())
        if not mine:
            try:
                base = next(
                    b
                    for b in (OrderedDict, defaultdict, dict, list, set, deque, object)
                    if issubclass(kind, b)
                )
                here = base.__new__(kind)
            except TypeError:
                raise _Lacking(f" is a {node['c'].replace(':', '.')}") from None
        self._begin(number, here)
        space = getattr(here, "__dict__", {})
        framework = held.is_of_framework(kind)
        self._framework += framework
        if mine and held.is_of_script(kind):
            there = {key for key, _ in node["state"]}
            for key in [key for key in space if key not in there]:
                del space[key]

        def put(key: str, value: Any) -> None:
            if key in space or not hasattr(kind, "__slots__"):
                space[key] = value
            else:
                object.__setattr__(here, key, value)

        old_values = {
            key: space[key] if key in space else getattr(here, key, _ABSENT) for key, _ in node["state"]
        }
        self._attributes(node["state"], old_values, put)
        if items is not None and isinstance(here, dict):
            self._fill_mapping(items, here)
        elif items is not None and items["t"] == "numbers":
            _fill(here, items["v"].tolist())
        elif items is not None:
            old = list(here) if isinstance(here, list | deque) else []
            _fill(here, self._list(items, old))
        self._framework -= framework
        return here

    def _unchangeable(self, number: int, kind: Any, items: dict[str, Any], here: Any) -> Any:
        base: Any = tuple if issubclass(kind, tuple) else frozenset
        old = list(here) if base is tuple else []
        values = self._list(items, old)
        if old and len(old) == len(values) and all(a is b for a, b in zip(old, values)):
            return here
        return self._begin(number, base.__new__(kind, values))

    def _attributes(self, pairs: list[Any], mine: dict[str, Any], put: Any) -> None:
        for key, ref in pairs:
            here = mine.get(key, _ABSENT)
            try:
                value = self._value(ref, here)
            except _Lacking as lacking:
                self._note(f".{key}{lacking}", lacking)
                continue
            if value is not here:
                put(key, value)

    def _stateful(self, number: int, node: dict[str, Any], here: Any) -> Any:
        if not self._is(here, node):
            raise _Lacking(f" is a {node['c'].replace(':', '.')}")
        self._begin(number, here)
        here.load_state_dict(self._value(node["v"], _ABSENT))
        return here

    def _module(self, number: int, node: dict[str, Any], here: Any) -> Any:
        if not self._is(here, node):
            model = None if node["like"] is None else self._runtime.get(node["like"])
            if model is None:
                raise _Lacking(f" is a {node['c'].replace(':', '.')}")
            here = copy.deepcopy(model)
            here.zero_grad(set_to_none=True)
        self._begin(number, here)
        tensors = {**dict(here.named_parameters()), **dict(here.named_buffers())}
        for name, ref in node["v"]:
            mine = tensors.get(name, _ABSENT)
            value = self._value(ref, mine)
            if value is not mine:
                owner, _, key = name.rpartition(".")
                module = here.get_submodule(owner)
                kept = module._parameters if key in module._parameters else module._buffers
                kept[key] = value
        modules = dict(here.named_modules())
        self._framework += 1
        for name, key, ref in node["more"]:
            if name in modules:
                space = modules[name].__dict__
                self._attributes([[key, ref]], space, space.__setitem__)
        self._framework -= 1
        return here


def _fill(target: Any, items: list[Any]) -> None:
    """Put these items into a list, a set or a deque, in place of those that it has."""
    if isinstance(target, list):
        list.__setitem__(target, slice(None), items)
    elif isinstance(target, set):
        set.clear(target)
        set.update(target, items)
    else:
        deque.clear(target)
        deque.extend(target, items)


def _find(name: str) -> Any:
    """The class or function of that name in a module that this process has imported already, or None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _named(name: str) -> Any:
    """A class or function that a variable may be set to: the script's, torch's, or a built-in type."""
    found = _find(name)
    known = name.startswith(("torch.", "numpy.", "builtins:", "collections:"))
    allowed = isinstance(found, type) or not name.startswith("builtins:")
    return found if held.is_of_script(found) or (known and allowed) else None


def _class(name: str) -> type | None:
    """A class to make an object of, without calling anything of it."""
    found = _find(name)
    return found if isinstance(found, type) and not is_tool(found) else None


def _new_generator(kind: str, state: Any, device: str) -> Any:
    name = kind.partition(":")[2]
    if name == "Generator" and isinstance(state, dict):
        return np.random.Generator(getattr(np.random, str(state["bit_generator"]))())
    if name == "RandomState":
        return np.random.RandomState()
    return torch.Generator(device) if name == "Generator" else random.Random()
