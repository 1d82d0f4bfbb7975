"""The SDK.

    with swell.Client() as client:
        job = client.submit("train.py", within_s=7200)
        for text in client.logs(job, follow=True):
            print(text, end="")
        print(client.wait(job).phase)

Without arguments it talks to the server of this machine's state directory, with the token made there at the
first start. `AsyncClient` has the same methods as coroutines and asynchronous iterators.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from swell.api.calls import Calls
from swell.api.sending import find_server
from swell.api.transport import AsyncTransport, BlockingTransport

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient(Calls):
    """A server's API for asyncio."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        home: str | os.PathLike[str] | None = None,
        *,
        role: str = "user",
        ca: str | None = None,
        retry_s: float = 20.0,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            url: URL of the server; by default $SWELL_URL, else the server that runs in `home`. Of several
                control planes, the URL of any, or of all with commas between them.
            token: Bearer token; by default $SWELL_TOKEN, else the token in `home` for `role`.
            home: State directory; by default $SWELL_HOME, else ~/.swell.
            role: 'user' or 'admin': which of the tokens in `home` to use.
            ca: Certificate to trust, for a server with a self-signed one; by default $SWELL_CA.
            retry_s: How long to go on trying when the connection is lost.
        """
        super().__init__(AsyncTransport(), partial(find_server, url, token, home, role, ca), retry_s=retry_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, such as any call over a blocking transport."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a blocking call tried to wait for an event loop")


def _blocking(
    method: Callable[Concatenate[Calls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._calls, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Calls, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        source = method(self._calls, *args, **kwargs)
        try:
            while True:
                try:
                    item: T = run(anext(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            run(source.aclose())

    return iterate


class Client:
    """A server's API for plain functions and threads."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        home: str | os.PathLike[str] | None = None,
        *,
        role: str = "user",
        ca: str | None = None,
        retry_s: float = 20.0,
    ) -> None:
        """Make a client; nothing is sent yet. The arguments are those of `AsyncClient`."""
        locate = partial(find_server, url, token, home, role, ca)
        self._calls = Calls(BlockingTransport(), locate, retry_s=retry_s)

    submit = _blocking(Calls.submit)
    quote = _blocking(Calls.quote)
    job = _blocking(Calls.job)
    jobs = _blocking(Calls.jobs)
    wait = _blocking(Calls.wait)
    cancel = _blocking(Calls.cancel)
    pause = _blocking(Calls.pause)
    resume = _blocking(Calls.resume)
    scale = _blocking(Calls.scale)
    explain = _blocking(Calls.explain)
    series = _blocking(Calls.series)
    logs = _iterating(Calls.logs)
    events = _iterating(Calls.events)
    nodes = _blocking(Calls.nodes)
    autoscaler = _blocking(Calls.autoscaler)
    lanes = _blocking(Calls.lanes)
    drain = _blocking(Calls.drain)
    undrain = _blocking(Calls.undrain)
    reservations = _blocking(Calls.reservations)
    reserve = _blocking(Calls.reserve)
    unreserve = _blocking(Calls.unreserve)
    teams = _blocking(Calls.teams)
    set_team = _blocking(Calls.set_team)
    remove_team = _blocking(Calls.remove_team)
    demand = _blocking(Calls.demand)
    me = _blocking(Calls.me)
    policy = _blocking(Calls.policy)
    set_policy = _blocking(Calls.set_policy)
    replay = _blocking(Calls.replay)
    collect = _blocking(Calls.collect)
    tokens = _blocking(Calls.tokens)
    create_token = _blocking(Calls.create_token)
    revoke_token = _blocking(Calls.revoke_token)
    health = _blocking(Calls.health)
    close = _blocking(Calls.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["AsyncClient", "Client"]
