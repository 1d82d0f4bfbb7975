"""One Ray node, until SIGTERM: what `ray start` does, with an address of 127.0.0.1 or another one.

    python -m benchmarks.ray.node '{"cpus": 2, "name": "n1", "gpus": 0, "scratch": "/tmp/x", "address": null,
        "resources": {"swell_type:fast": 1}, "ip": "127.0.0.1"}'

Prints a line of JSON once it is up. With `hidden` (a list of directories) these are empty on this node, as
on one where a shared file system was not mounted; that needs the right to mount (root).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 stays 127.0.0.1
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from swell.engines.ray.head import CLUSTER_SETTINGS, SETTINGS, free_port
from swell.engines.ray.raylet import run

_NEWNS, _REC, _PRIVATE = 0x20000, 0x4000, 0x40000


def _of_head(ip: str) -> dict[str, Any]:
    """What only a head has: the cluster's books, and a server for clients from outside (ray://)."""
    settings = SETTINGS if ip == "127.0.0.1" else SETTINGS | CLUSTER_SETTINGS
    return {"gcs_server_port": 0, "ray_client_server_port": free_port(), "_system_config": settings}


def _hide(paths: list[str]) -> None:
    """Make these directories empty for this process and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounts = [(None, b"/", None, _REC | _PRIVATE), *((b"none", p.encode(), b"tmpfs", 0) for p in paths)]
    if libc.unshare(_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    for source, target, kind, flags in mounts:
        if libc.mount(source, target, kind, ctypes.c_ulong(flags), None) != 0:
            raise OSError(ctypes.get_errno(), f"cannot mount over {target!r}")


def main() -> None:
    """Be a node."""
    asked = json.loads(sys.argv[1])
    if asked.get("hidden"):
        _hide(asked["hidden"])
    is_head = asked["address"] is None
    run(
        lambda said: print(json.dumps(said), flush=True),
        asked["scratch"],
        is_head=is_head,
        num_cpus=asked["cpus"],
        num_gpus=asked["gpus"],
        resources=asked["resources"],
        node_name=asked["name"],
        temp_dir=asked["scratch"],
        gcs_address=asked["address"],
        node_ip_address=asked["ip"],
        **(_of_head(asked["ip"]) if is_head else {}),
    )


if __name__ == "__main__":
    main()
