"""Jobs: submit, quote, list, look at, change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response

from swell.api.auth import Principal
from swell.api.context import Caller, Context, Ctx
from swell.api.errors import CONFLICT, DOCUMENTED
from swell.api.schemas import ID_PATTERN, Bounds, JobPage, JobSubmission, JobView, PromiseView, SeriesView
from swell.api.streams import stream
from swell.control.errors import Conflict
from swell.control.model import JobRecord, JobRequest, Phase

router = APIRouter(prefix="/v1", tags=["jobs"], responses=DOCUMENTED)

JobId = Annotated[str, Path(pattern=ID_PATTERN, description="Id of a job.")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="After a lost answer send the submission again with the same key: one job is made.",
    ),
]
_CHUNK = 65536
_POLL_S = 0.5


@router.post("/jobs", status_code=201, responses=CONFLICT)
async def submit(body: JobSubmission, ctx: Ctx, who: Caller, request: Request, key: Key = None) -> JobView:
    """Hand a job in. The job in the answer is on disk; if its deadline cannot be kept, it is `refused`."""
    record = await ctx.call(_submit, ctx, who, body.to_request(), key)
    request.state.job_id = record.job_id  # for the audit log
    return JobView.of_record(record)


def _submit(ctx: Context, who: Principal, request: JobRequest, key: str | None) -> JobRecord:
    record = ctx.plane.jobs.submit(request, who.user, key)
    if key is not None and _essence(record.request) != _essence(request):
        raise Conflict(f"the idempotency key was used for another job, '{record.job_id}'; send a new key")
    return record


def _essence(request: JobRequest) -> JobRequest:
    """A request without the bounds, which the owner may have changed since."""
    return replace(request, min_workers=1, max_workers=None)


@router.post("/quote")
async def quote(body: JobSubmission, ctx: Ctx, who: Caller) -> PromiseView:
    """The promise that submitting this job would give, without submitting it."""
    return PromiseView.of(await ctx.call(ctx.plane.jobs.quote, body.to_request(), who.user))


@router.get("/jobs")
async def jobs(
    ctx: Ctx,
    who: Caller,
    phase: Annotated[Phase | None, Query(description="Only jobs in this phase.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="`next` of the page before.")] = None,
) -> JobPage:
    """The caller's jobs, newest first; all jobs for an administrator."""
    page = await ctx.call(_page, ctx, who, phase, limit, after)
    full = len(page) == limit
    return JobPage(jobs=[JobView.of_record(r) for r in page], next=page[-1].job_id if full else None)


def _page(
    ctx: Context, who: Principal, phase: Phase | None, limit: int, after: str | None
) -> list[JobRecord]:
    before = None if after is None else ctx.visible_job(who, after)
    return ctx.plane.jobs.with_estimates(ctx.plane.jobs.find(who.scope, phase, limit, before))


@router.get("/jobs/{job_id}")
async def job(
    job_id: JobId,
    ctx: Ctx,
    who: Caller,
    wait_s: Annotated[
        float,
        Query(ge=0, le=60, allow_inf_nan=False, description="Wait until the job is over, this long at most."),
    ] = 0.0,
) -> JobView:
    """One job."""
    clock = asyncio.get_running_loop().time
    seen, until_s = ctx.hub.last, clock() + wait_s
    record = await ctx.call(ctx.visible_job, who, job_id)
    while not record.phase.over and clock() < until_s and not ctx.hub.closed:
        seen = await ctx.hub.job_changed(job_id, seen, until_s - clock())
        record = await ctx.call(ctx.visible_job, who, job_id)
    (shown,) = await ctx.call(ctx.plane.jobs.with_estimates, [record])
    return JobView.of_record(shown)


@router.get("/jobs/{job_id}/explain")
async def explain(job_id: JobId, ctx: Ctx, who: Caller) -> dict[str, Any]:
    """Why a job runs or waits, when it will be done, and the slots it has had."""

    def ask() -> dict[str, Any]:
        ctx.visible_job(who, job_id)
        return dict(ctx.plane.jobs.explain(job_id))

    return await ctx.call(ask)


@router.get("/jobs/{job_id}/series")
async def series(job_id: JobId, ctx: Ctx, who: Caller) -> SeriesView:
    """A job's curves over time, with its starts, resizes and losses. Long runs are thinned evenly."""

    def ask() -> SeriesView:
        ctx.visible_job(who, job_id)
        return SeriesView.model_validate(ctx.plane.jobs.series(job_id))

    return await ctx.call(ask)


@router.post("/jobs/{job_id}/cancel", responses=CONFLICT)
async def cancel(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """End a job for good."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.cancel(job_id, who.user))


@router.post("/jobs/{job_id}/pause", responses=CONFLICT)
async def pause(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """Have a job save its state and give its slots back until it is resumed."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.pause(job_id))


@router.post("/jobs/{job_id}/resume", responses=CONFLICT)
async def resume(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """Let a paused job go on."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.resume(job_id))


@router.post("/jobs/{job_id}/scale", responses=CONFLICT)
async def scale(job_id: JobId, body: Bounds, ctx: Ctx, who: Caller) -> JobView:
    """Bound a job's workers by hand."""
    least, most = body.min_workers, body.max_workers
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.scale(job_id, least, most))


async def _change(ctx: Context, who: Principal, job_id: str, change: Callable[[], JobRecord]) -> JobView:
    def checked() -> JobRecord:
        ctx.visible_job(who, job_id)
        return change()

    return JobView.of_record(await ctx.call(checked))


@router.get(
    "/jobs/{job_id}/logs",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def logs(
    job_id: JobId,
    ctx: Ctx,
    who: Caller,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=1 << 62, description="Byte to start from.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1 << 20, description="Most bytes of one answer.")] = _CHUNK,
    follow: Annotated[bool, Query(description="Go on until the job is over.")] = False,
) -> Response:
    """A job's output. The header X-Next-Offset is the `offset` to go on from."""
    await ctx.call(ctx.visible_job, who, job_id)
    if follow:
        source = _follow(ctx, job_id, offset, ctx.still_allowed(request))
        return stream(ctx, source, "text/plain; charset=utf-8")
    data, after = await ctx.call(ctx.plane.jobs.logs, job_id, offset, limit)
    headers = {"X-Next-Offset": str(after)}
    return Response(data, media_type="text/plain; charset=utf-8", headers=headers)


async def _follow(
    ctx: Context, job_id: str, offset: int, allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    seen = ctx.hub.last
    while not ctx.hub.closed and allowed():
        # Check for the end before reading, so that the last read sees everything the job wrote.
        over = (await ctx.call(ctx.plane.jobs.get, job_id)).phase.over
        data, offset = await ctx.call(ctx.plane.jobs.logs, job_id, offset, _CHUNK)
        if data:
            yield data
        elif over:
            return
        else:
            seen = await ctx.hub.job_changed(job_id, seen, _POLL_S)
