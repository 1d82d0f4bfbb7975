"""What every request goes through: a limit on the body, security headers, and counting.

Plain ASGI: streamed answers pass through untouched. Only request bodies, which are small, are buffered.
"""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swell.api.audit import AuditLog
from swell.api.errors import error_response
from swell.api.metrics import RequestMetrics

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class BodyLimit:
    """Refuse bodies that are too large before they are parsed, with or without a Content-Length header."""

    def __init__(self, app: ASGIApp, limit_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body and pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self.limit_bytes:
                await self._refuse(scope, receive, send)
                return
        chunks: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self.limit_bytes:
                        await self._refuse(scope, receive, send)
                        return
                    chunks.append(chunk)
                    more = message.get("more_body", False)
        except TimeoutError:
            late = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            answer = error_response(408, "timeout", late)
            await answer(scope, receive, send)
            return
        body: bytes | None = b"".join(chunks)

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        await self.app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body must be at most {self.limit_bytes} bytes"
        # The rest of the body is never read, so the connection cannot be used again.
        answer = error_response(413, "too_large", message, headers={"Connection": "close"})
        await answer(scope, receive, send)


class Guard:
    """Add security headers to every answer, count it, and note changes in the audit log."""

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, tls: bool, audit: AuditLog | None = None
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.audit = audit
        self.headers = _HEADERS | ({"Strict-Transport-Security": "max-age=31536000"} if tls else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.metrics.count(scope["method"], path, message["status"], time.perf_counter() - began_s)
                if self.audit is not None:
                    self.audit.request(scope, message["status"])
            await send(message)

        await self.app(scope, receive, guarded)
