"""Events: a page of past events, or a stream of events as they happen."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response

from swell.api.context import Caller, Ctx
from swell.api.errors import DOCUMENTED
from swell.api.schemas import ID_PATTERN, EventPage
from swell.api.streams import stream

router = APIRouter(prefix="/v1/events", tags=["events"], responses=DOCUMENTED)

_MOST = 1 << 62
Since = Annotated[int | None, Query(ge=0, le=_MOST, description="Number of the last event already seen.")]
Job = Annotated[str | None, Query(pattern=ID_PATTERN, description="Only events of this job.")]


@router.get("")
async def events(
    ctx: Ctx,
    who: Caller,
    since: Since = 0,
    job: Job = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> EventPage:
    """Events of the caller's jobs and of nodes, oldest first; of all jobs for an administrator."""
    if job is not None:
        await ctx.call(ctx.visible_job, who, job)
    found, after = await ctx.call(ctx.hub.page, who.scope, job, since or 0, limit)
    return EventPage(events=found, next=after)


@router.get(
    "/stream",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def follow(
    ctx: Ctx,
    who: Caller,
    request: Request,
    since: Since = None,
    job: Job = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=_MOST)] = None,
) -> Response:
    """The same events live, as server-sent events. Without `since` the stream begins now."""
    if job is not None:
        await ctx.call(ctx.visible_job, who, job)
    start = last_event_id if last_event_id is not None else since
    since = ctx.hub.last if start is None else start
    source = ctx.hub.stream(who.scope, job, since, ctx.still_allowed(request))
    return stream(ctx, source, "text/event-stream")
