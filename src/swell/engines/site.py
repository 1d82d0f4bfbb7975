"""Where the workers of an engine live: this machine (`local`) or a Ray cluster (`ray.site`).

`SupervisedEngine` tends jobs in the same way on both. It asks its site for all that differs: the slots there
are, who may start there, and how a job's supervisor is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from swell.domain import Cluster, Placement
from swell.engines.accounts import Account
from swell.engines.base import Launch
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent.children import Child


class Site(Protocol):
    """`cluster` and `check` are called from any thread; all else, once it is open, from the engine's."""

    name: str
    home: Path

    def prepare(self) -> None:
        """Begin with what takes long and touches no job, for a control plane that may have to lead soon."""

    def open(self, poke: Callable[[], None]) -> None:
        """Get ready for jobs; raises SwellError if there can be none. `poke`, called from any thread, has the
        engine take a turn now."""

    def close(self) -> None:
        """Stop watching. Jobs go on."""

    def look(self, jobs: Sequence[SupervisedJob], now_s: float) -> bool:
        """Called in every turn of the engine, with all of its jobs: keep helpers of the site alive, and see
        what has changed. True if the nodes have changed, or which slots other users hold."""

    # -- the slots ---------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The present nodes and slots."""

    def usable(self, slots: Placement) -> Placement:
        """Those of the slots that workers can be on now."""

    def retired(self) -> frozenset[int]:
        """Slots that jobs have to leave, because what they are made of belongs to other slots now."""

    # -- the jobs ----------------------------------------------------------------------------------------

    def check(self, launch: Launch) -> None:
        """Raise InputError for a job that could never run here; called before a job is accepted."""

    def account(self, owner: str) -> Account | None:
        """The account that jobs of this user run as; None for the platform's own."""

    def may_start(self, job: SupervisedJob) -> bool:
        """Whether processes of a job that has none may be started now."""

    def order_extras(self) -> dict[str, Any]:
        """What the order for a job's supervisor says of this site."""

    def start_supervisor(self, job: SupervisedJob) -> Child:
        """Start the supervisor of a job, as the job's account."""

    def abandoned(self, job: SupervisedJob) -> bool:
        """Whether a job that has processes belongs to an earlier run of this site, which will not return."""

    def sweep(self, job: SupervisedJob) -> bool:
        """Kill what is left of a job whose supervisor has ended; False if some of it is still ending."""
