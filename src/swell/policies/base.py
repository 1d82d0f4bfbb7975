"""What a policy is: it admits jobs and says how many GPUs each is worth right now.

A policy is a small dataclass whose fields are its options. It is a pure function of the snapshot it is
given, apart from memory of its own that it keeps between calls (queues, leases, a population). It has no
clock, does no I/O, and never learns whether it runs in the simulator or on a live cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from swell.domain import IntArray
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
    """For a refused job: what stands in the way."""
    plan: object = None
    """What the policy wants to remember if the job does come in: it gets it back in `accepted`."""


ADMITTED = Admission(True)


@dataclass(frozen=True, slots=True)
class Decision:
    """How many GPUs each active job shall have, in the order of the snapshot's rows."""

    gpus: IntArray
    per_node: IntArray | None = None
    """Jobs x nodes, where the policy itself says on which nodes (Pollux); its row sums are `gpus`."""
    order: IntArray | None = None
    """Indices of jobs in the order in which they are to be placed; None for oldest first."""


PlacerName = Literal["packed", "buddy", "most-free", "first-fit"]
Knowledge = Literal["nothing", "profiles", "fitted"]


@dataclass(kw_only=True)
class Policy:
    """Base of all policies. Override `allocate`, and `admit` or `next_wakeup_s` where needed."""

    name: ClassVar[str]
    """The name people type."""
    paper: ClassVar[str]
    """Where it comes from."""
    goal: ClassVar[str]
    """What it is good for, in one line."""

    knows: ClassVar[Knowledge] = "nothing"
    """What it is told of the jobs' speed: nothing, their true profiles (an oracle, and reports say so), or
    models fitted on what was observed so far."""
    adaptive_batch: ClassVar[bool] = False
    """Whether jobs choose their batch size for the GPUs they have (Pollux) or keep the user's."""
    placer: ClassVar[PlacerName] = "packed"
    """How its shares are put on GPUs."""
    interval_s: ClassVar[float | None] = None
    """Length of its rounds; None for a policy that decides whenever a job comes or goes."""

    changes_with_time: ClassVar[bool] = True
    """Whether its decision may change though no job came or went. If not, rounds in which nothing happened
    are skipped; what it does want to see it names by `next_wakeup_s`."""

    def admit(self, snapshot: Snapshot, index: int) -> Admission:
        """May the job at `index` of the snapshot come in? The others are those admitted before it.

        This changes nothing, because people also ask without submitting: what must be remembered of an
        admitted job is remembered in `accepted`.
        """
        return ADMITTED

    def accepted(self, snapshot: Snapshot, index: int, admission: Admission) -> None:
        """The job at `index` came in on this answer of `admit` to the same snapshot."""

    def allocate(self, snapshot: Snapshot) -> Decision:
        """How many GPUs is each active job worth right now?"""
        raise NotImplementedError

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When it wants to decide again if nothing happens before; infinite for never."""
        return np.inf
