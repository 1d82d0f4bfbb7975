"""The fields of a message, checked where a message comes in.

Each reader returns a field as the type that the state machines expect, or raises `Refused`, which names the
field. Behind this border an exception is an error of swell's own, never of the sender.
"""

from __future__ import annotations

import re
from typing import Any

from swell.train.agent.errors import Refused
from swell.train.agent.wire import Message

MOST = 1 << 53
"""Numbers up to this one survive every JSON reader."""
_WORKER = re.compile(r"w(0|[1-9][0-9]{0,8})")
_SHOWN = 60
_DEEPEST = 32
_NEEDED: Any = object()


def _field(message: Message, key: str, default: Any) -> Any:
    value = message.get(key, default)
    if value is _NEEDED:
        raise Refused(f"{key}: missing in a message of type {message.get('type')!r:.{_SHOWN}}")
    return value


def _wrong(key: str, value: object, need: str) -> Refused:
    return Refused(f"{key}: got {_shown(value)}, must be {need}")


def _shown(value: object) -> str:
    """The beginning of a value; its whole text may be long, or too deep to be written."""
    return f"{value!r:.{_SHOWN}}" if isinstance(value, str | int | float | None) else type(value).__name__


def number(message: Message, key: str, default: Any = _NEEDED, *, least: int = 0) -> int:
    """A whole number of at least `least`."""
    value = _field(message, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise _wrong(key, value, f"a whole number from {least} on")
    return value


def amount(message: Message, key: str, default: Any = _NEEDED) -> float:
    """A finite number."""
    value = _field(message, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MOST <= value <= MOST:
        raise _wrong(key, value, "a number")
    return float(value)


def exit_code(message: Message, key: str = "code", default: Any = _NEEDED) -> int:
    """The exit code of a process; negative for the signal that killed it."""
    value = number(message, key, default, least=-255)
    if value > 255:
        raise _wrong(key, value, "an exit code")
    return value


def text(message: Message, key: str, default: Any = _NEEDED) -> str:
    """Some text."""
    value = _field(message, key, default)
    if not isinstance(value, str):
        raise _wrong(key, value, "text")
    return value


def mapping(message: Message, key: str, default: Any = _NEEDED) -> dict[str, Any]:
    """A JSON object, nested no deeper than everything that writes it again can follow."""
    value = _field(message, key, default)
    if not isinstance(value, dict) or _is_deeper(value, _DEEPEST):
        raise _wrong(key, value, f"an object, nested {_DEEPEST} levels deep at most")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inner)


def array(message: Message, key: str, default: Any = _NEEDED) -> list[Any]:
    """A JSON array."""
    value = _field(message, key, default)
    if not isinstance(value, list):
        raise _wrong(key, value, "a list")
    return value


def worker(message: Message, key: str = "worker") -> str:
    """The name of a worker."""
    return _worker(key, _field(message, key, _NEEDED))


def workers(message: Message, key: str, default: Any = _NEEDED, *, least: int = 0) -> list[str]:
    """The names of different workers, at least `least`."""
    names = [_worker(key, name) for name in array(message, key, default)]
    if len(names) < least or len(set(names)) != len(names):
        raise _wrong(key, names, f"the names of different workers, at least {least}")
    return names


def _worker(key: str, name: object) -> str:
    if not isinstance(name, str) or _WORKER.fullmatch(name) is None:
        raise _wrong(key, name, "the name of a worker: w0, w1, ...")
    return name


def address(value: object, key: str = "address") -> tuple[str, int]:
    """A host and a port."""
    match value:
        case [str(host), int(port)] if host and not isinstance(port, bool) and 0 < port < 1 << 16:
            return host, port
    raise _wrong(key, value, "a host and a port")
