"""Names of workers and replicas, and numbers of workers that are whole replicas.

With R workers for each, worker wN belongs to replica rK with K = N // R, at position N % R, so a name says
where a worker belongs.
"""

from __future__ import annotations

from collections.abc import Iterable

from swell.train.agent.errors import Refused


def number_of(worker: str) -> int:
    """The number in a worker's name; Refused for another name."""
    if not worker[:1] == "w" or not worker[1:].isdecimal():
        raise Refused(f"worker: got {worker!r}, names are w0, w1, ...")
    return int(worker[1:])


def replica_of(worker: str, size: int) -> str:
    """The replica that a worker belongs to."""
    return f"r{number_of(worker) // size}"


def replicas_of(workers: Iterable[str], size: int) -> list[str]:
    """The replicas that these workers belong to, each once."""
    return list(dict.fromkeys(replica_of(worker, size) for worker in workers))


def workers_of(replica: str, size: int) -> tuple[str, ...]:
    """The workers of a replica, by position."""
    first = int(replica[1:]) * size
    return tuple(f"w{first + position}" for position in range(size))


def all_workers_of(replicas: Iterable[str], size: int) -> list[str]:
    """The workers of several replicas, replica by replica."""
    return [worker for replica in replicas for worker in workers_of(replica, size)]


def check_multiple(count: int, size: int, what: str = "workers") -> int:
    """How many replicas `count` workers are; Refused if that is no whole number."""
    if count % size:
        raise Refused(
            f"{what}: got {count}, must be a multiple of {size}, because {size} workers share a replica"
        )
    return count // size
