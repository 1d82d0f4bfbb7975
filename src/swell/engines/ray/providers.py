"""Who provides the nodes that a platform on Ray rents: this machine, or the autoscaler of the Ray cluster."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence

from swell.cloud import Offer, Supply
from swell.engines.ray import raylet
from swell.engines.ray.site import RaySite

log = logging.getLogger(__name__)


class LocalProvider:
    """Starts and ends Ray nodes on this machine, for tests and to try it. They outlive the control plane."""

    def __init__(self, site: RaySite, offer: Offer) -> None:
        self._site, self._offer, self._home = site, offer, site.home
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """By name: the processes that this one has started."""
        self._ending: set[str] = set()
        """Nodes that were told to end and still live."""

    @property
    def offer(self) -> Offer:
        """Equal nodes of this machine."""
        return self._offer

    def supply(self) -> Supply:
        """The nodes that have joined Ray, and how many are starting."""
        ready, coming = self._look()
        return Supply(tuple(ready), len(coming))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Start or end nodes, so that there are so many."""
        ready, coming = self._look()
        surplus = len(ready) + len(coming) - nodes
        there = {*ready, *coming}
        for name in [one for one in [*reversed(coming), *spare] if one in there][: max(surplus, 0)]:
            self._end(name)
        taken = there | self._ending
        free = [name for name in self._site.rented_names if name not in taken]
        for name in free[: max(-surplus, 0)]:
            self._start(name)

    def _look(self) -> tuple[list[str], list[str]]:
        """The nodes that are up, and those that are starting; nodes that are ending are in neither."""
        living, address = raylet.running(self._home), self._site.address
        for name, process in list(self._started.items()):
            if process.poll() is not None:
                del self._started[name]
                if process.returncode and name not in self._ending:
                    log.error("node %s ended; see %s", name, self._home / raylet.FOLDER / f"{name}.log")
        self._ending &= living.keys() | self._started.keys()
        ready, coming = list[str](), list[str]()
        for name in sorted(living.keys() | self._started.keys(), key=lambda name: (len(name), name)):
            joined = raylet.address_of(self._home, name, living[name]) if name in living else None
            if joined is not None and address and joined != address and name not in self._ending:
                self._end(name)  # it belongs to an earlier run of Ray, and can never be used again
            if name not in self._ending:
                (coming if joined is None else ready).append(name)
        return ready, coming

    def _start(self, name: str) -> None:
        address = self._site.address
        if not address:
            return  # Ray has not been seen yet: the nodes are requested again at the next look
        asked: dict[str, str | int] = {"home": str(self._home.resolve()), "name": name, "address": address}
        asked |= {"resource": self._site.resource, "slots": self._offer.gpus_per_node}
        folder = self._home / raylet.FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"{name}.log").open("wb") as errors:
            self._started[name] = subprocess.Popen(
                [sys.executable, "-m", "swell.engines.ray.raylet", json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env=self._site.access() | {"RAY_USAGE_STATS_ENABLED": "0"},
            )

    def _end(self, name: str) -> None:
        self._ending.add(name)
        if not raylet.ask_to_stop(self._home, name) and name in self._started:
            self._started[name].terminate()  # it does not hold its lock yet


class RayProvider:
    """Has the autoscaler of a Ray cluster add nodes, and end nodes that are idle, by what it is asked to fit.

    Ray itself chooses the nodes that it ends: those that have been idle for as long as its own settings say.
    So a node that was let go is paid for until then.
    """

    def __init__(self, site: RaySite, offer: Offer) -> None:
        self._site, self._offer = site, offer
        self._requested: int | None = None

    @property
    def offer(self) -> Offer:
        """What the nodes are, as the platform was told."""
        return self._offer

    def supply(self) -> Supply:
        """The nodes of the right size that Ray has, and how many are missing of those requested."""
        mine = set(self._site.rented_names)
        ready = tuple(n.name for n in self._site.cluster().nodes if n.up and n.name in mine)
        return Supply(ready, max((self._requested or 0) - len(ready), 0))

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Ask Ray to have room for so many whole nodes; which ones it ends is its own choice."""
        if nodes != self._requested:
            self._requested = nodes
            self._site.request_bundles([{self._site.resource: self._offer.gpus_per_node}] * nodes)
