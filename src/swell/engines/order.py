"""start.json: what a job's supervisor is to run.

The engine writes the file. The supervisor reads it, and so does an engine that takes the job over after a
restart. It holds the job's request as it was accepted, and what the platform and the engine added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swell.domain import JobRequest, Placement
from swell.engines.accounts import Account
from swell.engines.base import Launch
from swell.engines.files import write_json
from swell.train.agent.regular import read_regular

FILE = "start.json"
_OWN = ("job_id", "request", "max_workers", "owner", "slots", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a supervisor is to run."""

    launch: Launch
    slots: Placement
    """The slots that the job has workers on, one for each: those it begins with, and later those that its
    coordinator was last told."""
    placement: Placement
    """The slots that the job is to have, for an engine that takes the job over."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the site adds: 'gpus' and 'per_gpu' (local), or 'ray'."""

    def write(self, account: Account | None = None) -> None:
        """Put the order into the job's directory, for this account to read."""
        launch = self.launch
        # The supervisor may run in another directory than the engine.
        request = launch.request.to_json() | {"workdir": str(launch.workdir.resolve())}
        content = {
            "job_id": launch.job_id,
            "request": request,
            "max_workers": launch.max_workers,
            "owner": launch.owner,
            "slots": list(self.slots),
            "placement": list(self.placement),
            **self.extras,
        }
        write_json(launch.job_dir / FILE, content, account)

    @classmethod
    def read(cls, job_dir: Path) -> Order:
        """The order in a job's directory; OSError, ValueError, KeyError or TypeError if it is unusable."""
        content = json.loads(read_regular(job_dir / FILE))
        if "request" not in content:
            content = _upgraded(content)
        launch = Launch(
            job_id=str(content["job_id"]),
            request=JobRequest.from_json(content["request"]),
            job_dir=job_dir,
            max_workers=int(content["max_workers"]),
            owner=str(content.get("owner", "")),
        )
        return cls(
            launch=launch,
            slots=tuple(content.get("slots", content["placement"])),
            placement=tuple(content["placement"]),
            extras={name: value for name, value in content.items() if name not in _OWN},
        )


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of swell 0.1, which mixed fields of the request with its own."""
    script, *args = content["command"]
    request = {name: content[name] for name in content if name not in ("workers", "max_workers")}
    kept = {name: content[name] for name in (*_OWN, "ray") if name in content}
    return kept | {"request": request | {"name": content["job_id"], "script": script, "args": args}}
