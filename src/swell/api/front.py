"""The door of one of several control planes: its own API while it leads, else a way to the one that does.

A standby answers `/healthz` and `/metrics` itself and forwards everything else to the leader, with the
caller's token. So a client works with the address of any control plane, whichever leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from swell import __version__
from swell.api.auth import TokenBook
from swell.api.metrics import CONTENT_TYPE, RequestMetrics, exposition
from swell.api.middleware import BodyLimit, Guard, error_response, from_swell_error
from swell.api.refusals import LEADER_LOST, NOT_LEADING
from swell.api.schemas import Health
from swell.api.transport import client_options
from swell.control.lease import LeaseCandidate, Tenure
from swell.domain import SwellError

FORWARDED = "x-swell-forwarded"
"""Header of a request that another control plane has forwarded; it is not forwarded again."""
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
"""Headers that concern one connection only. The length is known anew where there is one."""
_MOST_FORWARDED = 1000
"""Most requests that are forwarded at a time."""

T = TypeVar("T")


@dataclass(slots=True)
class _Led:
    """The app of a control plane that leads."""

    app: FastAPI
    tenure: Tenure
    life: contextlib.AbstractAsyncContextManager[Any]


class Front:
    """An ASGI app that is served all the time, while apps of leading control planes come and go."""

    def __init__(
        self,
        candidate: LeaseCandidate,
        tokens: Callable[[], TokenBook],
        *,
        tls: bool = False,
        ca: str | None = None,
    ) -> None:
        """`tokens` reads the tokens from the store. `ca`: certificate to trust when forwarding."""
        self.ready = threading.Event()
        """Set once the app is served."""
        self._candidate = candidate
        self._tokens = tokens
        self._ca = ca
        self._registry = CollectorRegistry()
        self._standby = Guard(BodyLimit(self._answer), RequestMetrics(self._registry), tls)
        self._led: _Led | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turned = asyncio.Event()
        self._client: httpx2.AsyncClient | None = None
        self._forwarded = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the app of the control plane if it leads, else as a standby."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        led = self._led
        if led is not None and led.tenure.valid:
            await led.app(scope, receive, send)
        else:
            await self._standby(scope, receive, send)

    # -- called from other threads -----------------------------------------------------------------------

    def lead(self, app: FastAPI, tenure: Tenure) -> None:
        """Answer requests by this app from now on, as long as the tenure is valid."""
        self._in_loop(self._enter(app, tenure))

    def leave(self) -> None:
        """Stop answering by the app of the control plane that led."""
        with contextlib.suppress(SwellError):  # the event loop is closed: the server has ended
            self._in_loop(self._exit())

    def turned(self) -> None:
        """Break off what is being forwarded, because another control plane leads now."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._turn)

    def _in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None or self._loop.is_closed():
            coroutine.close()
            raise SwellError("the server has ended; 'swell up' starts it")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30.0)

    # -- in the event loop -------------------------------------------------------------------------------

    def closing(self) -> None:
        """End all streams and do not take the lead any more, because the server ends."""
        self._candidate.withdrawn = True
        if self._led is not None:
            self._led.app.state.context.hub.close()
        self._turn()

    def _turn(self) -> None:
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def _enter(self, app: FastAPI, tenure: Tenure) -> None:
        life = app.router.lifespan_context(app)
        await life.__aenter__()
        self._led = _Led(app, tenure, life)

    async def _exit(self) -> None:
        led, self._led = self._led, None
        if led is not None:
            await led.life.__aexit__(None, None, None)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self.ready.set()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._exit()
        if self._client is not None:
            await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    # -- as a standby ------------------------------------------------------------------------------------

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if scope["path"] == "/healthz":
                answer = self._health()
            elif scope["path"] == "/metrics":
                answer = await asyncio.to_thread(self._metrics, request.headers.get("authorization"))
            else:
                answer = await self._forward(request)
        except SwellError as error:
            answer = from_swell_error(error)
        await answer(scope, receive, send)

    def _health(self) -> Response:
        if self._candidate.trouble or self._candidate.part.trouble:
            return error_response(503, "part_down", "not working: lease", hint="see the server's log")
        leader = self._candidate.leader
        url = None if leader is None else leader.holder.url
        body = Health(status="ok", version=__version__, role="standby", leader=url)
        return Response(body.model_dump_json(), media_type="application/json")

    def _metrics(self, authorization: str | None) -> Response:
        self._tokens().authenticate(authorization)
        trouble = self._candidate.trouble or self._candidate.part.trouble
        stats = {"leader": 0.0, "trouble": float(bool(trouble)), "part_up": {"lease": float(not trouble)}}
        return Response(exposition(self._registry, lambda: stats), media_type=CONTENT_TYPE)

    async def _forward(self, request: Request) -> Response:
        leader, turned = self._candidate.leader, self._turned
        if leader is None or not leader.holder.url or FORWARDED in request.headers:
            message = "no control plane leads at this moment; nothing was changed: try again"
            return error_response(503, NOT_LEADING, message, hint="another one takes over within seconds")
        target = _target(request.scope)
        if not target.startswith("/"):  # it would become part of the leader's name
            return error_response(404, "not_found", "there is nothing of this name")
        if self._forwarded >= _MOST_FORWARDED:
            return error_response(429, "too_many_streams", "too many requests are being forwarded; try again")
        body = await request.body()
        headers = [(n, v) for n, v in request.headers.items() if n.lower() not in _HOP] + [(FORWARDED, "1")]
        client = self._client_for(leader.holder.url)
        url = leader.holder.url.rstrip("/") + target
        asked = client.build_request(request.method, url, headers=headers, content=body)
        self._forwarded += 1
        sending = asyncio.ensure_future(client.send(asked, stream=True))
        if not await _before(turned, sending):
            self._forwarded -= 1
            return _lost("another control plane takes the lead over")
        try:
            answer = sending.result()
        except httpx2.HTTPError as error:
            self._forwarded -= 1
            return _lost(f"the control plane that leads cannot be reached from this one: {error}")
        kept = {n: v for n, v in answer.headers.items() if n.lower() not in _HOP - {"content-length"}}
        return StreamingResponse(self._parts(answer, turned), answer.status_code, kept)

    async def _parts(self, answer: httpx2.Response, turned: asyncio.Event) -> AsyncIterator[bytes]:
        parts = answer.aiter_raw()
        try:
            while True:
                reading = asyncio.ensure_future(anext(parts, b""))
                if not await _before(turned, reading) or not (part := reading.result()):
                    return
                yield part
        except httpx2.HTTPError:
            return  # the caller sees that the answer is not whole, or goes on where it broke off
        finally:
            self._forwarded -= 1
            with contextlib.suppress(httpx2.HTTPError, RuntimeError):
                await answer.aclose()

    def _client_for(self, url: str) -> httpx2.AsyncClient:
        if self._client is None:
            options = client_options(url, self._ca) | {"timeout": httpx2.Timeout(None, connect=5.0)}
            self._client = httpx2.AsyncClient(**options)
        return self._client


async def _before(event: asyncio.Event, task: asyncio.Future[Any]) -> bool:
    """Wait for a task, but not longer than for an event; False if the task was given up."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        waiting.cancel()
    if task.done():
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
    return False


def _target(scope: Scope) -> str:
    """The path and the query of a request, as they were sent."""
    path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = bytes(scope.get("query_string", b"")).decode("latin-1")
    return f"{path}?{query}" if query else path


def _lost(message: str) -> Response:
    return error_response(
        502, LEADER_LOST, message, hint="the request may have arrived: look, then try again"
    )
