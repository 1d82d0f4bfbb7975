"""The dashboard's page, and the few answers that only it needs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response

from swell.api.context import Caller, Context, Ctx
from swell.api.errors import DOCUMENTED
from swell.api.schemas import LanesView, PolicyList, WhoView
from swell.policies import described
from swell.report.lanes import JOBS, NODES, lanes

pages = APIRouter(include_in_schema=False)
router = APIRouter(prefix="/v1", tags=["dashboard"], responses=DOCUMENTED)

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


@router.get("/me")
async def me(who: Caller) -> WhoView:
    """The user whose token this is, and what the token allows."""
    return WhoView(user=who.user, role=who.role.value)


@router.get("/policies")
async def policies(ctx: Ctx, _: Caller) -> PolicyList:
    """The policies that can be chosen: paper, goal, and what they know about jobs."""
    return PolicyList.model_validate({"policies": await ctx.call(described)})


@router.get("/lanes")
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
