"""How far the `for` loops have come in whose bodies a call is: read in one worker, and set in another.

How far `for step in range(200)` has come is in no variable. The loop's iterator lies on the stack of the call
that runs the loop, as long as the loop runs. From there it is read, as a debugger does, and what it says of
itself (`__reduce__`) is handed over; in the newcomer the iterator in the same place is set to that.

Ranges, lists, tuples and arrays can be set, and `enumerate`, `zip` and progress bars of tqdm over these.
Where a loop goes over anything else, a generator for example, nobody can say where it is.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import sys
from types import FrameType, GeneratorType
from typing import Any

from swell.train.auto import loops
from swell.train.auto.contents import contents

_KNOWN = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info < (3, 14)
"""Versions of Python whose calls look as is written here."""
_WORD = ctypes.sizeof(ctypes.c_void_p)
_OF_CALL, _OF_STACK = 24, 72
"""Where a frame has the address of its call, and where a call's variables begin; its stack is after them."""
_RANGE: type = type(iter(range(0)))
_SEQUENCES: tuple[Any, ...] = (type(iter([0])), type(iter((0,))), type(iter("0")))
_OF_ARRAY = "iterator"
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_UNKNOWN = (ast.ExceptHandler, ast.AsyncFor, ast.AsyncWith, *_COMPREHENSIONS)
"""What has more on the stack than is known here."""


def describe(frame: FrameType, sequences: list[Any]) -> list[Any] | None:
    """How far each loop has come in whose body the call is, outermost first; None if that cannot be said.

    `sequences`: what the loops go over is added to it, where that is a list or the like.
    """
    slots = _slots(frame)
    if slots is None:
        return None
    told = [_describe(_read(frame, slot), sequences) for slot in slots]
    return None if any(one is None for one in told) else told


def go_to(frame: FrameType, told: list[Any], sequences: dict[int, Any]) -> bool:
    """Have the loops of a call go on from where `describe` said; False if that cannot be done.

    `sequences`: by number, those of the worker that was described.
    """
    slots = _slots(frame)
    if slots is None or len(slots) != len(told):
        return False
    for slot, wanted in zip(slots, told):
        one = _read(frame, slot)
        found = _set(one, wanted, sequences)
        if found is None:
            return False
        if found is not one:
            _write(frame, slot, found)
    return True


# ---------------------------------------------------------------------- the iterators of a call


def _slots(frame: FrameType) -> list[int] | None:
    """As `_places`; None also if this Python is not known."""
    slots = _places(frame)
    return slots if not slots or works() else None


def _places(frame: FrameType) -> list[int] | None:
    """The places on the call's stack where its loops have their iterators; None if they are not known."""
    nodes = loops.nodes_around(frame)
    if nodes is None:
        return None
    slots, depth, line = [], 0, frame.f_lineno
    for node in nodes:
        if isinstance(node, ast.For) and _is_in(node.body, line):
            slots.append(depth)
            depth += 1
        elif isinstance(node, ast.With) and _is_in(node.body, line):
            depth += len(node.items)
        elif isinstance(node, _UNKNOWN) or (isinstance(node, ast.Try) and _is_in(node.finalbody, line)):
            return None
    return slots if depth <= frame.f_code.co_stacksize else None


def _is_in(block: list[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def _address(frame: FrameType, slot: int) -> int:
    code = frame.f_code
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    before = code.co_nlocals + len(cells) + len(code.co_freevars)
    call = ctypes.c_void_p.from_address(id(frame) + _OF_CALL).value or 0
    return call + _OF_STACK + (before + slot) * _WORD


def _read(frame: FrameType, slot: int) -> Any:
    place = _address(frame, slot)
    return ctypes.cast(ctypes.c_void_p.from_address(place).value or id(None), ctypes.py_object).value


def _write(frame: FrameType, slot: int, new: Any) -> None:
    """Put another iterator in the place of one; the call lets go of the old one."""
    old = _read(frame, slot)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))
    ctypes.c_void_p.from_address(_address(frame, slot)).value = id(new)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(old))


@functools.cache
def works() -> bool:
    """Whether iterators are where they are looked for, in a call and in a generator, and can be set."""
    if not _KNOWN:
        return False
    wanted, lines = iter(range(3, 30, 4)), iter([1, 2, 3])

    def looked(x: int) -> bool:
        for _ in wanted:
            for x in lines:
                frame = sys._getframe()
                if x == 1 and (_read(frame, 0) is not wanted or _read(frame, 1) is not lines):
                    return False
                if x == 1:
                    _write(frame, 1, iter([7]))
                else:
                    return x == 7
        return False

    def gives() -> Any:
        for x in wanted:
            yield x, wanted

    generator = gives()
    next(generator)
    if not looked(0) or _read(generator.gi_frame, 0) is not wanted:
        return False
    ranges, counted = iter(range(10, 90, 2)), enumerate([0])
    next(ranges)
    for told in ([50, 2, 20], [10, 2, 40], [6, -3, 2]):
        if not _set_range(ranges, told) or next(ranges) != told[0]:
            return False
    return list(ranges) == [3] and loops.set_count(counted, 5)


