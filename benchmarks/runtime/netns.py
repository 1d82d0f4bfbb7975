"""Hosts on one machine: network namespaces, each connected to every other by a link that can be cut.

    with Hosts(3) as hosts:
        hosts.cut(1, 2)                  # nothing goes between them any more, and nobody is told
        hosts.heal(1, 2)

Host 0 is the head. A link is a pair of virtual interfaces; cutting it drops what is sent into it, silently,
in one direction or in both. It needs the right to make namespaces (root); everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (iproute2)"
    name = f"swell-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        for command in (
            ["ip", "-n", name, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1"],
            ["tc", "-n", name, "qdisc", "add", "dev", "v0", "root", "blackhole"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"links cannot be made or cut here: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def enter(namespace: str) -> None:
    """Move the calling thread (and what it forks) into a namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Be in a namespace for a while: this thread, and threads and processes that it starts meanwhile."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        _libc.setns(before, _CLONE_NEWNET)
        os.close(before)


class Hosts:
    """Some hosts, all connected to each other."""

    def __init__(self, count: int, rate: str | None = None) -> None:
        """`rate` limits each direction of each link, as tc writes it: 1gbit."""
        self.count = count
        self._rate = rate
        self._prefix = f"swell-{os.getpid()}"
        self._net = f"10.{213 + os.getpid() % 40}.{os.getpid() // 40 % 256}"
        self._folder = Path(tempfile.mkdtemp(prefix="swell-hosts-"))
        self.cuts: set[tuple[int, int]] = set()
        """Directions in which nothing goes: (from, to)."""
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def namespace(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._prefix}-{host}"

    def address(self, host: int) -> str:
        """A host's address."""
        return f"{self._net}.{host + 1}"

    def describe(self) -> dict[str, object]:
        """What `HostsWorkers` need."""
        return {
            "namespaces": [self.namespace(host) for host in range(self.count)],
            "addresses": [self.address(host) for host in range(self.count)],
            "cuts": str(self._folder / "cuts.json"),
        }

    def cut(self, one: int, other: int, *, both: bool = True) -> None:
        """Drop what `one` sends to `other`, and by default also the other way round."""
        for a, b in [(one, other), (other, one)] if both else [(one, other)]:
            self.cuts.add((a, b))
            self._note()
            _run("tc", ["-n", self.namespace(a), "qdisc", "replace", "dev", f"v{b}", "root", "blackhole"])

    def heal(self, one: int, other: int) -> None:
        """Let everything through again."""
        for a, b in (one, other), (other, one):
            if (a, b) in self.cuts:
                _run("tc", ["-n", self.namespace(a), "qdisc", "del", "dev", f"v{b}", "root"])
                self.cuts.discard((a, b))
                self._limit(a, b)
        self._note()

    @contextlib.contextmanager
    def slowed(self, host: int, rate: str) -> Iterator[None]:
        """Limit both directions of all links of a host for a while, as tc writes it: 10mbit."""
        ends = [(a, b) for a in range(self.count) for b in range(self.count) if a != b and host in (a, b)]
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        try:
            for a, b in ends:
                _run("tc", ["-n", self.namespace(a), "qdisc", "replace", "dev", f"v{b}", *limit])
            yield
        finally:
            for a, b in ends:
                gone = ["tc", "-n", self.namespace(a), "qdisc", "del", "dev", f"v{b}", "root"]
                subprocess.run(gone, check=False, capture_output=True)
                self._limit(a, b)

    def heal_all(self) -> None:
        """Heal whatever is cut."""
        for one, other in list(self.cuts):
            self.heal(one, other)

    def inside(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Connections that the calling thread opens meanwhile are those of a process on that host."""
        return inside(self.namespace(host))

    def close(self) -> None:
        """Remove all of it."""
        for host in range(self.count):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        hosts = range(self.count)
        self._note()
        lines = [f"netns add {self.namespace(host)}" for host in hosts]
        lines += [
            f"link add name v{b} netns {self.namespace(a)} type veth peer name v{a} netns {self.namespace(b)}"
            for a in hosts
            for b in hosts
            if a < b
        ]
        _batch(lines)
        for host in hosts:
            others = [other for other in hosts if other != host]
            own = self.address(host)
            _batch(
                [
                    "link set lo up",
                    f"addr add {own}/32 dev lo",
                    *(f"link set v{other} up" for other in others),
                    *(f"route add {self.address(other)}/32 dev v{other} src {own}" for other in others),
                ],
                "-n",
                self.namespace(host),
            )
            for other in others:
                self._limit(host, other)

    def _limit(self, one: int, other: int) -> None:
        if self._rate is not None:
            words = ["dev", f"v{other}", "root", "tbf", "rate", self._rate, "burst", "1mb", "latency", "50ms"]
            _run("tc", ["-n", self.namespace(one), "qdisc", "replace", *words])

    def _note(self) -> None:
        path = self._folder / "cuts.json"
        path.with_suffix(".writing").write_text(json.dumps(sorted(self.cuts)))
        path.with_suffix(".writing").replace(path)


def _batch(lines: list[str], *options: str) -> None:
    _run("ip", [*options, "-batch", "-"], "\n".join(lines) + "\n")


def _run(tool: str, words: list[str], given: str | None = None) -> None:
    done = subprocess.run([tool, *words], input=given, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{tool} {' '.join(words)}: {done.stderr.strip()}")
