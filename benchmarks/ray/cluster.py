"""A Ray cluster of several nodes on this machine, for tests and benchmarks. Ended through its own handles."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.runtime import netns


class RayNode:
    """One node: a process that keeps a raylet."""

    def __init__(
        self,
        name: str,
        cpus: int,
        scratch: str,
        address: str | None,
        *,
        gpus: int = 0,
        resources: dict[str, float] | None = None,
        host: tuple[str, str] | None = None,
        hidden: list[Path] | None = None,
    ) -> None:
        """`host`: the network namespace and the address of the node, in place of this machine's loopback.

        `hidden`: directories that are empty on this node.
        """
        self.scratch = scratch
        self._namespace, ip = host or ("", "127.0.0.1")
        self._asked: dict[str, Any] = {
            "name": name, "cpus": cpus, "gpus": gpus, "scratch": scratch, "address": address,
            "resources": resources or {}, "ip": ip, "hidden": [str(path) for path in hidden or []],
        }  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self.raylet = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ray.node", json.dumps(self._asked)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=(lambda: netns.enter(self._namespace)) if self._namespace else None,
        )

    def wait_up(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What it said once it was up."""
        assert self._process.stdout is not None
        give_up = threading.Timer(timeout_s, self._process.kill)
        give_up.start()
        try:
            line = self._process.stdout.readline()
        finally:
            give_up.cancel()
        if not line:
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode(errors="replace")
            raise TimeoutError(f"Ray node {self._asked['name']} did not come up: {said}")
        answer: dict[str, Any] = json.loads(line)
        self.raylet = int(answer["raylet"])
        return answer

    def signal_raylet(self, number: signal.Signals) -> None:
        """Kill, freeze or thaw its raylet."""
        os.kill(self.raylet, number)

    def ask_to_stop(self) -> None:
        """Have it end."""
        if self.raylet:
            with contextlib.suppress(OSError):
                os.kill(self.raylet, signal.SIGCONT)
        self._process.terminate()

    def stop(self) -> None:
        """End it."""
        self.ask_to_stop()
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def new_token() -> Iterator[None]:
    """Put a token for a new cluster into the environment; at the end the environment is as it was."""
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class RayCluster:
    """A head without slots and some nodes with; a token of its own is put into the environment."""

    def __init__(self, nodes: int = 4, slots: int = 2) -> None:
        self._token = contextlib.ExitStack()
        self._token.enter_context(new_token())
        self._scratch = tempfile.mkdtemp(prefix="swell-rc-")
        self.head = RayNode("head", 0, self._scratch, None)
        self.nodes: list[RayNode] = []
        try:
            said = self.head.wait_up()
            self.address, self.client = str(said["address"]), f"ray://127.0.0.1:{said['client']}"
            for index in range(nodes):
                self.nodes.append(RayNode(f"n{index}", slots, self._scratch, self.address))
            for node in self.nodes:
                node.wait_up()
        except BaseException:
            self.close()
            raise

    def join(
        self,
        name: str,
        cpus: int,
        gpus: int = 0,
        resources: dict[str, float] | None = None,
        hidden: list[Path] | None = None,
    ) -> RayNode:
        """Another node, which the caller ends. Ray does not look whether its GPUs are there."""
        node = RayNode(name, cpus, self._scratch, self.address, gpus=gpus, resources=resources, hidden=hidden)
        node.wait_up()
        return node

    def start(self, name: str, cpus: int, hidden: list[Path]) -> RayNode:
        """Another node, which the caller waits for and ends."""
        return RayNode(name, cpus, self._scratch, self.address, hidden=hidden)

    def close(self) -> None:
        """End all of it."""
        for node in self.nodes:
            node.ask_to_stop()
        for node in [*self.nodes, self.head]:
            node.stop()
        for _ in range(50):  # agents that end last may still write
            shutil.rmtree(self._scratch, ignore_errors=True)
            if not Path(self._scratch).exists():
                break
            time.sleep(0.1)
        self._token.close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
