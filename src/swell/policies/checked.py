"""Policies of other packages are checked where they are loaded and at each of their decisions.

Tests check our own policies, so those are asked as they are and their decisions take no longer. A policy of
another package is asked through a subclass that is made here: its answer is either a decision that the board
can carry out, or an InputError that names the policy, the job and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from swell.domain import InputError, IntArray
from swell.policies.base import Admission, Decision, Knowledge, PlacerName, Policy
from swell.policies.snapshot import Snapshot

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
