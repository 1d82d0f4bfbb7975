"""Durations, moments and sizes as people write them: reading and printing."""

from __future__ import annotations

import contextlib
import math
import re
import time
from datetime import datetime, timedelta
from typing import Any

import click

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = re.compile(r"\d+(\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(today|tomorrow)\s+)?(\d{1,2}):(\d{2})", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds of '90s', '90m', '2h', '1h30m' or '1.5d'; a number without a unit could mean any of them."""
    cleaned = text.strip()
    if _NUMBER.fullmatch(cleaned):
        raise ValueError(f"'{text}' has no unit; write {cleaned}s, {cleaned}m, {cleaned}h or {cleaned}d")
    if not cleaned or _PART.sub("", cleaned).strip():
        raise ValueError(f"'{text}' is not a duration; write it like 90s, 90m, 2h, 1h30m or 3d")
    seconds = sum(float(number) * _UNITS_S[unit.lower()] for number, unit in _PART.findall(cleaned))
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"'{text}' must be a duration of more than 0 seconds, like 90m or 2h")
    return seconds


def parse_interval(text: str) -> float:
    """Seconds of a duration, or 0."""
    return 0.0 if text.strip() == "0" else parse_duration(text)


def parse_deadline(text: str, now_s: float | None = None) -> float:
    """The Unix time of '2h' (from now), '18:30', 'tomorrow 09:00' or '2026-03-01 09:00' (local time)."""
    now_s = time.time() if now_s is None else now_s
    cleaned = " ".join(text.split())
    clock = _CLOCK.fullmatch(cleaned)
    if clock is not None:
        moment = _at_clock(clock, datetime.fromtimestamp(now_s))
    elif _NUMBER.fullmatch(cleaned):
        raise ValueError(
            f"'{text}' has no unit; write {cleaned}s, {cleaned}m or {cleaned}h for a time from now"
        )
    else:
        with contextlib.suppress(ValueError):
            return now_s + parse_duration(cleaned)
        try:
            moment = datetime.fromisoformat(cleaned)
        except ValueError:
            raise ValueError(
                f"'{text}' is not a deadline; write it like 2h, 18:30, 'tomorrow 09:00' or 2026-03-01T09:00"
            ) from None
    if moment.timestamp() <= now_s:
        raise ValueError(f"'{text}' is in the past (it is {say_moment(now_s)} now); give a later deadline")
    return moment.timestamp()


def _at_clock(clock: re.Match[str], now: datetime) -> datetime:
    day, hour, minute = clock.groups()
    if int(hour) > 23 or int(minute) > 59:
        raise ValueError(f"'{clock[0]}' is not a time of day; write it like 'tomorrow 09:00'")
    moment = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if day is not None and day.lower() == "tomorrow":
        return moment + timedelta(days=1)
    # A time without a day means the next time the clock shows it.
    return moment + timedelta(days=1) if day is None and moment <= now else moment


def parse_bytes(text: str) -> int:
    """Bytes of '512MB', '2GiB', '1.5g' or a bare number."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"'{text}' is not an amount of memory; write it like 512MiB or 4GB")
    base = 1024 if found[3] else 1000
    size = float(found[1]) * base ** " kmgt".index(found[2].lower() or " ")
    return int(size)


def say_duration(seconds: float | None) -> str:
    """A duration as people write it: 45s, 3m 20s, 2h 05m, 3d 04h."""
    if seconds is None or math.isnan(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def say_moment(moment_s: float | None, now_s: float | None = None) -> str:
    """A moment as people write it: the time, and the date unless it is today."""
    if moment_s is None:
        return "-"
    moment, today = datetime.fromtimestamp(moment_s), datetime.fromtimestamp(now_s or time.time()).date()
    if moment.date() == today:
        return f"{moment:%H:%M:%S}"
    if moment.date() == today + timedelta(days=1):
        return f"tomorrow {moment:%H:%M}"
    return f"{moment:%Y-%m-%d %H:%M}"


def say_until(moment_s: float | None, now_s: float | None = None) -> str:
    """A moment, and how far away it is."""
    if moment_s is None:
        return "-"
    now_s = time.time() if now_s is None else now_s
    away = (
        f"in {say_duration(moment_s - now_s)}"
        if moment_s >= now_s
        else f"{say_duration(now_s - moment_s)} ago"
    )
    return f"{say_moment(moment_s, now_s)} ({away})"


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in click's newest
    """The type of an option whose text one of the functions above reads."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or a refusal that says how to write it."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", parse_duration)
INTERVAL = _Parsed("duration", parse_interval)
DEADLINE = _Parsed("deadline", parse_deadline)
BYTES = _Parsed("size", parse_bytes)
