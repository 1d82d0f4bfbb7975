"""The description of a sweep, read from the tables of a file and checked once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swell.domain import InputError, nearest

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("halving", "median", "none")
DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several values."""

    values: tuple[str | int | float | bool, ...]


@dataclass(frozen=True, slots=True)
class Between:
    """A number from a range: whole if both ends and the step are."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step or 1))


Parameter = Choice | Between
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Sweep:
    """How many trials, of what, and what is best."""

    parameters: Mapping[str, Parameter]
    metric: str = "loss"
    """A name that the script gives to `job.log`, or `loss`."""
    direction: str = "minimize"
    trials: int = 20
    parallel: int | None = None
    """Trials at a time; as many as the cluster has slots if None."""
    sampler: str = "tpe"
    pruner: str = "halving"
    warmup: int = 1
    """Epochs that each trial may train before it can be given up."""
    seed: int = 0

    @classmethod
    def of_tables(cls, sweep: object, parameters: object) -> Sweep:
        """Check the tables `sweep` and `parameters` of a file; raises InputError with the field's name."""
        given = _table("sweep", {} if sweep is None else sweep)
        known = {name for name in cls.__dataclass_fields__ if name != "parameters"}
        for name in given:
            if name not in known:
                raise InputError(
                    f"sweep.{name}: there is no such field.{nearest(name, sorted(known))} "
                    f"Fields: {', '.join(sorted(known))}",
                    field=f"sweep.{name}",
                )
        for name, allowed in (("sampler", SAMPLERS), ("pruner", PRUNERS), ("direction", DIRECTIONS)):
            if given.get(name, allowed[0]) not in allowed:
                raise InputError(
                    f"sweep.{name}: got {given[name]!r}, must be one of {', '.join(allowed)}",
                    field=f"sweep.{name}",
                )
        for name, least in (("trials", 1), ("parallel", 1), ("warmup", 1), ("seed", 0)):
            value = given.get(name, least)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"sweep.{name}: got {value!r}, must be a whole number of at least {least}",
                    field=f"sweep.{name}",
                )
        if not isinstance(given.get("metric", ""), str):
            raise InputError(f"sweep.metric: got {given['metric']!r}, must be a text", field="sweep.metric")
        space = _table("parameters", parameters)
        if not space:
            raise InputError(
                "parameters: none given; add a table such as [parameters] with "
                "lr = { low = 1e-4, high = 1e-1, log = true }",
                field="parameters",
            )
        made = cls({name: _parameter(name, value) for name, value in space.items()}, **given)
        if made.sampler == "grid" and any(
            isinstance(p, Between) and (p.log or (p.step is None and not p.whole))
            for p in made.parameters.values()
        ):
            raise InputError(
                "sweep.sampler: a grid needs lists of values, whole ranges or ranges with a step; "
                'use sampler = "tpe" for the others',
                field="sweep.sampler",
            )
        if made.sampler == "grid":
            points = len(grid(made.parameters))
            made = replace(made, trials=min(points, made.trials) if "trials" in given else points)
        return made


def grid(parameters: Mapping[str, Parameter]) -> list[dict[str, Value]]:
    """All combinations, in order."""
    axes: list[list[Value]] = []
    for parameter in parameters.values():
        if isinstance(parameter, Choice):
            axes.append(list(parameter.values))
        else:
            step = parameter.step or 1
            count = math.floor((parameter.high - parameter.low) / step + 1e-9) + 1
            axes.append([parameter.low + i * step for i in range(count)])
    return [dict(zip(parameters, point)) for point in itertools.product(*axes)]


def _table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{name}: got {value!r}, must be a table", field=name)
    return {str(key): entry for key, entry in value.items()}


def _parameter(name: str, value: object) -> Parameter:
    field = f"parameters.{name}"
    forms = "a list of values or a range such as { low = 16, high = 128 } (also: step, log = true)"
    if isinstance(value, list):
        if not value or any(isinstance(entry, list | dict) for entry in value):
            raise InputError(
                f"{field}: got {value!r}, must be a list of one or more plain values", field=field
            )
        return Choice(tuple(value))
    if not isinstance(value, dict) or not {"low", "high"} <= set(value) <= {"low", "high", "step", "log"}:
        raise InputError(f"{field}: got {value!r}, must be {forms}", field=field)
    low, high, step, log = value["low"], value["high"], value.get("step"), value.get("log", False)
    for part, number in (("low", low), ("high", high), ("step", 1 if step is None else step)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"{field}.{part}: got {number!r}, must be a number", field=f"{field}.{part}")
    if not low < high:
        raise InputError(f"{field}: low {low} must be less than high {high}", field=field)
    if step is not None and not 0 < step <= high - low:
        raise InputError(
            f"{field}.step: got {step}, must lie between 0 and high - low", field=f"{field}.step"
        )
    if not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
        raise InputError(
            f"{field}.log: got {log!r}; must be true or false, and true needs a low above 0 and no step",
            field=f"{field}.log",
        )
    return Between(low, high, step, log)
