"""Hosts on one switch, each with one interface, as a process group wants it; `netns` has links to be cut.

    with network(3, rate="1gbit") as hosts, hosts.inside(0):
        ...                                  # this process, and what it starts, is on host 0

A worker moves to its host by itself (`move`), before it opens its first connection. Jobs on such hosts need
the setting `shared_memory: false`: the hosts have one kernel, so workers could read each other's memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.runtime import netns

_INTERFACE = "eth0"


class NotPermitted(RuntimeError):
    """This process may not make network namespaces."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of one network."""

    name: str
    count: int

    @staticmethod
    def address(index: int) -> str:
        """The address of a host."""
        return f"10.77.0.{index + 1}"

    def inside(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Be on a host for a while: this thread, and threads and processes that it starts meanwhile."""
        return netns.inside(f"{self.name}{index}")

    def enter(self, index: int) -> None:
        """Be on that host from now on."""
        netns.enter(f"{self.name}{index}")


def move(name: str, count: int) -> None:
    """Move this worker to the host that its name says: w0 to the first, w1 to the second, and so on."""
    index = int(os.environ.get("SWELL_WORKER", "w0").removeprefix("w")) % count
    Hosts(name, count).enter(index)
    os.environ["SWELL_HOST"] = Hosts.address(index)
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _limit(namespace: str, device: str, rate: str) -> None:
    tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *tbf]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def network(count: int, rate: str | None = None) -> Iterator[Hosts]:
    """`count` hosts that reach each other through a switch; `rate` limits each link, both ways."""
    hosts = Hosts(f"swell-{uuid.uuid4().hex[:6]}-", count)
    switch = f"{hosts.name}switch"
    made: list[str] = []
    try:
        for name in [switch, *(f"{hosts.name}{i}" for i in range(count))]:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index in range(count):
            host, port = f"{hosts.name}{index}", f"port{index}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host, "address", "add", f"{hosts.address(index)}/24", "dev", _INTERFACE)
            _ip("-n", host, "link", "set", _INTERFACE, "up")
            if rate is not None:
                _limit(host, _INTERFACE, rate)
                _limit(switch, port, rate)
        yield hosts
    except FileNotFoundError as error:
        raise NotPermitted(f"{error.filename} is not installed") from None
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
