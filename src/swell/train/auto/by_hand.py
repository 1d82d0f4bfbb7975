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

from swell.train.auto import held, iterators
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
        "loops": [iterators.describe(frame, sequences) for frame in frames],
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
        if told is None or not iterators.go_to(frame, told, numbered):
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
