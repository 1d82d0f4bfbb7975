"""What another worker's script held, put into this worker's script.

This worker runs the same script and stands at the same line, so it has objects of its own in nearly all of
the same places. They are changed and not replaced: whatever else in the script refers to them goes on to see
them. Only what this worker has not (a best model, say) is made anew.

Tensors and arrays are changed in place too, unless they are in the memory of the model.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swell.train.auto import held
from swell.train.auto.held import Holder, OfRuntime
from swell.train.auto.packing import MAPPINGS, SEQUENCES, TEXTS, Packed, class_name, is_tool

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
