"""Nested training state as a JSON document plus named tensors, without pickle.

`split` walks what `state_dict()` methods return (models, optimizers, schedulers, scalers, RNG states, user
objects) and separates it into a document of plain JSON, small and readable, and the tensors, which travel or
are written as raw memory; `join` puts both together again. Types come back as they were: integer keys,
tuples, Counter (MultiStepLR keeps one), NaN and infinity, bytes, numpy arrays and scalars, dtypes and
devices. Any other type is refused, with its path: the alternative would be pickle, which can run any code
that the writer of the file put there.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TAG = "$"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}


class UnsupportedState(TypeError):
    """The state holds an object that cannot be written without pickle."""


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The JSON document of `state` and its tensors by dotted path; tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    return _split(state, (), tensors), tensors


def join(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `split` took apart; tensors are used as they are given."""
    if isinstance(document, list):
        return [join(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {key: join(value, tensors) for key, value in document.items()}
    return _join_tagged(document[_TAG], document["v"], tensors)


def describe(document: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor that `document` refers to, so that memory for them can be made ready."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        elif isinstance(node, dict):
            if node.get(_TAG) in ("tensor", "ndarray"):
                reference = node["v"]
                found[reference["key"]] = (_DTYPES[reference["dtype"]], tuple(reference["shape"]))
            else:
                for item in node.values():
                    walk(item)

    walk(document)
    return found


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": str(value)}
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "v": _reference(value.detach(), path, tensors)}
    if kind is np.ndarray and value.dtype.hasobject is False:
        return {
            _TAG: "ndarray",
            "v": _reference(torch.from_numpy(np.ascontiguousarray(value)), path, tensors),
        }
    if kind is list:
        return [_split(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _split_mapping(value, path, tensors)
    if kind in _SEQUENCES:
        items = [_split(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return {_TAG: _SEQUENCES[kind], "v": items}
    if kind in (bytes, bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(bytes(value)).decode("ascii")}
    if kind is complex:
        return {_TAG: "complex", "v": [_split(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, np.generic):
        return {_TAG: "scalar", "v": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
    if kind is torch.dtype:
        return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_TAG: "device", "v": str(value)}
    raise UnsupportedState(
        f"{'.'.join(path) or 'state'}: got {kind.__module__}.{kind.__qualname__}, which cannot be saved: "
        "give numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays, tensors"
    )


def _split_mapping(value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    kind = _MAPPINGS.get(type(value), "dict")  # other subclasses of dict come back as plain ones
    pairs = [(key, _split(item, (*path, str(key)), tensors)) for key, item in value.items()]
    if kind == "dict" and all(type(key) is str for key, _ in pairs) and _TAG not in value:
        return dict(pairs)
    return {_TAG: kind, "v": [[_split(key, (*path, "key"), tensors), item] for key, item in pairs]}


def _reference(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout is not torch.strided:
        raise UnsupportedState(f"{'.'.join(path)}: got a tensor of layout {tensor.layout}, must be dense")
    key = base = ".".join(path) or "state"
    copies = 1
    while key in tensors:  # {0: a, "0": b}
        copies += 1
        key = f"{base}~{copies}"
    tensors[key] = tensor
    return {"key": key, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _join_tagged(kind: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match kind:
        case "tensor":
            return tensors[value["key"]]
        case "ndarray":
            return tensors[value["key"]].numpy()
        case "dict" | "ordered" | "counter":
            pairs = [(join(key, tensors), join(item, tensors)) for key, item in value]
            if kind == "counter":
                return Counter(dict(pairs))
            return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
        case "tuple" | "size" | "set" | "frozenset":
            items = [join(item, tensors) for item in value]
            if kind == "tuple":
                return tuple(items)
            if kind == "size":
                return torch.Size(items)
            return set(items) if kind == "set" else frozenset(items)
        case "float":
            return float(value)
        case "bytes":
            return base64.b64decode(value)
        case "complex":
            return complex(*(join(part, tensors) for part in value))
        case "scalar":
            return np.frombuffer(base64.b64decode(value[1]), dtype=np.dtype(value[0]))[0]
        case "dtype":
            return _DTYPES[value]
        case "device":
            return torch.device(value)
    raise ValueError(f"unknown kind {kind!r} in a saved state: a newer swell wrote it; upgrade swell")
