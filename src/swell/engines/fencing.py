"""The fencing number of a home's leader, for supervisors.

A control plane that starts a supervisor may be frozen before the supervisor runs, and another one may lead by
then. So the order for a supervisor has the number of the leader that gave it, and a supervisor whose order is
older than the number in the home does not run: the present leader may have decided otherwise.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swell.engines.files import write_json
from swell.train.agent.regular import read_regular

FILE = "fence.json"


@dataclass(frozen=True, slots=True)
class Fence:
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
            write_json(home / FILE, asdict(self))

    @staticmethod
    def _read(home: Path) -> Fence | None:
        try:
            content = json.loads(read_regular(home / FILE, 1024))
            return Fence(str(content["store"]), int(content["number"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def for_order(self, home: Path) -> dict[str, Any]:
        """What the order for a supervisor says of the leader that gives it."""
        return {"fence": asdict(self) | {"home": str(home)}}


def order_outdated(extras: Any) -> bool:
    """Whether the order with these extras comes from a control plane that leads no longer."""
    fence = extras.get("fence")
    return fence is not None and Fence(fence["store"], fence["number"]).outdated(Path(fence["home"]))
