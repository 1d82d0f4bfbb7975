"""The scout watches the Ray cluster for the engine, in a process of its own, because Ray may end any process
that is connected to it.

    python -m swell.engines.ray.scout '{"address": ..., "key": ..., "warm": ..., "platform": ...}'

The scout keeps a prepared process on every node. Twice a second it writes a JSON line with the living nodes,
their resources, what of these is free and who holds the rest (`claims`), and the state of the prepared
processes. It ends when its standard
input is closed. A line with `error` is the last one, and says why. With `bundles`, in its argument or in a
JSON line on standard input, it asks Ray's own autoscaler to have room for these bundles of resources.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any

from swell.engines.ray.claims import Claims
from swell.engines.ray.connection import connect
from swell.engines.ray.holder import Warm

EVERY_S = 0.5
AGAIN_S = 5.0
"""How long to wait before a lost prepared process is replaced."""


class Lookout:
    """Reads Ray's list of nodes. Over Ray's client that works only inside the cluster, so it is an actor."""

    def __init__(self, platform: str, resources: list[str]) -> None:
        self._claims = Claims(platform, resources)

    def look(self) -> list[dict[str, Any]]:
        """The living nodes, with what they have, what is free, and who holds the rest."""
        ray: Any = importlib.import_module("ray")
        state: Any = importlib.import_module("ray._private.state")

        free = state.available_resources_per_node()
        nodes = [
            _node(node, free[node["NodeID"]])
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] in free
        ]
        self._claims.note(nodes)
        return nodes

    def request(self, bundles: list[dict[str, int]]) -> None:
        """Ask Ray's autoscaler for room for these bundles of resources, until it is asked again."""
        sdk: Any = importlib.import_module("ray.autoscaler.sdk")
        sdk.request_resources(bundles=bundles)


def _node(node: dict[str, Any], available: dict[str, float]) -> dict[str, Any]:
    name, address = str(node.get("NodeName") or ""), str(node["NodeManagerAddress"])
    return {
        "id": node["NodeID"],
        "name": name if name and name != address else str(node["NodeManagerHostname"]),
        "address": address,
        "total": node["Resources"],
        "available": available,
        "labels": node.get("Labels") or {},
    }


class Spares:
    """A `Warm` actor on every node."""

    def __init__(self, ray: Any, key: str, limit_bytes: int) -> None:
        self._ray, self._key, self._limit_bytes = ray, key, limit_bytes
        self._class = ray.remote(num_cpus=0, max_restarts=0)(Warm)
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._state: dict[str, dict[str, Any]] = {}
        self._not_before_s: dict[str, float] = {}

    def keep(self, node_ids: list[str], now_s: float) -> dict[str, dict[str, Any]]:
        """Have one on each of these nodes; returns the states that they have reported, by node id."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node_id in [n for n in self._actors if n not in node_ids]:
            self._forget(node_id)
        for node_id in node_ids:
            if node_id not in self._actors:
                if now_s < self._not_before_s.get(node_id, 0.0):
                    continue
                strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
                self._actors[node_id] = self._class.options(
                    scheduling_strategy=strategy,
                    name=f"warm-{self._key}-{node_id}",
                    lifetime="detached",  # it survives, and a restarted control plane finds it again
                    get_if_exists=True,
                ).remote(self._key, node_id, self._limit_bytes)
            asked = self._asked.get(node_id)
            if asked is not None:
                if not self._ray.wait([asked], timeout=0)[0]:
                    continue
                try:
                    self._state[node_id] = self._ray.get(asked)
                except Exception:
                    self._forget(node_id)
                    self._not_before_s[node_id] = now_s + AGAIN_S
                    continue
            self._asked[node_id] = self._actors[node_id].state.remote()
        return self._state

    def _forget(self, node_id: str) -> None:
        for table in (self._actors, self._asked, self._state):
            table.pop(node_id, None)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _obey_engine(requests: deque[list[dict[str, int]]]) -> None:
    """Take the engine's requests until it closes standard input, and end then."""
    for line in sys.stdin.buffer:
        requests.append(json.loads(line)["bundles"])
    os._exit(0)


def main() -> None:
    """Watch the cluster until the engine closes standard input."""
    asked, requests = json.loads(sys.argv[1]), deque[list[dict[str, int]]]()
    threading.Thread(target=_obey_engine, args=(requests,), name="swell-engine", daemon=True).start()
    try:
        ray = connect(asked["address"])
    except ConnectionError as error:
        _say({"error": str(error)})
        os._exit(1)
    client = asked["address"].startswith("ray://")
    mine = asked["platform"], asked["resources"]
    lookout: Any = ray.remote(num_cpus=0)(Lookout).remote(*mine) if client else Lookout(*mine)
    address = asked["address"] if client else ray.get_runtime_context().gcs_address
    session = "" if client else str(ray._private.worker.global_worker.node.session_name)
    spares = Spares(ray, asked["key"], asked["warm_bytes"]) if asked["warm"] else None
    if asked.get("bundles") is not None:
        requests.appendleft(asked["bundles"])
    while True:
        while requests:
            bundles = requests.popleft()
            if client:
                ray.get(lookout.request.remote(bundles), timeout=30)
            else:
                lookout.request(bundles)
        nodes = ray.get(lookout.look.remote(), timeout=30) if client else lookout.look()
        message: dict[str, Any] = {"address": address, "session": session, "nodes": nodes, "warm": {}}
        if spares is not None:
            with_slots = [n for n in nodes if any(n["total"].get(r, 0) >= 1 for r in asked["resources"])]
            message["warm"] = spares.keep([n["id"] for n in with_slots], time.monotonic())
        _say(message)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
