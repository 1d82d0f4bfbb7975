"""One Ray node on the loopback, until SIGTERM: what `ray start` does, with an address of 127.0.0.1.

    python -m benchmarks.ray.node '{"cpus": 2, "name": "n1", "gpus": 0, "scratch": "/tmp/x", "address": null}'

Prints a line of JSON once it is up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 stays 127.0.0.1
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray._private.node import Node
from ray._private.parameter import RayParams

from swell.engines.ray.head import SETTINGS, free_port


def _of_head() -> dict[str, Any]:
    """What only a head has: the cluster's books, and a server for clients from outside (ray://)."""
    return {"gcs_server_port": 0, "ray_client_server_port": free_port(), "_system_config": SETTINGS}


def main() -> None:
    """Be a node."""
    asked = json.loads(sys.argv[1])
    is_head = asked["address"] is None
    params = RayParams(
        num_cpus=asked["cpus"],
        num_gpus=asked["gpus"],
        node_name=asked["name"],
        object_store_memory=80_000_000,
        min_worker_port=0,
        max_worker_port=0,
        include_dashboard=False,
        include_log_monitor=False,
        temp_dir=asked["scratch"],
        gcs_address=asked["address"],
        # Names of their own: nodes that start at the same time would pick the same otherwise.
        raylet_socket_name=f"{asked['scratch']}/raylet-{asked['name']}-{os.getpid()}",
        plasma_store_socket_name=f"{asked['scratch']}/plasma-{asked['name']}-{os.getpid()}",
        **(_of_head() if is_head else {"node_manager_port": 0}),
    )
    params.dashboard_agent_listen_port = None
    node = Node(params, head=is_head, shutdown_at_exit=True, spawn_reaper=True)

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    raylet = node.all_processes["raylet"][0].process.pid
    said = {"address": node.gcs_address, "raylet": raylet, "client": params.ray_client_server_port}
    print(json.dumps(said), flush=True)
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
