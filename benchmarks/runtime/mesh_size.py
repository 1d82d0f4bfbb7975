"""What one exchange of headers costs with 2 to 64 members: everybody to everybody, and along a tree.

The members are processes that only exchange, as a step without gradients would: its header, then the vote. On
a machine with few cores the wall time is the processor time of all members together; what the busiest member
spends says more about a cluster, where each has its own cores.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import sys
import time
from typing import Any

from swell.train.sync import mesh as meshes
from swell.train.sync.mesh import READY, VOTE, Mesh, Peer

HEADER = {
    "what": "step", "n": 48, "candidate": 0, "loss": 2.302585092994046,
    "adaptive": {"last": [0.0512, 0.0087, 48, 1], "plan": [48, 0]},
}  # fmt: skip


def _member(rank: int, size: int, ends: dict[tuple[int, int], socket.socket], rounds: int) -> dict[str, Any]:
    names = tuple(f"w{i}" for i in range(size))
    for (owner, _), end in ends.items():
        if owner != rank:
            end.close()
    peers = {other: Peer(names[other], end, {}) for (owner, other), end in ends.items() if owner == rank}
    mesh = Mesh(1, names, names[rank], peers)
    took: list[float] = []
    for operation in range(rounds):
        if operation == rounds // 5:
            cpu = time.process_time()
        begin = time.perf_counter()
        mesh.exchange(operation, READY, HEADER)
        mesh.exchange(operation, VOTE, {})
        took.append(time.perf_counter() - begin)
    counted = took[rounds // 5 :]
    return {"wall_s": statistics.median(counted), "cpu_s": (time.process_time() - cpu) / len(counted)}


def _run(size: int, rounds: int) -> dict[str, float]:
    ends: dict[tuple[int, int], socket.socket] = {}
    for a in range(size):
        for b in range(a + 1, size):
            ends[a, b], ends[b, a] = socket.socketpair()
    reading, writing = os.pipe()
    children = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.write(writing, (json.dumps(_member(rank, size, ends, rounds)) + "\n").encode())
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(writing)
    for end in ends.values():
        end.close()
    with os.fdopen(reading) as said:
        found = [json.loads(line) for line in said]
    for pid in children:
        os.waitpid(pid, 0)
    assert len(found) == size, "a member failed"
    return {
        "step_ms": round(statistics.median(f["wall_s"] for f in found) * 1e3, 3),
        "cpu_of_one_ms": round(statistics.mean(f["cpu_s"] for f in found) * 1e3, 3),
        "cpu_of_the_busiest_ms": round(max(f["cpu_s"] for f in found) * 1e3, 3),
    }


def measure(sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64), rounds: int = 60) -> dict[str, Any]:
    """By number of members: milliseconds of the two exchanges of a step, either way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * max(sizes) ** 2)), hard))
    usual, out = meshes.TREE_FROM, {}
    try:
        for size in sizes:
            found = {}
            for name, limit in (("all to all", sys.maxsize), ("along a tree", 0)):
                meshes.TREE_FROM = limit
                found[name] = _run(size, rounds)
            out[str(size)] = found
    finally:
        meshes.TREE_FROM = usual
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {"tree_from": usual, "members": out}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
