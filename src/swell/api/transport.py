"""How the SDK sends requests: over blocking or over asynchronous sockets.

Both transports have the same coroutine methods. Those of the blocking transport never suspend, so a plain
function can run such a coroutine to its end with a single `send` (see `client.run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2

from swell.api.home import is_loopback
from swell.api.refusals import Unreachable


class ConnectionLost(Unreachable):
    """The connection broke or could not be made; the request may or may not have arrived."""


class Silent(ConnectionLost):
    """Nothing arrived for a while on a connection that seems to be open."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the token to send to it."""

    url: str
    token: str
    ca: str | None = None
    """Certificate to trust, besides those that the system trusts."""
    others: tuple[str, ...] = ()
    """URLs of further control planes, which are tried in turn when this one cannot be reached."""

    def turned(self, times: int) -> Target:
        """The target after its URLs have been tried so many times."""
        urls = (self.url, *self.others)
        return replace(self, url=urls[times % len(urls)])


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str | int | float] | None = None
    body: Any = None
    headers: Mapping[str, str] | None = None
    timeout_s: float = 30.0
    """Longest time without any data from the server."""

    def arguments(self, target: Target) -> dict[str, Any]:
        """The request as arguments of httpx2."""
        return {
            "method": self.method,
            "url": target.url.rstrip("/") + self.path,
            "params": self.query or None,
            "json": self.body,
            "headers": {"Authorization": f"Bearer {target.token}", **(self.headers or {})},
            "timeout": httpx2.Timeout(self.timeout_s, connect=10.0),
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    content: bytes
    headers: Mapping[str, str]


class Transport(Protocol):
    """Carries calls."""

    async def request(self, target: Target, call: Call) -> Reply:
        """Send a call and read its answer whole."""

    def stream(self, target: Target, call: Call) -> AsyncGenerator[Reply | bytes, None]:
        """Send a call; yields the head of the answer, or all of it if it is an error, then its parts."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def close(self) -> None:
        """Close all connections."""


class BlockingTransport:
    """A transport over blocking sockets."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str | None], httpx2.Client] = {}

    def _client(self, target: Target) -> httpx2.Client:
        key = (target.url, target.ca)
        if key not in self._clients:
            self._clients[key] = httpx2.Client(**client_options(target.url, target.ca))
        return self._clients[key]

    async def request(self, target: Target, call: Call) -> Reply:
        """Send a call and read its answer whole."""
        with _translated(target):
            answer = self._client(target).request(**call.arguments(target))
            return Reply(answer.status_code, answer.content, answer.headers)

    async def stream(self, target: Target, call: Call) -> AsyncGenerator[Reply | bytes, None]:
        """Send a call; yields the head of the answer, or all of it if it is an error, then its parts."""
        with _translated(target), self._client(target).stream(**call.arguments(target)) as answer:
            content = answer.read() if answer.status_code >= 400 else b""
            yield Reply(answer.status_code, content, answer.headers)
            if answer.status_code < 400:
                for part in answer.iter_bytes():
                    yield part

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class AsyncTransport:
    """A transport over asyncio."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str | None], httpx2.AsyncClient] = {}

    def _client(self, target: Target) -> httpx2.AsyncClient:
        key = (target.url, target.ca)
        if key not in self._clients:
            self._clients[key] = httpx2.AsyncClient(**client_options(target.url, target.ca))
        return self._clients[key]

    async def request(self, target: Target, call: Call) -> Reply:
        """Send a call and read its answer whole."""
        with _translated(target):
            answer = await self._client(target).request(**call.arguments(target))
            return Reply(answer.status_code, answer.content, answer.headers)

    async def stream(self, target: Target, call: Call) -> AsyncGenerator[Reply | bytes, None]:
        """Send a call; yields the head of the answer, or all of it if it is an error, then its parts."""
        with _translated(target):
            async with self._client(target).stream(**call.arguments(target)) as answer:
                content = await answer.aread() if answer.status_code >= 400 else b""
                yield Reply(answer.status_code, content, answer.headers)
                if answer.status_code < 400:
                    async for part in answer.aiter_bytes():
                        yield part

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()


def client_options(url: str, ca: str | None) -> dict[str, Any]:
    """Options for a client of httpx2 that talks to the server at a URL."""
    where = urlsplit(url)
    host = where.hostname or ""
    # Reading the certificates of all authorities takes longer than a request; plain HTTP needs none.
    verify: ssl.SSLContext | bool = where.scheme != "http"
    if ca is not None:
        verify = ssl.create_default_context()
        verify.load_verify_locations(cafile=ca)
    # Requests to this machine must not go through a proxy that the environment names.
    return {
        "verify": verify,
        "trust_env": not is_loopback(host),
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30.0),
    }


@contextlib.contextmanager
def _translated(target: Target) -> Iterator[None]:
    try:
        yield
    except httpx2.ReadTimeout as error:
        raise Silent(f"the server at {target.url} did not answer in time; try again") from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise Unreachable(
            f"'{target.url}' is not the URL of a server: {error}; give one such as http://127.0.0.1:7373"
        ) from error
    except httpx2.TransportError as error:
        if isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error):
            raise Unreachable(
                f"the certificate of {target.url} is not trusted here ({error}); name it with ca or SWELL_CA"
            ) from error
        raise ConnectionLost(
            f"cannot reach the server at {target.url} ({str(error) or type(error).__name__}); is it running?"
            " 'swell up' starts one on this machine"
        ) from error


class EventParser:
    """Reads server-sent events from bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self._rest = b""

    def reset(self) -> None:
        """Forget an incomplete event, because a new connection sends it again."""
        self._rest = b""

    def feed(self, part: bytes) -> list[str]:
        """The data of the events that are complete by now."""
        *frames, self._rest = (self._rest + part).split(b"\n\n")
        found = []
        for frame in frames:
            fields: dict[str, str] = {}
            for line in frame.decode("utf-8", "replace").split("\n"):
                name, _, value = line.partition(":")
                fields[name] = value.removeprefix(" ")
            self.last_id = fields.get("id", self.last_id)
            if "data" in fields:
                found.append(fields["data"])
        return found
