"""What the platform writes down about a job that it has started, and where: in `orders/JOB` of the home.

    start.json      what the job's supervisor is to run
    lock            held while a supervisor lives; its content is the name of the supervisor's machine
    exit.json       how the job ended; absent if it was killed from outside
    supervisor.log  what supervisors of the job complained about

No job can reach this folder: it belongs to the platform's account and is hidden by the wall. The job's own
directory, `jobs/JOB`, belongs to the job, and nothing is read from there that decides about jobs.

The engine writes start.json. The supervisor reads it, and so does an engine that takes the job over after a
restart. It holds the job's request as it was accepted, and what the platform and the engine added. The name
of the folder alone identifies the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swell.domain import JobRequest, Placement
from swell.engines.base import Launch
from swell.engines.processes import write_json
from swell.train.agent.regular import read_regular

# The fencing number of a home's leader, for supervisors.
#
# A control plane that starts a supervisor may be frozen before the supervisor runs, and another one may
# lead by then. So the order for a supervisor has the number of the leader that gave it, and a supervisor
# whose order is older than the number in the home does not run: the present leader may have decided
# otherwise.


FENCE = "fence.json"


@dataclass(frozen=True, slots=True)
class LeaderFence:
    """Which leader a control plane is: numbers count within one store."""

    store: str
    """The id of the store."""
    number: int

    def outdated(self, home: Path) -> bool:
        """Whether a later control plane leads in this home."""
        found = self._read(home)
        return found is not None and found.store == self.store and found.number > self.number

    def raise_in(self, home: Path) -> None:
        """Have orders of all earlier leaders refused in this home."""
        if not self.outdated(home):
            write_json(home / FENCE, asdict(self))

    @staticmethod
    def _read(home: Path) -> LeaderFence | None:
        try:
            content = json.loads(read_regular(home / FENCE, 1024))
            return LeaderFence(str(content["store"]), int(content["number"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def for_order(self, home: Path) -> dict[str, Any]:
        """What the order for a supervisor says of the leader that gives it."""
        return {"fence": asdict(self) | {"home": str(home)}}


def order_outdated(extras: Any) -> bool:
    """Whether the order with these extras comes from a control plane that leads no longer."""
    fence = extras.get("fence")
    return fence is not None and LeaderFence(fence["store"], fence["number"]).outdated(Path(fence["home"]))


START, LOCK, EXIT, LOG = "start.json", "lock", "exit.json", "supervisor.log"
_OWN = ("request", "max_workers", "owner", "slots", "placement", "account")


def folder_of(job_dir: Path) -> Path:
    """The folder with the platform's files about the job in this directory."""
    return job_dir.parent.parent / "orders" / job_dir.name


def make_folder(job_dir: Path) -> Path:
    """The folder with the platform's files about a job, for the platform's account alone."""
    folder = folder_of(job_dir)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    return folder


def started(home: Path) -> list[Path]:
    """The directories of the jobs that were started in this home and are not over."""
    return [home / "jobs" / path.parent.name for path in sorted((home / "orders").glob(f"*/{START}"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What a supervisor is to run."""

    launch: Launch
    slots: Placement
    """The slots that the job has workers on, one for each: those it begins with, and later those that its
    coordinator was last told."""
    placement: Placement
    """The slots that the job is to have, for an engine that takes the job over."""
    account: str | None = None
    """The account that the job runs as; None for the platform's own."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the site adds: 'gpus' and 'per_gpu' (local), or 'ray'."""

    def write(self) -> None:
        """Write the order down, for the job's supervisor."""
        launch = self.launch
        # The supervisor may run in another directory than the engine.
        request = launch.request.to_json() | {"workdir": str(launch.workdir.resolve())}
        content = {
            "request": request,
            "max_workers": launch.max_workers,
            "owner": launch.owner,
            "slots": list(self.slots),
            "placement": list(self.placement),
            "account": self.account,
            **self.extras,
        }
        write_json(make_folder(launch.job_dir) / START, content)

    @classmethod
    def read(cls, job_dir: Path) -> JobOrder:
        """The order for the job in this directory; raises an exception of any kind if it is unusable."""
        content = json.loads(read_regular(folder_of(job_dir) / START))
        launch = Launch(
            job_id=job_dir.name,
            request=JobRequest.from_json(content["request"]),
            job_dir=job_dir,
            max_workers=_whole(content["max_workers"]),
            owner=str(content["owner"]),
        )
        account = content.get("account")
        return cls(
            launch=launch,
            slots=tuple(map(_whole, content["slots"])),
            placement=tuple(map(_whole, content["placement"])),
            account=None if account is None else str(account),
            extras={name: value for name, value in content.items() if name not in _OWN},
        )


def _whole(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ValueError(f"got {raw!r:.80}, must be a whole number from 0 on")
    return raw
