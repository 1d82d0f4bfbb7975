"""The registry: all policies by name, our own and those of other packages.

Another package adds a policy by an entry point in the group `swell.policies`:

    [project.entry-points."swell.policies"]
    my-policy = "my_package:MyPolicy"

Options follow the name: `pollux:p=-1,generations=50`.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from typing import Any, cast, get_type_hints

from swell.domain import InputError, nearest
from swell.policies.base import Policy
from swell.policies.checked import check_class, checked

GROUP = "swell.policies"

BUILT_IN: dict[str, str] = {
    "fifo": "swell.policies.rigid:Fifo",
    "srtf": "swell.policies.rigid:Srtf",
    "edf": "swell.policies.deadlines:Edf",
    "edf-admission": "swell.policies.deadlines:EdfAdmission",
    "max-min": "swell.policies.fairness:MaxMin",
    "tiresias": "swell.policies.tiresias:Tiresias",
    "tiresias-gittins": "swell.policies.tiresias:TiresiasGittins",
    "gandiva": "swell.policies.gandiva:Gandiva",
    "themis": "swell.policies.themis:Themis",
    "optimus": "swell.policies.optimus:Optimus",
    "elastic-tiresias": "swell.policies.edl:ElasticTiresias",
    "oasis": "swell.policies.oasis:Oasis",
    "afs-l": "swell.policies.afs:AfsL",
    "afs-p": "swell.policies.afs:AfsP",
    "elasticflow": "swell.policies.elasticflow:ElasticFlow",
    "pollux": "swell.policies.pollux:Pollux",
    "tide": "swell.policies.tide:Tide",
    "tide-fixed": "swell.policies.tide:TideFixed",
}


DEFAULT = "tide"
"""The policy of a platform that was told none."""


def policy_names() -> list[str]:
    """The names of all policies, our own first."""
    return list(BUILT_IN) + sorted(e.name for e in entry_points(group=GROUP) if e.name not in BUILT_IN)


def policy_class(name: str) -> type[Policy]:
    """The class behind a name; that of another package is checked, and so are its decisions."""
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name].split(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        plugins = entry_points(group=GROUP, name=name)
        if not plugins:
            names = policy_names()
            raise InputError(
                f"unknown policy '{name}'.{nearest(name, names)} Known: {', '.join(names)}", field="policy"
            )
        try:
            loaded = next(iter(plugins)).load()
        except Exception as error:
            raise InputError(
                f"policy '{name}' cannot be loaded from {next(iter(plugins)).value}: {error!r}",
                field="policy",
            ) from error
        return _as_checked(name, loaded)
    return cast(type[Policy], found)


@functools.cache
def _as_checked(name: str, loaded: object) -> type[Policy]:
    return checked(name, check_class(name, loaded))


def options_of(cls: type[Policy]) -> dict[str, tuple[type, Any]]:
    """The options of a policy: name -> (type, default)."""
    hints = get_type_hints(cls)
    return {f.name: (hints[f.name], f.default) for f in fields(cls) if f.init and f.default is not MISSING}


def is_ours(text: str) -> bool:
    """Whether a policy, with or without options, is one of those that come with swell."""
    return text.partition(":")[0].strip() in BUILT_IN


def described() -> list[dict[str, Any]]:
    """All policies for people to choose from: paper, goal, what they know about jobs, and their options."""
    return [_describe(name) for name in policy_names()]


def _describe(name: str) -> dict[str, Any]:
    try:
        cls = policy_class(name)
        options = options_of(cls)
    except Exception as error:  # a broken plug-in must not break the whole list
        return {"name": name, "error": str(error)}
    return {
        "name": name,
        "paper": cls.paper,
        "goal": cls.goal,
        "knows": cls.knows,
        "adaptive_batch": cls.adaptive_batch,
        "interval_s": cls.interval_s,
        "options": [
            {"name": option, "type": getattr(kind, "__name__", str(kind)), "default": _plain(default)}
            for option, (kind, default) in options.items()
        ],
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)


def make_policy(text: str) -> Policy:
    """A policy from text: a name, or a name with options such as `pollux:p=-1`."""
    name, _, rest = text.partition(":")
    cls = policy_class(name.strip())
    options = options_of(cls)
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in options:
            allowed = ", ".join(options) or "none"
            hint = nearest(key, list(options))
            raise InputError(
                f"policy '{name}' has no option '{key}'.{hint} Its options: {allowed}", field=key
            )
        kind = options[key][0]
        try:
            given[key] = _convert(kind, value.strip())
        except ValueError as error:
            raise InputError(
                f"policy '{name}': option {key} must be {kind.__name__}, got '{value}'", field=key
            ) from error
    return cls(**given)


def _convert(kind: type, value: str) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(value)
        return value.lower() in ("true", "1", "yes")
    return kind(value)
