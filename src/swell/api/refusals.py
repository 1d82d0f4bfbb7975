"""Errors that cross the wire: what the server refuses, and what its clients raise for it.

SwellError
+-- InputError           something given is not acceptable (422; 400 and 413 for whole bodies)
+-- NotFound             there is no such thing, or it is somebody else's (404)
+-- Conflict             it is there, but not in a state for that (409)
+-- StoreUnavailable     the server's disk or database does not take it; nothing was changed (503)
+-- NotAuthenticated     no token, or one that is wrong, revoked or expired (401)
+-- Forbidden            the token is good, but not for this (403)
+-- Unreachable          no server answers
+-- ServerFailed         the server answered something that no client can mend
"""

from __future__ import annotations

from typing import Any

from swell.control.errors import Conflict, NotFound, StoreUnavailable
from swell.domain import InputError, SwellError


class NotAuthenticated(SwellError):
    """No token, or one that is wrong, revoked or expired."""


class Forbidden(SwellError):
    """The token is good, but not for this."""


class Unreachable(SwellError):
    """No server answers."""


class ServerFailed(SwellError):
    """The server failed, or is no swell server."""


STATUSES: tuple[tuple[type[SwellError], int, str], ...] = (
    (InputError, 422, "invalid"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (StoreUnavailable, 503, "store_unavailable"),
    (NotAuthenticated, 401, "unauthenticated"),
    (Forbidden, 403, "forbidden"),
)
"""What becomes which status, and back."""


def from_answer(status: int, body: Any) -> SwellError:
    """The error that an answer stands for."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ServerFailed(f"the server answered {status}; is it a swell server?")
    message, hint, field = str(error.get("message", status)), error.get("hint"), error.get("field")
    text = f"{message} ({hint})" if hint else message
    if status in (400, 413, 422):
        return InputError(text, field=field)
    for kind, known, _ in STATUSES:
        if status == known:
            return kind(text)
    return ServerFailed(f"the server answered {status}: {text}")
