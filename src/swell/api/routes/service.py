"""The server itself: health, metrics, and documentation that loads nothing from other servers."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

from swell import __version__
from swell.api.context import Caller, Ctx
from swell.api.errors import DOCUMENTED, error_response
from swell.api.metrics import CONTENT_TYPE, exposition
from swell.api.schemas import Health

router = APIRouter(tags=["service"])

_DOCS_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
_ASSETS = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}


@router.get("/healthz", response_model=Health, responses={503: DOCUMENTED[503]})
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


@router.get("/metrics", response_class=Response, responses={401: DOCUMENTED[401]})
async def metrics(ctx: Ctx, _: Caller) -> Response:
    """Figures for Prometheus. Any valid token may read them."""
    return Response(await ctx.call(exposition, ctx.registry, ctx.stats), media_type=CONTENT_TYPE)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """A page that documents this API."""
    return _asset("docs.html")


@router.get("/docs/docs.js", include_in_schema=False)
async def docs_script() -> Response:
    """The script of the page."""
    return _asset("docs.js")


@router.get("/docs/docs.css", include_in_schema=False)
async def docs_style() -> Response:
    """The style of the page."""
    return _asset("docs.css")


def _asset(name: str) -> Response:
    content = files("swell.api").joinpath("assets", name).read_bytes()
    headers = {"Content-Security-Policy": _DOCS_POLICY}
    return Response(content, media_type=f"{_ASSETS[name]}; charset=utf-8", headers=headers)
