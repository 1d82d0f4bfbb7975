"""The workers of a job on several hosts of `netns`: slot k is host k.

The head, host 0, has the launcher and the coordinator. As on a real cluster, the launcher cannot end or start
a process on a host that is cut off from it: an order to end one is lost, an order to start one waits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.runtime import netns
from swell.train.agent import children
from swell.train.agent.run_config import RunConfig
from swell.train.agent.worker_processes import Exited, LocalWorkers, News


class HostsWorkers(LocalWorkers):
    """Forks each worker into the namespace of its slot."""

    def __init__(self, config: RunConfig, hosts: dict[str, Any]) -> None:
        super().__init__()
        self._namespaces: list[str] = hosts["namespaces"]
        self._addresses: list[str] = hosts["addresses"]
        self._cuts = Path(hosts["cuts"])
        self._slots: dict[str, int] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        """Orders that have not reached their host."""
        self._never: list[str] = []
        """Workers that were ended before they were started, since the last news."""
        netns.enter(self._namespaces[0])
        config.cold = True
        config.settings |= {"host": self._addresses[0], "shared_memory": False}

    def names(self) -> list[str]:
        """The workers that were started, or are waiting to be."""
        return [*super().names(), *self._waiting]

    def spawn(self, order: dict[str, Any], slot: int | None) -> None:
        """Start a worker on the host of its slot once that can be reached."""
        assert slot is not None, "a job on hosts has slots"
        self._slots[order["spawn"]] = slot
        if self._is_cut_off(slot):
            self._waiting[order["spawn"]] = order
        else:
            super().spawn(order, slot)

    def _begin(self, order: dict[str, Any], slot: int | None) -> children.Child:
        assert slot is not None
        order["env"]["SWELL_HOST"] = self._addresses[slot]
        return children.fork(
            "benchmarks.runtime.hosts_workers",
            [json.dumps(order), self._namespaces[slot]],
            Path(order["log"]),
        )

    def kill(self, worker: str) -> None:
        """Kill a worker, unless its host is cut off."""
        if self._waiting.pop(worker, None) is not None:
            self._never.append(worker)
        elif not self._is_cut_off(self._slots[worker]):
            super().kill(worker)

    def kill_all(self) -> None:
        """Kill all workers, wherever they are."""
        self._waiting.clear()
        for worker in self.names():
            super().kill(worker)

    def hear(self) -> list[News]:
        """Start the workers whose hosts can be reached again."""
        for worker in [name for name in self._waiting if not self._is_cut_off(self._slots[name])]:
            self.spawn(self._waiting.pop(worker), self._slots[worker])
        never, self._never = self._never, []
        return [*super().hear(), *(Exited(worker, -9) for worker in never)]

    def _is_cut_off(self, slot: int) -> bool:
        cuts = json.loads(self._cuts.read_text())
        return [0, slot] in cuts or [slot, 0] in cuts


def main() -> int:
    """Become the worker of the given order, on the host of the given namespace."""
    import sys

    from swell.train.start import zygote

    netns.enter(sys.argv[2])
    return zygote.child(json.loads(sys.argv[1]))
