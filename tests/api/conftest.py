"""A real server over a real control plane and store; only the engine pretends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

import swell
from swell.api.server import Server
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster
from swell.engines.null import NullEngine


@dataclass
class Platform:
    """A running server and what it is made of."""

    home: Path
    store: Store
    engine: NullEngine
    plane: ControlPlane
    server: Server

    def token(self, user: str, role: str = "user", ttl_s: float | None = None) -> str:
        """A new token."""
        return self.server.book.create(user, role, ttl_s=ttl_s)[0]

    def http(self, token: str | None) -> httpx2.Client:
        """Plain HTTP, with a token or without."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx2.Client(base_url=self.server.url, headers=headers, timeout=30.0, trust_env=False)

    def client(self, user: str, role: str = "user") -> swell.Client:
        """The SDK as this user."""
        return swell.Client(self.server.url, self.token(user, role))

    def job(self, **fields: Any) -> dict[str, Any]:
        """The body of a submission."""
        return {"name": "job", "script": "train.py", "workdir": str(self.home)} | fields

    def stop(self) -> None:
        """End server, plane and store."""
        self.server.stop()
        self.plane.stop()
        self.store.close()


def start(
    home: Path, *, port: int = 0, duration_s: float = 0.2, slots: str = "2x2", **options: Any
) -> Platform:
    """A platform whose state is in a directory."""
    (home / "train.py").write_text("# nothing to train\n")
    store = Store(connect(str(home / "store.db")))
    engine = NullEngine(Cluster.parse(slots), duration_s=duration_s)
    plane = ControlPlane(store, engine, home=home, policy="afs-l")
    plane.start()
    server = Server(plane, store, home=home, port=port, **options)
    server.start()
    return Platform(home, store, engine, plane, server)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    """Short jobs: each takes 0.2 s."""
    running = start(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def busy_platform(tmp_path: Path) -> Iterator[Platform]:
    """Jobs that do not end while a test looks at them."""
    running = start(tmp_path, duration_s=3600.0)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """For tests that change nothing: one for all of a module."""
    running = start(tmp_path_factory.mktemp("shared"), duration_s=3600.0)
    yield running
    running.stop()


@pytest.fixture
def start_platform(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Start platforms by hand; what still runs at the end is ended."""
    running: list[Platform] = []

    def begin(**options: Any) -> Platform:
        running.append(start(tmp_path, **options))
        return running[-1]

    yield begin
    for one in running:
        one.stop()
