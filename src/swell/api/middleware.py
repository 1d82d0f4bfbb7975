"""What every request goes through: a limit on the body, security headers, counting, and one form of errors.

Plain ASGI: streamed answers pass through untouched. Only request bodies, which are small, are buffered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swell.api.auth import AuditLog
from swell.api.metrics import RequestMetrics
from swell.api.refusals import STATUSES
from swell.api.schemas import ErrorAnswer
from swell.domain import SwellError
from swell.domain.request import FIELDS, unknown_option

# Errors on the wire: one form for all of them, with one table of statuses (`refusals.STATUSES`).
#
# {"error": {"code": ..., "message": ..., "field"?: ..., "hint"?: ...}}


logger = logging.getLogger(__name__)

_HINTS = {
    401: "the tokens made at the first start are in the server's home under tokens/",
    403: "use an administrator's token",
    503: "nothing was changed; try again once the server's disk or database works",
}
_HTTP_CODES = {400: "invalid", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "The body is not JSON"),
        (401, "No token, or one that is wrong, revoked or expired"),
        (404, "It does not exist, or this token may not see it"),
        (413, "The body is too large"),
        (422, "A field was refused"),
        (503, "The store cannot be written or read; nothing was changed"),
    )
}
FORBIDDEN: dict[int | str, dict[str, Any]] = {403: {"model": ErrorAnswer, "description": "Not for this role"}}
CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorAnswer, "description": "The state of the job does not allow this"}
}


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    hint: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error as it goes over the wire."""
    error: dict[str, str] = {"code": code, "message": _clean(message)}
    if field is not None:
        error["field"] = _clean(field)
    hint = hint or _HINTS.get(status)
    if hint is not None:
        error["hint"] = hint
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="swell"'
    if status == 503:
        headers["Retry-After"] = "2"
    return JSONResponse({"error": error}, status, headers)


def answer_errors(app: FastAPI) -> None:

    @app.exception_handler(SwellError)
    async def _swell_error(_: Request, error: SwellError) -> JSONResponse:
        return from_swell_error(error)

    @app.exception_handler(RequestValidationError)
    async def _validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return _from_validation(error.errors())

    @app.exception_handler(HTTPException)
    async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
        code = _HTTP_CODES.get(error.status_code, "http_error")
        headers = dict(error.headers) if error.headers else None
        return error_response(error.status_code, code, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        # The traceback goes to the log only, because it may contain what the client must not see.
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "internal", "the server failed; see the server's log")


def from_swell_error(error: SwellError) -> JSONResponse:
    """The answer for an error that swell raised on purpose."""
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            hint = "what was asked may have been done: look, then try again" if code == "store_lost" else None
            return error_response(status, code, str(error), field=getattr(error, "field", None), hint=hint)
    logger.error("an error that has no HTTP status", exc_info=error)
    return error_response(500, "internal", str(error))


def _from_validation(errors: Sequence[Any]) -> JSONResponse:
    """The answer for refused fields: it names the first one, what was given and what is allowed."""
    first = errors[0]
    location = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return error_response(400, "invalid", f"the body is not JSON: {first['ctx']['error']}")
    where, path = (location[0], location[1:]) if location else ("body", [])
    field = ".".join(path) or where
    if first["type"] == "extra_forbidden":
        message = f"there is no field '{field}'"
        if said := unknown_option(field):
            message += f".{said.rstrip('.')}"
    elif first["type"] == "missing":
        message = f"{field} is missing"
    elif first["type"] == "string_pattern_mismatch" and field in FIELDS and FIELDS[field].about.allowed:
        message = f"{field} must be {FIELDS[field].about.allowed}, got {_short(first.get('input'))}"
    else:
        text = first["msg"]
        message = f"{field}: {text[:1].lower()}{text[1:]}, got {_short(first.get('input'))}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    return error_response(422, "invalid", message, field=field)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _clean(text: str) -> str:
    """The text with lone surrogates escaped, so that it can always be sent."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
