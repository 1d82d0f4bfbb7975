"""Errors that cross the wire: the server answers with them, and its clients raise them.

SwellError
+-- InputError           an input is not acceptable (422; 400 and 413 for whole bodies)
+-- NotFound             it does not exist, or belongs to another user (404)
+-- Conflict             the state of the job or node does not allow what is asked (409)
+-- StoreUnavailable     the server's store cannot be written or read now; nothing was changed (503)
|   +-- NotLeading       no control plane leads at the moment; nothing was changed (503, code not_leading)
|   +-- StoreLost        the server lost its store while it worked; what was asked may have been done (503)
+-- TooMany              a limit on what one user may have is reached (429)
+-- NotAuthenticated     no token, or one that is wrong, revoked or expired (401)
+-- Forbidden            the token's role does not allow this (403)
+-- Unreachable          no server answers
+-- ServerFailed         the server failed, or is not a swell server
"""

from __future__ import annotations

from typing import Any

from swell.control.errors import Conflict, NotFound, NotLeading, StoreLost, StoreUnavailable, TooMany
from swell.domain import InputError, SwellError


class NotAuthenticated(SwellError):
    """No token, or one that is wrong, revoked or expired."""


class Forbidden(SwellError):
    """The token is valid, but its role does not allow this."""


class Unreachable(SwellError):
    """No server answers."""


class ServerFailed(SwellError):
    """The server failed, or is not a swell server."""


NOT_LEADING = "not_leading"
"""Code of an answer (503) that nobody leads and nothing was changed: a client tries again."""
LEADER_LOST = "leader_lost"
"""Code of an answer (502) to a request that was forwarded to the leader and may have arrived there."""

STATUSES: tuple[tuple[type[SwellError], int, str], ...] = (
    (InputError, 422, "invalid"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (NotLeading, 503, NOT_LEADING),
    (StoreLost, 503, "store_lost"),
    (StoreUnavailable, 503, "store_unavailable"),
    (TooMany, 429, "too_many"),
    (NotAuthenticated, 401, "unauthenticated"),
    (Forbidden, 403, "forbidden"),
)
"""The HTTP status and code of each error; the server and its clients both use this table."""


def from_answer(status: int, body: Any) -> SwellError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ServerFailed(f"the server answered {status} in an unknown form; is it a swell server?")
    message, hint, field = str(error.get("message", status)), error.get("hint"), error.get("field")
    text = f"{message} ({hint})" if hint else message
    if status in (400, 413, 422):
        return InputError(text, field=field)
    kinds = [(kind, code) for kind, known, code in STATUSES if status == known]
    if kinds:
        # Of several errors with one status the code tells which; the last one is the general one.
        return next((kind for kind, code in kinds if code == error.get("code")), kinds[-1][0])(text)
    return ServerFailed(f"the server answered {status}: {text}")