# ---------------------------------------------------------------------- what an iterator says of itself


def _describe(one: Any, sequences: list[Any]) -> Any:
    if type(one) is _RANGE:
        return {"range": _range_of(one)}
    if type(one) is enumerate:
        found: Any = one.__reduce__()[1]
        told = _describe(found[0], sequences)
        return None if told is None else {"enumerate": found[1], "of": told}
    if type(one) is zip:
        parts = [_describe(inner, sequences) for inner in one.__reduce__()[1]]
        return None if any(part is None for part in parts) else {"zip": parts}
    if _is_sequence(one):
        sequence, index = _sequence_of(one)
        sequences.append(sequence)
        return {"sequence": index, "number": len(sequences) - 1, "of": _contents(sequence)}
    if _is_bar(one):
        told = describe(one.gi_frame, sequences)
        return None if told is None else {"bar": told}
    return None


def _set(one: Any, wanted: dict[str, Any], sequences: dict[int, Any]) -> Any:
    """An iterator at the wanted place: the given one, or a new one; None if neither is possible."""
    if "range" in wanted:
        return one if type(one) is _RANGE and _set_range(one, wanted["range"]) else None
    if "enumerate" in wanted:
        inner = one.__reduce__()[1][0] if type(one) is enumerate else None
        found = _set(inner, wanted["of"], sequences)
        if found is not inner:
            return None if found is None else enumerate(found, wanted["enumerate"])
        return one if inner is not None and loops.set_count(one, wanted["enumerate"]) else None
    if "zip" in wanted:
        parts: Any = one.__reduce__()[1] if type(one) is zip else ()
        if len(parts) != len(wanted["zip"]):
            return None
        set_ = [_set(part, told, sequences) for part, told in zip(parts, wanted["zip"])]
        if all(new is part for new, part in zip(set_, parts)):
            return one
        return None if any(new is None for new in set_) else zip(*set_)
    if "bar" in wanted:
        return one if _is_bar(one) and go_to(one.gi_frame, wanted["bar"], sequences) else None
    return _set_sequence(one, wanted, sequences) if _is_sequence(one) else None


def _set_sequence(one: Any, wanted: dict[str, Any], sequences: dict[int, Any]) -> Any:
    if wanted["sequence"] < 0:
        return iter([])
    sequence, index = _sequence_of(one)
    if index < 0 or _contents(sequence) != wanted["of"]:  # theirs is another one
        sequence = sequences.get(wanted["number"])
        if sequence is None or _contents(sequence) != wanted["of"]:
            return None
        one = iter(sequence)
    one.__setstate__(wanted["sequence"])
    return one if _sequence_of(one)[1] == wanted["sequence"] else None


def _is_sequence(one: Any) -> bool:
    return type(one) in _SEQUENCES or (type(one).__name__ == _OF_ARRAY and hasattr(one, "__setstate__"))


def _sequence_of(one: Any) -> tuple[Any, int]:
    """What an iterator goes over, and its next place in it; -1 if it is used up."""
    found = one.__reduce__()
    return found[1][0], int(found[2]) if len(found) > 2 else -1


def _contents(sequence: Any) -> list[Any]:
    return [len(sequence), contents(list(sequence[:1000]))]


def _is_bar(one: Any) -> bool:
    if type(one) is not GeneratorType or one.gi_frame is None:
        return False
    return str(one.gi_frame.f_globals.get("__name__", "")).startswith("tqdm.")


def _range_of(one: Any) -> list[int]:
    """What a range has left: its next number, its step, and how many there are."""
    found = one.__reduce__()
    left, more = found[1][0], found[2:]
    left = left[more[0] :] if more and more[0] else left
    return [left.start, left.step, len(left)]


def _set_range(one: Any, wanted: list[int]) -> bool:
    """Write into the memory of a range's iterator; first and afterwards it is checked that this is right."""
    count = 4 if sys.version_info < (3, 12) else 3
    words = (ctypes.c_long * count).from_address(id(one) + object.__basicsize__)
    before = list(words)
    index, start, step, length = before if count == 4 else (0, *before)
    if _range_of(one) != [start + index * step, step, length - index]:
        return False
    new: list[Any] = [0, *wanted]
    words[:] = new[4 - count :]
    if _range_of(one) == wanted:
        return True
    words[:] = list[Any](before)
    return False
