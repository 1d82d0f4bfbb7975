"""The registry: all policies by name, our own and those of other packages.

Another package adds a policy by an entry point in the group `swell.policies`:

    [project.entry-points."swell.policies"]
    my-policy = "my_package:MyPolicy"

Options follow the name: `pollux:p=-1,generations=50`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from dataclasses import MISSING, fields, replace
from importlib.metadata import entry_points
from typing import Any, cast, get_args, get_type_hints

import numpy as np

from swell.domain import InputError, IntArray, nearest
from swell.policies.base import Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

# Policies of other packages are checked where they are loaded and at each of their decisions.
#
# Tests check our own policies, so those are asked as they are and their decisions take no longer. A policy
# of another package is asked through a subclass that is made here: its answer is either a decision that the
# board can carry out, or an InputError that names the policy, the job and what is allowed.


_TEXTS = ("name", "paper", "goal")
_SWITCHES = ("adaptive_batch", "rigid", "changes_with_time")


def check_class(name: str, cls: object) -> type[Policy]:
    """The class behind the policy `name`; raises InputError if one of its attributes is missing or odd."""
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise _odd(name, "must be a subclass of swell.policies.Policy")
    if cls.allocate is Policy.allocate:
        raise _odd(name, "must have a method allocate(self, snapshot), which says how many GPUs each job has")
    if "__dataclass_fields__" not in vars(cls):
        raise _odd(name, "must be a dataclass: write @dataclass(kw_only=True) above it")
    for one in _TEXTS:
        if not isinstance(getattr(cls, one, None), str):
            raise _odd(name, f'must have a text `{one}`, such as {one}: ClassVar[str] = "..."')
    for one, kinds in (("knows", get_args(Knowledge)), ("placer", get_args(PlacerName))):
        if getattr(cls, one) not in kinds:
            raise _odd(name, f"`{one}` must be one of {', '.join(kinds)}, got {getattr(cls, one)!r}")
    for one in _SWITCHES:
        if not isinstance(getattr(cls, one), bool):
            raise _odd(name, f"`{one}` must be True or False, got {getattr(cls, one)!r}")
    round_s = cls.interval_s
    if round_s is not None and (not isinstance(round_s, int | float) or not 0 < round_s < math.inf):
        raise _odd(name, f"`interval_s` must be None or a number of seconds above 0, got {round_s!r}")
    for field in dataclasses.fields(cls):
        if field.init and field.default is dataclasses.MISSING:
            raise _odd(name, f"the option `{field.name}` must have a default")
    return cls


def checked(name: str, cls: type[Policy]) -> type[Policy]:
    """The same policy, whose answers are checked."""

    def allocate(self: Policy, snapshot: Snapshot) -> Decision:
        return check_decision(name, snapshot, cls.allocate(self, snapshot))

    def next_wakeup_s(self: Policy, snapshot: Snapshot, decision: Decision) -> float:
        moment_s = cls.next_wakeup_s(self, snapshot, decision)
        if not isinstance(moment_s, int | float) or math.isnan(moment_s):
            raise _odd(name, f"next_wakeup_s must return a moment in seconds, or inf, got {moment_s!r}")
        return moment_s

    def admit(self: Policy, snapshot: Snapshot, index: int) -> Admission:
        answer = cls.admit(self, snapshot, index)
        if not isinstance(answer, Admission):
            raise _odd(
                name, f"admit must return an Admission for {_job(snapshot, index)}, got {answer!r:.80}"
            )
        return answer

    def endangered(self: Policy, snapshot: Snapshot) -> IntArray:
        found = np.asarray(cls.endangered(self, snapshot))
        if (
            not _whole(found)
            or found.ndim != 1
            or (found.size and not 0 <= found.min() <= found.max() < len(snapshot))
        ):
            raise _odd(name, f"endangered must return indices below {len(snapshot)}, got {found!r:.80}")
        return found.astype(np.int64)

    methods: dict[str, Any] = {"allocate": allocate, "next_wakeup_s": next_wakeup_s, "endangered": endangered}
    if cls.admit is not Policy.admit:  # else the policy promises nothing
        methods["admit"] = admit
    return type(cls.__name__, (cls,), methods)


def check_decision(name: str, snapshot: Snapshot, decision: object) -> Decision:
    """The decision of the policy `name`, if it can be carried out; else an InputError that names the job."""
    if not isinstance(decision, Decision):
        raise _odd(name, f"allocate must return a Decision, got {decision!r:.80}")
    n = len(snapshot)
    gpus = np.asarray(decision.gpus)
    if gpus.shape != (n,):
        raise _odd(
            name, f"a decision must have one number of GPUs for each of {n} jobs, got the shape {gpus.shape}"
        )
    if not _whole(gpus):
        first = next(i for i in range(n) if not _is_whole(gpus[i]))
        raise _odd(name, f"{_job(snapshot, first)} must have a whole number of GPUs, got {gpus[first]}")
    gpus = gpus.astype(np.int64)
    too_few, too_many = (gpus < snapshot.min_gpus) & (gpus != 0), gpus > snapshot.max_gpus
    for odd in np.flatnonzero(too_few | too_many).tolist():
        allowed = f"0, or from {snapshot.min_gpus[odd]} to {snapshot.max_gpus[odd]}"
        raise _odd(name, f"{_job(snapshot, odd)} may have {allowed} GPUs, got {gpus[odd]}")
    if gpus.sum() > snapshot.capacity:
        raise _odd(name, f"all jobs together may have {snapshot.capacity} GPUs, got {gpus.sum()}")
    per_node = None if decision.per_node is None else np.asarray(decision.per_node)
    if per_node is not None:
        shape = (n, len(snapshot.cluster.nodes))
        if per_node.shape != shape or not _whole(per_node) or (per_node.size and per_node.min() < 0):
            raise _odd(name, f"per_node must be whole numbers of GPUs, {shape[0]} jobs by {shape[1]} nodes")
        per_node = per_node.astype(np.int64)
        for odd in np.flatnonzero(per_node.sum(axis=1) != gpus).tolist():
            given = per_node[odd].sum()
            raise _odd(name, f"{_job(snapshot, odd)} has {gpus[odd]} GPUs but {given} on the nodes")
        for node in np.flatnonzero(per_node.sum(axis=0) > snapshot.cluster.node_gpus).tolist():
            most, given = snapshot.cluster.node_gpus[node], per_node[:, node].sum()
            raise _odd(name, f"node {snapshot.cluster.nodes[node].name} has {most} GPUs, got {given}")
    _check_columns(name, snapshot, decision, gpus)
    return replace(decision, gpus=gpus, per_node=per_node)


def _check_columns(name: str, snapshot: Snapshot, decision: Decision, gpus: IntArray) -> None:
    """Check what a decision says beside the numbers of GPUs."""
    n, kinds = len(snapshot), snapshot.cluster.gpu_types
    if decision.order is not None and sorted(np.asarray(decision.order).tolist()) != list(range(n)):
        raise _odd(name, f"order must have each index below {n} once")
    if decision.gpu_types is not None and (
        len(decision.gpu_types) != n or set(decision.gpu_types) - set(kinds)
    ):
        raise _odd(name, f"gpu_types must be one of {', '.join(kinds)} for each of {n} jobs")
    if decision.lent is not None:
        lent = np.asarray(decision.lent)
        if lent.shape != (n,) or not _whole(lent) or (lent < 0).any() or (lent > gpus).any():
            raise _odd(name, "lent must be a whole number from 0 to its GPUs for each job")
    if decision.stay is not None and (
        np.shape(decision.stay) != (n,) or np.asarray(decision.stay).dtype != bool
    ):
        raise _odd(name, f"stay must be True or False for each of {n} jobs")


def _whole(numbers: Any) -> bool:
    """Whether all numbers of an array are whole, whatever its type."""
    if numbers.dtype.kind in "iu":
        return True
    return numbers.dtype.kind == "f" and bool(np.all(np.isfinite(numbers) & (numbers == np.rint(numbers))))


def _is_whole(number: Any) -> bool:
    return bool(_whole(np.asarray(number)))


def _job(snapshot: Snapshot, index: int) -> str:
    return f"job '{snapshot.table.specs[int(snapshot.rows[index])].job_id}'"


def _odd(name: str, text: str) -> InputError:
    return InputError(f"policy '{name}': {text}", field="policy")


GROUP = "swell.policies"

BUILT_IN: dict[str, str] = {
    "fifo": "swell.policies.baselines:Fifo",
    "srtf": "swell.policies.baselines:Srtf",
    "edf": "swell.policies.deadlines:Edf",
    "edf-admission": "swell.policies.deadlines:EdfAdmission",
    "max-min": "swell.policies.baselines:MaxMin",
    "tiresias": "swell.policies.tiresias:Tiresias",
    "tiresias-gittins": "swell.policies.tiresias:TiresiasGittins",
    "gandiva": "swell.policies.gandiva:Gandiva",
    "themis": "swell.policies.themis:Themis",
    "optimus": "swell.policies.optimus:Optimus",
    "elastic-tiresias": "swell.policies.tiresias:ElasticTiresias",
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
