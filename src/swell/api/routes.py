"""All endpoints, by kind of thing, after what each of them needs: control plane, tokens, and who asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry

from swell import __version__
from swell.api.auth import Principal, Role, Token, TokenBook, require_admin
from swell.api.hub import EventHub
from swell.api.metrics import CONTENT_TYPE, exposition
from swell.api.middleware import CONFLICT, DOCUMENTED, FORBIDDEN, error_response
from swell.api.refusals import Forbidden, NotAuthenticated
from swell.api.schemas import (
    ID_PATTERN,
    AutoscalerView,
    Bounds,
    Collected,
    CollectRequest,
    DemandRequest,
    EventPage,
    Health,
    JobPage,
    JobSubmission,
    JobView,
    LanesView,
    NewToken,
    NodeList,
    NodeView,
    PolicyChange,
    PolicyList,
    PolicyView,
    PromiseView,
    ReplayRequest,
    ReservationList,
    ReservationRequest,
    ReservationView,
    SeriesView,
    TeamList,
    TeamRequest,
    TeamView,
    TokenList,
    TokenRequest,
    TokenView,
    WhoView,
)
from swell.control.errors import Conflict, NotFound, Unreadable
from swell.control.model import JobRecord, JobRequest, Phase
from swell.policies import described
from swell.report.lanes import JOBS, NODES, lanes

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


# Streamed answers: their number is limited, and they end when the server ends.


def stream(ctx: Context, source: AsyncIterator[bytes], media_type: str) -> Response:
    """Stream an answer, or refuse because too many are being streamed."""
    if ctx.streams >= ctx.max_streams:
        message = f"the server streams {ctx.max_streams} answers already; try again later"
        return error_response(429, "too_many_streams", message, headers={"Retry-After": "5"})
    ctx.streams += 1

    async def counted() -> AsyncIterator[bytes]:
        try:
            async for part in source:
                yield part
        finally:
            ctx.streams -= 1

    # The header tells proxies not to hold parts back.
    return StreamingResponse(counted(), media_type=media_type, headers={"X-Accel-Buffering": "no"})


# Jobs: submit, quote, list, look at, change.


jobs_router = APIRouter(prefix="/v1", tags=["jobs"], responses=DOCUMENTED)

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


@jobs_router.post("/jobs", status_code=201, responses=CONFLICT)
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


@jobs_router.post("/quote")
async def quote(body: JobSubmission, ctx: Ctx, who: Caller) -> PromiseView:
    """The promise that submitting this job would give, without submitting it."""
    return PromiseView.of(await ctx.call(ctx.plane.jobs.quote, body.to_request(), who.user))


@jobs_router.get("/jobs")
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


@jobs_router.get("/jobs/{job_id}")
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


@jobs_router.get("/jobs/{job_id}/explain")
async def explain(job_id: JobId, ctx: Ctx, who: Caller) -> dict[str, Any]:
    """Why a job runs or waits, when it will be done, and the slots it has had."""

    def ask() -> dict[str, Any]:
        ctx.visible_job(who, job_id)
        return dict(ctx.plane.jobs.explain(job_id))

    return await ctx.call(ask)


@jobs_router.get("/jobs/{job_id}/story")
async def story(job_id: JobId, ctx: Ctx, who: Caller) -> list[str]:
    """The last decisions of the state machines of a job, a line for each."""

    def last_decisions() -> list[str]:
        ctx.visible_job(who, job_id)
        return ctx.plane.jobs.story(job_id)

    return await ctx.call(last_decisions)


@jobs_router.get("/jobs/{job_id}/series")
async def series(job_id: JobId, ctx: Ctx, who: Caller) -> SeriesView:
    """A job's curves over time, with its starts, resizes and losses. Long runs are thinned evenly."""

    def ask() -> SeriesView:
        ctx.visible_job(who, job_id)
        return SeriesView.model_validate(ctx.plane.jobs.series(job_id))

    return await ctx.call(ask)


@jobs_router.post("/jobs/{job_id}/cancel", responses=CONFLICT)
async def cancel(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """End a job for good."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.cancel(job_id, who.user))


@jobs_router.post("/jobs/{job_id}/pause", responses=CONFLICT)
async def pause(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """Pause a job: it saves its state and gives its slots back until it is resumed."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.pause(job_id))


@jobs_router.post("/jobs/{job_id}/resume", responses=CONFLICT)
async def resume(job_id: JobId, ctx: Ctx, who: Caller) -> JobView:
    """Let a paused job go on."""
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.resume(job_id))


