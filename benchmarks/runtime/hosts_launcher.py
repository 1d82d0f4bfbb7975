"""The launcher of a job whose workers are on several hosts of `netns`: slot k is host k.

The head, host 0, has the launcher and the coordinator. As on a real cluster, the launcher cannot end or start
a process on a host that is cut off from it: an order to end one is lost, an order to start one waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runtime import netns
from swell.train.agent import children
from swell.train.agent.launcher import Launcher
from swell.train.agent.run_config import RunConfig


class HostsLauncher(Launcher):
    """Forks each worker into the namespace of its slot."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], hosts: dict[str, Any]) -> None:
        self._namespaces: list[str] = hosts["namespaces"]
        self._addresses: list[str] = hosts["addresses"]
        self._cuts = Path(hosts["cuts"])
        self._slots: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        netns.enter(self._namespaces[0])
        config.cold = True
        config.settings |= {"host": self._addresses[0], "shared_memory": False}
        super().__init__(config, say)

    def _spawn(self, worker: str, slot: int | None = None) -> None:
        assert slot is not None, "a job on hosts has slots"
        self._workers[worker] = 0
        self._slots[worker] = slot
        if self._is_cut_off(slot):
            self._waiting[worker] = slot
            return
        order = self._order(worker)
        order["env"]["SWELL_HOST"] = self._addresses[slot]
        forked = children.fork(
            "benchmarks.runtime.hosts_launcher",
            [json.dumps(order)],
            Path(order["log"]),
            become=lambda: netns.enter(self._namespaces[slot]),
        )
        self._workers[worker] = forked.pid
        self._cold[forked.pid] = worker

    def _kill(self, worker: str) -> None:
        if worker in self._waiting:
            del self._waiting[worker]
            self._exited(worker, -9)
        elif self._finish is not None or not self._is_cut_off(self._slots[worker]):
            super()._kill(worker)

    def _turn(self, timeout_s: float) -> None:
        super()._turn(timeout_s)
        for worker, slot in list(self._waiting.items()):
            if not self._is_cut_off(slot):
                del self._waiting[worker]
                self._spawn(worker, slot)

    def _is_cut_off(self, slot: int) -> bool:
        cuts = json.loads(self._cuts.read_text())
        return [0, slot] in cuts or [slot, 0] in cuts


def main() -> int:
    """Become the worker of the given order."""
    import sys

    from swell.train.start import zygote

    return zygote.child(json.loads(sys.argv[1]))
