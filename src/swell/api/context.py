"""What every route needs: the control plane, the tokens, the events, and the user who asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from swell.api.auth import Principal, Role, TokenBook, require_admin
from swell.api.hub import EventHub
from swell.api.refusals import Forbidden, NotAuthenticated
from swell.api.schemas import ReplayRequest
from swell.control.errors import NotFound, Unreadable
from swell.control.model import JobRecord

if TYPE_CHECKING:
    from swell.control.plane import ControlPlane

P = ParamSpec("P")
T = TypeVar("T")

Replay = Callable[[ReplayRequest], dict[str, Any]]
"""Computes what would have happened under other policies or on another cluster."""


@dataclass(slots=True)
class Context:
    """What the routes share."""

    plane: ControlPlane
    book: TokenBook
    hub: EventHub
    pool: ThreadPoolExecutor
    registry: CollectorRegistry
    checks: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "swell-health"))
    replay: Replay | None = None
    max_streams: int = 1000
    streams: int = 0
    """How many answers are being streamed now."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function of the control plane in a thread, outside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, partial(function, *args, **kwargs))

    async def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call`, in threads for health checks alone: they must not wait for slow requests of others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.checks, partial(function, *args, **kwargs))

    def stats(self) -> dict[str, Any]:
        """The figures of the control plane and of the streams."""
        own = {
            "leader": 1.0,
            "event_listeners": self.hub.listeners,
            "streams": self.streams,
            "event_seq": self.hub.last,
        }
        stats = dict(self.plane.stats())
        return stats | own | {"part_up": stats["part_up"] | {"events": float(not self.hub.trouble)}}

    def still_allowed(self, request: Request) -> Callable[[], bool]:
        """Says, as often as it is called, whether the token of a request is still good."""
        authorization = request.headers.get("authorization")

        def allowed() -> bool:
            try:
                self.book.authenticate(authorization)
            except NotAuthenticated:
                return False
            return True

        return allowed

    def visible_job(self, principal: Principal, job_id: str) -> JobRecord:
        """A job, if the principal may see it; else NotFound. Blocks."""
        unknown = NotFound(f"there is no job '{job_id}'; 'swell queue --all' lists the jobs")
        try:
            record = self.plane.jobs.get(job_id)
        except Unreadable as error:
            raise error if principal.sees(error.owner) else unknown from None
        if not principal.sees(record.owner):
            raise unknown
        return record


def context(request: Request) -> Context:
    """The context of the app."""
    found: Context = request.app.state.context
    return found


async def _context(request: Request) -> Context:
    return context(request)


async def _principal(request: Request) -> Principal:
    principal = context(request).book.authenticate(request.headers.get("authorization"))
    request.state.principal = principal  # for the audit log
    if principal.role is Role.VIEWER and request.method != "GET" and request.url.path != "/v1/quote":
        raise Forbidden("this token is for looking only; ask an administrator for one of the role 'user'")
    return principal


async def _admin(request: Request) -> Principal:
    principal = await _principal(request)
    require_admin(principal, f"do this ({request.method} {request.url.path})")
    return principal


Ctx = Annotated[Context, Depends(_context)]
Caller = Annotated[Principal, Depends(_principal)]
Admin = Annotated[Principal, Depends(_admin)]