@jobs_router.post("/jobs/{job_id}/scale", responses=CONFLICT)
async def scale(job_id: JobId, body: Bounds, ctx: Ctx, who: Caller) -> JobView:
    """Bound a job's workers by hand."""
    least, most = body.min_workers, body.max_workers
    return await _change(ctx, who, job_id, lambda: ctx.plane.jobs.scale(job_id, least, most))


async def _change(ctx: Context, who: Principal, job_id: str, change: Callable[[], JobRecord]) -> JobView:
    def checked() -> JobRecord:
        ctx.visible_job(who, job_id)
        return change()

    return JobView.of_record(await ctx.call(checked))


@jobs_router.get(
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


# Events: a page of past events, or a stream of events as they happen.


events_router = APIRouter(prefix="/v1/events", tags=["events"], responses=DOCUMENTED)

_MOST = 1 << 62
Since = Annotated[int | None, Query(ge=0, le=_MOST, description="Number of the last event already seen.")]
Job = Annotated[str | None, Query(pattern=ID_PATTERN, description="Only events of this job.")]


@events_router.get("")
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


@events_router.get(
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


# Nodes, the policy, and replays.


cluster_router = APIRouter(prefix="/v1", tags=["cluster"], responses=DOCUMENTED)
replay_router = APIRouter(prefix="/v1", tags=["cluster"], responses=DOCUMENTED | FORBIDDEN)

NodeName = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a node.")]


@cluster_router.get("/nodes")
async def nodes(ctx: Ctx, _: Caller) -> NodeList:
    """The nodes, their slots, and how many are in use."""
    return await _nodes(ctx)


@cluster_router.post("/nodes/{node}/drain", responses=FORBIDDEN)
async def drain(node: NodeName, ctx: Ctx, _: Admin) -> NodeList:
    """Move all jobs off a node, and give it none until it is undrained. Administrators only."""
    await ctx.call(ctx.plane.nodes.drain, node)
    return await _nodes(ctx)


@cluster_router.post("/nodes/{node}/undrain", responses=FORBIDDEN)
async def undrain(node: NodeName, ctx: Ctx, _: Admin) -> NodeList:
    """Use a drained node again. Administrators only."""
    await ctx.call(ctx.plane.nodes.undrain, node)
    return await _nodes(ctx)


async def _nodes(ctx: Context) -> NodeList:
    found, rented = await ctx.call(ctx.plane.nodes.states), await ctx.call(ctx.plane.nodes.autoscaler)
    return NodeList(
        nodes=[NodeView.model_validate(node) for node in found],
        autoscaler=None if rented is None else AutoscalerView.model_validate(rented),
    )


@cluster_router.get("/policy")
async def policy(ctx: Ctx, _: Caller) -> PolicyView:
    """The policy that decides how many slots each job gets."""
    return PolicyView(policy=await ctx.call(ctx.plane.policy))


@cluster_router.put("/policy", responses=FORBIDDEN)
async def set_policy(body: PolicyChange, ctx: Ctx, _: Admin) -> PolicyView:
    """Decide by another policy from now on. Administrators only."""
    await ctx.call(ctx.plane.set_policy, body.policy)
    return PolicyView(policy=await ctx.call(ctx.plane.policy))


@cluster_router.post("/gc", responses=FORBIDDEN)
async def collect(body: CollectRequest, ctx: Ctx, _: Admin) -> Collected:
    """Delete what need not be kept of jobs that are over, or say what that would be. Administrators only."""
    done = await ctx.call(ctx.plane.collect, body.keep_s, body.keep_bytes, dry=body.dry)
    return Collected.model_validate(done)


@replay_router.post("/replay")
async def replay(body: ReplayRequest, ctx: Ctx, _: Admin) -> dict[str, Any]:
    """Replay the platform's history under other policies or on another cluster. Administrators only."""
    assert ctx.replay is not None  # without it the route is not installed
    return await ctx.call(ctx.replay, body)


# Reservations: capacity that belongs to services part of the time.


reservations_router = APIRouter(prefix="/v1/reservations", tags=["cluster"], responses=DOCUMENTED)

ReservationName = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a reservation.")]


@reservations_router.get("")
async def reservations(ctx: Ctx, _: Caller) -> ReservationList:
    """The reservations of services, and the slots that they have now."""
    found = await ctx.call(ctx.plane.reservations.states)
    return ReservationList(reservations=[ReservationView.of_state(one) for one in found])


@reservations_router.put("/{name}", responses=FORBIDDEN)
async def reserve(name: ReservationName, body: ReservationRequest, ctx: Ctx, admin: Admin) -> ReservationView:
    """Make a reservation, or change it. Refused (409) if it breaks a promise and is not forced."""
    asked = body.to_reservation(name, time.time())
    return ReservationView.of_state(
        await ctx.call(ctx.plane.reservations.make, asked, admin.user, force=body.force)
    )


@reservations_router.delete("/{name}", responses=FORBIDDEN)
async def unreserve(name: ReservationName, ctx: Ctx, admin: Admin) -> ReservationView:
    """Remove a reservation. Administrators only."""
    return ReservationView.of_state(await ctx.call(ctx.plane.reservations.remove, name, admin.user))


@reservations_router.put("/{name}/demand", responses=FORBIDDEN)
async def demand(name: ReservationName, body: DemandRequest, ctx: Ctx, caller: Caller) -> ReservationView:
    """Say how many slots the service wants now. For its owner and administrators."""
    if caller.role is not Role.ADMIN:
        found = await ctx.call(ctx.plane.reservations.states)
        if not any(one.reservation.name == name and one.reservation.owner == caller.user for one in found):
            require_admin(caller, f"say what '{name}' wants; its owner may, too")
    return ReservationView.of_state(await ctx.call(ctx.plane.reservations.demand, name, body.gpus))


# Teams: quotas of slots that are lent while they are idle.


teams_router = APIRouter(prefix="/v1/teams", tags=["cluster"], responses=DOCUMENTED)

TeamName = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a team.")]


@teams_router.get("")
async def teams(ctx: Ctx, caller: Caller) -> TeamList:
    """The teams and the slots that they have now. Only administrators see who is in the other teams."""
    found = [TeamView.of_state(one) for one in await ctx.call(ctx.plane.teams.states)]
    if caller.role is not Role.ADMIN:
        found = [one if caller.user in one.users else one.model_copy(update={"users": []}) for one in found]
    return TeamList(teams=found)


@teams_router.put("/{name}", responses=FORBIDDEN)
async def set_team(name: TeamName, body: TeamRequest, ctx: Ctx, _: Admin) -> TeamView:
    """Make a team, or change it. Refused (409) if it breaks a promise and is not forced."""
    asked, keep = body.to_team(name), body.users is None
    changed = await ctx.call(ctx.plane.teams.change, asked, keep_users=keep, force=body.force)
    return TeamView.of_state(changed)


@teams_router.delete("/{name}", responses=FORBIDDEN)
async def remove_team(
    name: TeamName,
    ctx: Ctx,
    _: Admin,
    force: Annotated[bool, Query(description="Even if a promise to a job is broken by it.")] = False,
) -> TeamView:
    """Remove a team; its users are in no team then. Administrators only."""
    return TeamView.of_state(await ctx.call(ctx.plane.teams.remove, name, force=force))


# Tokens: made, listed and revoked by administrators.


tokens_router = APIRouter(prefix="/v1/tokens", tags=["tokens"], responses=DOCUMENTED | FORBIDDEN)


@tokens_router.get("")
async def tokens(ctx: Ctx, _: Admin) -> TokenList:
    """All tokens, without their secrets."""
    return TokenList(tokens=[_view(token) for token in ctx.book.list()])


@tokens_router.post("", status_code=201)
async def create(body: TokenRequest, ctx: Ctx, _: Admin) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    secret, token = await ctx.call(ctx.book.create, body.user, body.role, ttl_s=body.ttl_s)
    return NewToken(**_view(token).model_dump(), token=secret)


@tokens_router.delete("/{token_id}")
async def revoke(token_id: Annotated[str, Path(pattern="^[0-9a-f]{12}$")], ctx: Ctx, _: Admin) -> TokenView:
    """Refuse a token from now on."""
    return _view(await ctx.call(ctx.book.revoke, token_id))


def _view(token: Token) -> TokenView:
    return TokenView(
        token_id=token.token_id, user=token.user, role=token.role.value, expires_s=token.expires_s
    )


# The server itself: health, metrics, and documentation that loads nothing from other servers.


service_router = APIRouter(tags=["service"])

_DOCS_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
_DOCS_ASSETS = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}


@service_router.get("/healthz", response_model=Health, responses={503: DOCUMENTED[503]})
async def healthz(ctx: Ctx) -> Health | Response:
    """Whether the server is up, all its parts work and its store answers. Needs no token."""
    ill = await ctx.check(ctx.plane.health)
    if trouble := ctx.hub.look():
        ill = ill | {"events": trouble}
    if ill:  # only the names: the reasons may contain what a caller without a token must not see
        message = f"not working: {', '.join(sorted(ill))}"
        return error_response(503, "part_down", message, hint="it is started again; see the server's log")
    await ctx.check(ctx.plane.events, ctx.hub.last, None, 1)
    failed = ctx.plane.failed_policy
    notes = [f"policy '{failed['policy']}' failed: '{failed['by']}' decides in its place"] if failed else []
    return Health(status="ok", version=__version__, notes=notes)


@service_router.get("/metrics", response_class=Response, responses={401: DOCUMENTED[401]})
async def metrics(ctx: Ctx, _: Caller) -> Response:
    """Figures for Prometheus. Any valid token may read them."""
    return Response(await ctx.call(exposition, ctx.registry, ctx.stats), media_type=CONTENT_TYPE)


@service_router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """A page that documents this API."""
    return _docs_asset("docs.html")


@service_router.get("/docs/docs.js", include_in_schema=False)
async def docs_script() -> Response:
    """The script of the page."""
    return _docs_asset("docs.js")


@service_router.get("/docs/docs.css", include_in_schema=False)
async def docs_style() -> Response:
    """The style of the page."""
    return _docs_asset("docs.css")


def _docs_asset(name: str) -> Response:
    content = files("swell.api").joinpath("assets", name).read_bytes()
    headers = {"Content-Security-Policy": _DOCS_POLICY}
    return Response(content, media_type=f"{_DOCS_ASSETS[name]}; charset=utf-8", headers=headers)


# The dashboard's page, and the few answers that only it needs.


pages = APIRouter(include_in_schema=False)
dashboard_router = APIRouter(prefix="/v1", tags=["dashboard"], responses=DOCUMENTED)

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may do: run our own script, and talk to the server that it came from."""
_TYPES = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "app.css": "text/css",
    "icon.svg": "image/svg+xml",
}
_MOST_EVENTS = 50_000


@pages.get("/")
async def index() -> Response:
    """The page; everything else about it is `/dashboard/...`."""
    return _asset("index.html")


@pages.get("/dashboard/{name}")
async def asset(name: str) -> Response:
    """A file of the page."""
    if name not in _TYPES:
        return Response("there is no such file", status_code=404, media_type="text/plain")
    return _asset(name)


def _asset(name: str) -> Response:
    headers = {"Content-Security-Policy": PAGE_POLICY}
    return Response(_content(name), media_type=f"{_TYPES[name]}; charset=utf-8", headers=headers)


@cache
def _content(name: str) -> bytes:
    return files("swell").joinpath("web", name).read_bytes()


@dashboard_router.get("/me")
async def me(who: Caller) -> WhoView:
    """The user whose token this is, and what the token allows."""
    return WhoView(user=who.user, role=who.role.value)


@dashboard_router.get("/policies")
async def policies(ctx: Ctx, _: Caller) -> PolicyList:
    """The policies that can be chosen: paper, goal, and what they know about jobs."""
    return PolicyList.model_validate({"policies": await ctx.call(described)})


@dashboard_router.get("/lanes")
async def swim_lanes(
    ctx: Ctx,
    who: Caller,
    since_s: Annotated[
        float, Query(ge=0, le=1e11, description="Only what happened after this moment.")
    ] = 0.0,
) -> LanesView:
    """How many slots each of the caller's jobs had and when, and how many there were."""
    return LanesView.model_validate(await ctx.call(_lanes, ctx, who.scope, since_s))


def _lanes(ctx: Context, scope: str | None, since_s: float) -> dict[str, Any]:
    # Read the number first: an event that comes in between is then in both, and the reader drops it.
    last = ctx.hub.last
    nodes = ctx.plane.changes(NODES, 0.0, _MOST_EVENTS)  # all of them: the oldest may still be up
    jobs = ctx.plane.changes(JOBS, since_s, _MOST_EVENTS)
    seen = (event for event in jobs if scope is None or ctx.hub.owner_of(event) == scope)
    return {"last_seq": last} | lanes([*nodes, *seen], began_s=since_s).to_json()


ROUTERS = (
    *(jobs_router, events_router, cluster_router, reservations_router, teams_router, tokens_router),
    *(service_router, dashboard_router, pages),
)
"""All of them but `replay_router`, which only a server that can replay has."""
