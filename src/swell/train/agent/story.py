"""The last transitions of a state machine, so that it can tell how it came to be where it is.

@dataclass(slots=True)
class Lamp:
    on: bool = False
    past: Past = field(default_factory=Past, compare=False, repr=False)

    @transition
    def press(self) -> list[str]: ...

lamp.past.lines()
"""

from __future__ import annotations

import functools
import reprlib
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

MOST_STORY = 64
"""Most transitions that are kept."""
MOST_LINE = 2000
"""Longest line about one of them, in characters."""


class Past:
    """The last transitions: what happened, and what followed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MOST_STORY)
        self.inside = False
        """True while an event is taken in: what it calls is a part of it."""

    def note(self, event: str, about: tuple[Any, ...], out: object) -> None:
        """Keep an event with its arguments and what followed from it."""
        arguments = ", ".join(map(_BRIEF.repr, about))
        self._lines.append(f"{event}({arguments}) -> {_BRIEF.repr(out) if out else 'nothing'}"[:MOST_LINE])

    def lines(self) -> list[str]:
        """A line for each, the oldest first."""
        return list(self._lines)


class _Brief(reprlib.Repr):
    """The beginning of a value: an event of a job may name 100,000 workers, and stays short here."""

    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 16
        self.maxstring = self.maxother = 120

    def repr_instance(self, x: Any, level: int) -> str:
        """An event, an instruction or a message with its fields."""
        names = getattr(x, "__struct_fields__", ())
        names = names or ([one.name for one in fields(x)] if is_dataclass(x) else ())
        if not names or level <= 0:
            return super().repr_instance(x, level)
        shown = ", ".join(f"{name}={self.repr1(getattr(x, name), level - 1)}" for name in names)
        return f"{type(x).__name__}({shown})"


_BRIEF = _Brief()


class _HasPast(Protocol):
    past: Past


_M = TypeVar("_M", bound=_HasPast)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def transition(method: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
    """Keep each call in the machine's past, unless it is a part of another transition or an idle tick."""

    @functools.wraps(method)
    def noted(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        outermost, self.past.inside = not self.past.inside, True
        try:
            out = method(self, *args, **kwargs)
        finally:
            self.past.inside = not outermost
        if outermost and (out or method.__name__ != "tick"):
            self.past.note(method.__name__, (*args, *kwargs.values()), out)
        return out

    return noted
