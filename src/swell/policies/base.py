"""What a policy is: it admits jobs and says how many GPUs each of them should have right now.

A policy is a small dataclass whose fields are its options. It is a pure function of the snapshot it is
given, apart from what it remembers between calls (queues, leases, a population). It has no clock, does no
I/O, and never learns whether it runs in the simulator or on a live cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np

from swell.domain import BoolArray, IntArray
from swell.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to 'may this job come in, and by when will it be done?'."""

    admitted: bool
    finish_s: float | None = None
    """The guaranteed finish of an admitted deadline job, where the policy promises one."""
    earliest_deadline_s: float | None = None
    """For a refused job: the earliest deadline that would have been admitted, if the policy can tell."""
    reason: str = ""
    """For a refused job: why it is refused."""
    plan: object = None
    """What the policy has to remember if the job is accepted; it is handed back to `accepted`."""
    gpu_type: str | None = None
    """The GPU type that a promised finish is planned on, on a cluster with several types."""


ADMITTED = Admission(True)


@dataclass(frozen=True, slots=True)
class Decision:
    """How many GPUs each active job should have, in the order of the snapshot's rows."""

    gpus: IntArray
    per_node: IntArray | None = None
    """GPUs as jobs x nodes, if the policy itself chooses the nodes (Pollux); the row sums are `gpus`."""
    order: IntArray | None = None
    """Indices of jobs in the order in which they are to be placed; None for oldest first."""
    gpu_types: tuple[str, ...] | None = None
    """The GPU type of each job, if each is to be on GPUs of one given type."""
    lent: IntArray | None = None
    """How many of each job's GPUs no promise counts on; of a promised job, services take these back first."""
    stay: BoolArray | None = None
    """Jobs that are moved for others only if there is no other way: one more stop would make them late."""


PlacerName = Literal["packed", "buddy", "most-free", "first-fit"]
Knowledge = Literal["nothing", "profiles", "fitted"]


@dataclass(kw_only=True)
class Policy:
    """Base of all policies. Override `allocate`, and `admit` or `next_wakeup_s` where needed."""

    name: ClassVar[str]
    """The name of the policy on the command line."""
    paper: ClassVar[str]
    """The paper that the policy comes from."""
    goal: ClassVar[str]
    """What the policy is good for, in one line."""

    knows: ClassVar[Knowledge] = "nothing"
    """What the policy is told of the jobs' speed: nothing, their true profiles (then it has an oracle, and
    reports say so), or models fitted on the observations so far."""
    adaptive_batch: ClassVar[bool] = False
    """Whether jobs choose their batch size for the GPUs they have (Pollux) or keep the user's."""
    placer: ClassVar[PlacerName] = "packed"
    """The placer that turns the policy's shares into placements."""
    interval_s: ClassVar[float | None] = None
    """Length of the policy's rounds; None if it decides whenever a job comes or goes."""

    rigid: ClassVar[bool] = False
    """Whether a job gets exactly the GPUs that it asked for, or none."""

    serves: ClassVar[str] = ""
    """Who comes first, as the end of the sentence 'the job waits, as the policy serves ...'. May be empty."""

    changes_with_time: ClassVar[bool] = True
    """Whether the policy's decision may change although no job came or went. If not, rounds in which nothing
    happened are skipped, apart from the moments it asks for with `next_wakeup_s`."""

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """Decide whether to admit the job at `index` of the snapshot; the others were admitted before it.

        This must change nothing, because a quote asks without submitting. What the policy has to remember of
        an admitted job it remembers in `accepted`.
        """
        return ADMITTED

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """The job at `index` was submitted and admitted with this answer of `admit` to the same snapshot."""

    def endangered(self, snapshot: Snapshot) -> IntArray:
        """Indices of the promised jobs that this policy could not end in time from here. Changes nothing."""
        return np.empty(0, dtype=np.int64)

    def allocate(self, snapshot: Snapshot) -> Decision:
        """How many GPUs each active job should have right now."""
        raise NotImplementedError

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the policy has to decide again if nothing happens before; infinite for never."""
        return np.inf


_Wrapper = TypeVar("_Wrapper", bound=Policy)
_SHOWN = (
    "name",
    "paper",
    "goal",
    "knows",
    "adaptive_batch",
    "placer",
    "interval_s",
    "rigid",
    "serves",
    "changes_with_time",
)


def dressed_as(policy: Policy, wrapper: type[_Wrapper]) -> type[_Wrapper]:
    """The class of a policy around another one (`ByType`, `ByTeam`) that is known by the inner one's name."""
    shown = {name: getattr(policy, name) for name in _SHOWN}
    made: type[_Wrapper] = type(wrapper.__name__, (wrapper,), shown)
    return made


def gives_promises(policy: Policy) -> bool:
    """Whether the policy decides which jobs are admitted; if it is around another one, whether that does."""
    while isinstance(inner := getattr(policy, "policy", None), Policy):
        policy = inner
    return type(policy).admit is not Policy.admit
