"""How the SDK sends requests: over blocking or over asynchronous sockets.

Both transports have the same coroutine methods. Those of the blocking transport never suspend, so a plain
function can run such a coroutine to its end with a single `send` (see `client.run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from swell.api import refusals
from swell.api.home import ServerFile, home_dir, is_loopback, token_file
from swell.api.refusals import Unreachable
from swell.control.errors import NotLeading, StoreLost
from swell.domain import SwellError


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
        time.sleep(seconds)

    async def close(self) -> None:
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
        await asyncio.sleep(seconds)

    async def close(self) -> None:
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


# How the SDK reaches a server: where it is, what is sent again, and for how long that is tried.


Model = TypeVar("Model", bound=BaseModel)

_FIRST_RETRY_S = 1.0
"""How long a first call waits for a server that may just be starting."""


class Sender:
    """Sends calls over a transport, again if the connection is lost, and to the next server if there are
    several."""

    def __init__(self, transport: Transport, locate: Callable[[], Target], retry_s: float) -> None:
        self.sleep, self.close = transport.sleep, transport.close
        self._transport = transport
        self._locate = locate
        self._retry_s = retry_s
        self._answered = False
        """Whether it is worth waiting for a server that cannot be reached."""
        self._turns = 0
        """How often a server could not be reached; if there are several, the next one is tried."""

    async def get(self, model: type[Model], call: Call, *, retry: bool = True) -> Model:
        """The answer to a call, checked."""
        reply = await self.send(call, retry=retry)
        try:
            return model.model_validate_json(reply.content)
        except ValidationError as error:
            raise refusals.ServerFailed(
                f"this version of swell cannot read the answer to {call.path}; install the server's: {error}"
            ) from error

    async def send(self, call: Call, *, retry: bool = True) -> Reply:
        """The answer to a call. Without `retry`, a call that may have arrived is not sent again."""
        attempt, began_s = 0, time.monotonic()
        while True:
            try:
                reply = await self._transport.request(self._target(), call)
                self._answered = True
                if reply.status >= 400:
                    raise _error(reply)
                return reply
            except NotLeading as error:
                await self._pause(error, attempt, began_s)  # nothing was changed, so any call may be repeated
            except (ConnectionLost, StoreLost) as error:
                if not retry:
                    raise
                await self._pause(error, attempt, began_s)
            attempt += 1

    async def stream(
        self, call: Callable[[], Call], *, endless: bool = False, again: Callable[[], None] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Parts of a streamed answer. The stream is opened again when it breaks, and if endless when it ends.

        `again` is called before each new connection.
        """
        attempt, began_s = 0, time.monotonic()
        while True:
            try:
                async with aclosing(self._transport.stream(self._target(), call())) as parts:
                    async for part in parts:
                        if not isinstance(part, Reply):
                            attempt, began_s = 0, time.monotonic()
                            yield part
                        else:
                            self._answered = True
                            if part.status >= 400:
                                raise _error(part)
                if not endless:
                    return
                await self.sleep(0.2)
            except Silent:
                began_s = time.monotonic()
            except (ConnectionLost, NotLeading, StoreLost) as error:
                await self._pause(error, attempt, began_s)
                attempt += 1
            if again is not None:
                again()

    def _target(self) -> Target:
        target = self._locate()
        # Of several control planes one takes over from another within seconds: worth waiting for.
        self._answered = self._answered or bool(target.others)
        return target.turned(self._turns)

    async def _pause(self, error: SwellError, attempt: int, began_s: float) -> None:
        """Wait before the next attempt, which goes to the next server if there are several; or give up."""
        self._turns += 1
        patience_s = self._retry_s if self._answered else min(_FIRST_RETRY_S, self._retry_s)
        if time.monotonic() - began_s >= patience_s:
            raise error
        # A random part, so that many clients do not all come back at the same moment.
        delay_s = min(0.1 * 2**attempt, 2.0) * (0.75 + secrets.randbelow(500) / 1000)
        await self.sleep(delay_s)


def find_server(
    url: str | None, token: str | None, home: str | os.PathLike[str] | None, role: str, ca: str | None
) -> Target:
    """The server and token to use: as given, else from the environment, else from the state directory."""
    directory = home_dir(home)
    # If a home is given, its server is meant, whatever the environment says.
    from_env = home is None
    url = url or (os.environ.get("SWELL_URL") if from_env else None)
    ca = ca or (os.environ.get("SWELL_CA") if from_env else None)
    if url is None:
        found = ServerFile.read(directory)
        if found is None:
            raise refusals.Unreachable(
                f"no server runs in {directory}: start one with 'swell up', or set SWELL_URL and SWELL_TOKEN"
            )
        url, ca = ",".join(_addresses(directory, found.url)), ca or found.ca
    token = token or (os.environ.get("SWELL_TOKEN") if from_env else None)
    if token is None:
        path = token_file(directory, role)
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise refusals.NotAuthenticated(
                f"no token: {path} cannot be read ({error.strerror}); give token or set SWELL_TOKEN"
            ) from error
    first, *others = [one.strip() for one in url.split(",") if one.strip()] or [url]
    return Target(first, token, ca, tuple(others))


def _addresses(home: Path, leader: str) -> list[str]:
    """The addresses of a home's control planes, that of the leader first."""
    standbys = [ServerFile.read(folder) for folder in sorted((home / "planes").glob("*"))]
    return list(dict.fromkeys([leader, *(one.url for one in standbys if one is not None)]))


def _error(reply: Reply) -> SwellError:
    """The error to raise for an answer with an error status."""
    body = _decoded(reply.content)
    error = refusals.from_answer(reply.status, body)
    if reply.status == 502 and isinstance(body, dict) and body["error"].get("code") == refusals.LEADER_LOST:
        return ConnectionLost(str(error))
    return error


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
