"""Capacity as a function of time: reservations for services, and what they leave to training.

A *reservation* takes GPUs away from training, a number of them or those of named nodes, from one moment to
another, and again after a period if it is repeated. One with `most` follows the demand of a service: it
holds as many as the service wants now, and promises to jobs count only on what the service never wants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from swell.domain.cluster import Cluster, FloatArray, IntArray
from swell.domain.errors import InputError

MOST_STEPS = 200
"""A look ahead has at most about this many steps; beyond them all repeated reservations count at once."""
LOOK_AHEAD_S = 2 * 86_400.0
"""How far ahead repeated reservations are written out at least."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that belong to something else than training for some time."""

    name: str
    gpus: int = 0
    """How many GPUs, whichever; of a service that is followed, how many it wants now."""
    nodes: tuple[str, ...] = ()
    """In place of a number: all GPUs of these nodes."""
    start_s: float = 0.0
    end_s: float | None = None
    """None for no end."""
    every_s: float | None = None
    """After this many seconds the same hours are reserved again, and so on; None for once."""
    most: int | None = None
    """For a service whose demand is followed: the most GPUs that it may ever want."""
    owner: str = ""
    """The user who may set what the service wants, besides administrators."""

    def __post_init__(self) -> None:
        def refuse(field: str, given: object, allowed: str) -> None:
            raise InputError(
                f"reservation '{self.name}': {field} must be {allowed}, got {given!r}", field=field
            )

        if not _NAME.fullmatch(self.name):
            refuse("name", self.name, "up to 128 letters, digits, '.', '_' or '-'")
        if not math.isfinite(self.start_s):
            refuse("start_s", self.start_s, "a moment")
        if self.end_s is not None and not self.start_s < self.end_s < math.inf:
            refuse("end_s", self.end_s, f"after start_s ({self.start_s:g})")
        if self.every_s is not None:
            if self.end_s is None:
                refuse("end_s", self.end_s, "given, because the reservation is repeated")
            elif not self.end_s - self.start_s + 1 <= self.every_s < math.inf:
                reserved_s = self.end_s - self.start_s
                refuse("every_s", self.every_s, f"longer by a second than the {reserved_s:g} s reserved")
        if self.most is None:
            if bool(self.nodes) == bool(self.gpus):
                refuse("gpus", self.gpus, "at least 1, or nodes must be named in its place")
            if self.gpus < 0:
                refuse("gpus", self.gpus, "at least 1")
        else:
            if self.most < 1:
                refuse("most", self.most, "at least 1")
            if self.nodes or self.end_s is not None:
                refuse("most", self.most, "left out if nodes or hours are given")
            if not 0 <= self.gpus <= self.most:
                refuse("gpus", self.gpus, f"from 0 to {self.most} (most)")

    def active(self, now_s: float) -> bool:
        """Whether its hours are now."""
        began_s = self._began_s(now_s)
        if began_s is None:
            return False
        return self.end_s is None or now_s < began_s + (self.end_s - self.start_s) - _ROUNDING_S

    def next_change_s(self, now_s: float) -> float:
        """When its hours begin or end next; infinite for never."""
        began_s = self._began_s(now_s)
        if began_s is None:
            return self.start_s
        if self.active(now_s):
            return math.inf if self.end_s is None else began_s + (self.end_s - self.start_s)
        return math.inf if self.every_s is None else began_s + self.every_s

    def _began_s(self, now_s: float) -> float | None:
        """When its hours began last; None if they never have."""
        if now_s < self.start_s - _ROUNDING_S:
            return None
        if self.every_s is None:
            return self.start_s
        return self.start_s + math.floor((now_s - self.start_s + _ROUNDING_S) / self.every_s) * self.every_s


class SlotsAhead(NamedTuple):
    """GPUs that promises may count on: `gpus[i]` from `times[i]` to `times[i + 1]`, the last for ever."""

    times: FloatArray
    gpus: IntArray


@dataclass(frozen=True, slots=True)
class Calendar:
    """All reservations, and what they leave."""

    reservations: tuple[Reservation, ...] = ()

    def __post_init__(self) -> None:
        names = [one.name for one in self.reservations]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"there are two reservations with the name '{twice}'", field="name")

    def __bool__(self) -> bool:
        return bool(self.reservations)

    def get(self, name: str) -> Reservation | None:
        """The reservation of this name."""
        return next((one for one in self.reservations if one.name == name), None)

    def having(self, changed: Reservation) -> Calendar:
        """The same calendar with this reservation, in place of one with the same name."""
        if self.get(changed.name) is None:
            return Calendar((*self.reservations, changed))
        return Calendar(tuple(changed if one.name == changed.name else one for one in self.reservations))

    def without(self, name: str) -> Calendar:
        """The same calendar without one reservation."""
        return Calendar(tuple(one for one in self.reservations if one.name != name))

    def shifted(self, by_s: float) -> Calendar:
        """The same calendar for a clock that shows `by_s` more."""
        return Calendar(
            tuple(
                replace(
                    one,
                    start_s=one.start_s + by_s,
                    end_s=None if one.end_s is None else one.end_s + by_s,
                )
                for one in self.reservations
            )
        )

    def next_change_s(self, now_s: float) -> float:
        """When the hours of a reservation begin or end next; infinite for never."""
        return min((one.next_change_s(now_s) for one in self.reservations), default=math.inf)

    def at(self, now_s: float) -> tuple[Reservation, ...]:
        """The reservations that want GPUs now, named nodes first."""
        wanting = [one for one in self.reservations if one.active(now_s) and (one.nodes or one.gpus)]
        return tuple(sorted(wanting, key=lambda one: not one.nodes))

    def ahead(self, cluster: Cluster, now_s: float, until_s: float = 0.0) -> SlotsAhead:
        """Capacity that promises may count on from now on, written out until `until_s` at least.

        Reservations take their GPUs out of `cluster`. A service that is followed counts with the most that it
        may want.
        """
        until_s = max(until_s, now_s + LOOK_AHEAD_S)
        times, gpus = [now_s], [self._left(cluster, [one for one in self.reservations if one.active(now_s)])]
        while len(times) < MOST_STEPS:
            at_s = self.next_change_s(times[-1])
            if at_s > until_s:
                break
            left = self._left(cluster, [one for one in self.reservations if one.active(at_s)])
            times.append(at_s)
            gpus.append(left)
        if math.isfinite(self.next_change_s(times[-1])):
            last_s = max(until_s, times[-1] + _ROUNDING_S)
            rest = [one for one in self.reservations if math.isfinite(one.next_change_s(last_s))]
            rest += [one for one in self.reservations if one.active(last_s) and one not in rest]
            times.append(last_s)
            gpus.append(self._left(cluster, rest))
        steps = [i for i in range(len(gpus)) if i == 0 or gpus[i] != gpus[i - 1]]
        return SlotsAhead(
            np.array([times[i] for i in steps], dtype=np.float64),
            np.array([gpus[i] for i in steps], dtype=np.int64),
        )

    def _left(self, cluster: Cluster, reservations: Iterable[Reservation]) -> int:
        """GPUs that are left beside these reservations."""
        named = {node for one in reservations for node in one.nodes}
        counts = sum(one.gpus if one.most is None else one.most for one in reservations if not one.nodes)
        names = np.array([node.name not in named for node in cluster.nodes])
        return max(int(cluster.node_gpus[names].sum()) - counts, 0)


NO_RESERVATIONS = Calendar()
