"""Scripts that draw their batches by hand, without a DataLoader: nanoGPT's `get_batch`, all data at once,
replay memories, minibatches of rollouts.

Their position is the step of the optimizer. Membership changes right after a step: there the script's
variables travel (`held`), and with them how far its loops have come (`iterators`). So a newcomer makes one
step of its own, which has no effect, and goes on after it like the others, however many steps they have made.

It must be in the same calls at the same instructions as the others (`spot`). If it is not, it goes on until
it comes there: a script with two optimizers steps at two places, in turns.

What cannot be handed over keeps the script on one worker: a loop over something whose place nobody can say, a
generator that is drawn from, and loops inside a library, whose variables do not travel.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import io
import itertools
import os
import stat
import sys
from collections.abc import Callable
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from swell.train.auto import held, loops
from swell.train.auto.fingerprint import contents
from swell.train.auto.held import Holder
from swell.train.auto.passes import Drawn, Pass

_ITERATORS: tuple[Any, ...] = (
    *(type(iter(kind)) for kind in ([0], (0,), "0", {0: 0}, {0}, range(1))),
    *(enumerate, zip, map, filter, reversed, GeneratorType),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)
_MOST = 100_000
"""At most so many things are looked through."""
_OVER = "what its loops go over"
_FILE = "<module>", "__main__"
_WITHOUT_LOOPS = ("swell", "torch", "accelerate", *sys.stdlib_module_names)
"""Libraries whose calls around a step hold nothing."""


class StepsByHand(Pass):
    """The steps of a script that draws by hand, in place of a pass: it has no batches, and no end."""

    def __init__(self, ordinal: int, rows: int) -> None:
        super().__init__(DataLoader(TensorDataset(torch.zeros(1))), ordinal, _never, training=True)
        self._window = [0] * max(rows, 1)
        """As many as the first batch had rows, for the reports."""

    def computed(self) -> Drawn:
        """The script has computed gradients once more."""
        self.index += 1
        self.drawn += 1
        return self.last()

    def last(self) -> Drawn:
        """The batch that the script has computed gradients of most recently."""
        return Drawn(self.ordinal, self.index, self._window)

    def reorder(self, begun: dict[str, Any] | None) -> None:
        """Nothing: the script has its own order."""

    def position(self) -> dict[str, Any]:
        """How often gradients were computed."""
        return {
            "begun": {},
            "counts": [],
            "pass": self.ordinal,
            "batch": self.index,
            "flight": [],
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Count on from there."""
        self.index = int(position["batch"])


def _nowhere(name: str, value: Any) -> None:
    """The `put` of variables that are read only: it does nothing."""


def _never(here: Pass) -> Any:
    raise StopIteration


# ---------------------------------------------------------------------- the spot in the script


def spot() -> tuple[dict[str, Any], Holder]:
    """Where the script is: its calls, the instructions in them, how far their loops are, and over what."""
    frames, sequences = _frames(), list[Any]()
    here = {
        "calls": [_call(frame) for frame in frames],
        "loops": [describe(frame, sequences) for frame in frames],
        "iterators": bool(_held_iterators()),
    }
    return here, Holder(_OVER, {str(at): one for at, one in enumerate(sequences)}, _nowhere)


def over(found: dict[str, Any]) -> Holder:
    """Where a newcomer gets what the loops of the others go over."""
    return Holder(_OVER, {}, found.__setitem__)


def is_there(theirs: dict[str, Any]) -> bool:
    """Whether the script is in the same calls, at the same instructions."""
    return [_call(frame) for frame in _frames()] == theirs["calls"]


def go_to(theirs: dict[str, Any], sequences: dict[str, Any]) -> str:
    """Set this script's loops to the place of another worker's loops; returns why it is impossible, or ''."""
    if theirs["iterators"]:
        return "the script holds a generator or an iterator, and nobody can say how far that has come"
    numbered = {int(at): one for at, one in sequences.items()}
    for frame, told in zip(_frames(), theirs["loops"]):
        if told is None or not set_iterators(frame, told, numbered):
            return f"the loop of {frame.f_code.co_name} goes over something whose place cannot be handed over"
    return ""


def may_be_followed() -> bool:
    """Whether newcomers can come to where the script is now."""
    here, _ = spot()
    return not here["iterators"] and None not in here["loops"] and not _in_a_library()


def _frames() -> list[FrameType]:
    """The script's active calls, outermost first, without what may have started the script."""
    frames = held.script_frames()
    files = [at for at, f in enumerate(frames) if (f.f_code.co_name, f.f_globals.get("__name__")) == _FILE]
    return frames[files[-1] :] if files else frames


def _call(frame: FrameType) -> list[Any]:
    return [frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti]


def _in_a_library() -> bool:
    """Whether a call of a library other than torch lies between the script's first call and the step."""
    own = _frames()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (not own or frame is not own[0]):
        name = str(frame.f_globals.get("__name__", ""))
        if frame not in own and name.partition(".")[0] not in _WITHOUT_LOOPS:
            return True
        frame = frame.f_back
    return False


def _held_iterators() -> list[Any]:
    """Generators, iterators and files that are not used up, in what the script holds."""
    found, seen = [], set[int]()
    ahead: list[tuple[Any, int]] = []
    for place in held.places(_frames(), held.script_modules(), None):
        ahead += [(value, 0) for value in place.values.values()]
    while ahead and len(seen) < _MOST:
        item, depth = ahead.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (*_ITERATORS, io.IOBase)):
            if not _is_used_up(item):
                found.append(item)
        elif depth < 4:
            ahead += [(inner, depth + 1) for inner in _inside(item)]
    return found


def _inside(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())[:1000]
    if isinstance(item, list | tuple):
        return list(item[:1000])
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if cell != CellType()]
    return list(vars(item).values()) if held.is_of_script(type(item)) and hasattr(item, "__dict__") else []


def _is_at_end(file: Any) -> bool:
    """Whether a file was read to its end. A terminal or a pipe counts as read: it holds no data set."""
    try:
        about = os.fstat(file.fileno())
    except (OSError, ValueError):
        return True
    if not stat.S_ISREG(about.st_mode):
        return True
    try:
        return int(file.tell()) >= about.st_size
    except OSError:  # a loop over its lines is under way
        return False


def _is_used_up(item: Any) -> bool:
    if isinstance(item, GeneratorType):
        return item.gi_frame is None
    if isinstance(item, io.IOBase):
        return item.closed or not item.readable() or _is_at_end(item)
    hint: Callable[[Any], int] | None = getattr(type(item), "__length_hint__", None)
    return hint is not None and hint(item) == 0


# ---------------------------------------------------------------------- the iterators of its loops
# How far the `for` loops have come in whose bodies a call is: read in one worker, and set in another.
#
# How far `for step in range(200)` has come is in no variable. The loop's iterator lies on the stack of the
# call that runs the loop, as long as the loop runs. From there it is read, as a debugger does, and what it
# says of itself (`__reduce__`) is handed over; in the newcomer the iterator in the same place is set to
# that.
#
# Ranges, lists, tuples and arrays can be set, and `enumerate`, `zip` and progress bars of tqdm over these.
# Where a loop goes over anything else, a generator for example, nobody can say where it is.


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


def set_iterators(frame: FrameType, told: list[Any], sequences: dict[int, Any]) -> bool:
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
        return one if _is_bar(one) and set_iterators(one.gi_frame, wanted["bar"], sequences) else None
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
