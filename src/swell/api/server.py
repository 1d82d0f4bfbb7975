"""The server: the API of a control plane over HTTP, in the same process.

    server = Server(plane, store, home=home)
    server.run()                     # until SIGTERM or SIGINT

The server listens on loopback unless told otherwise, and on other addresses only with TLS or with `insecure`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swell import __version__
from swell.extras import missing_extra

try:
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry
except ModuleNotFoundError as error:
    raise missing_extra(error, "swell.api.server") or error from None

from swell.api import middleware, routes
from swell.api.auth import AUDIT_FILE, AuditLog, TokenBook, ensure_tokens
from swell.api.hub import EventHub
from swell.api.listener import DEFAULT_PORT, Listener, check_binding
from swell.api.metrics import RequestMetrics
from swell.api.middleware import MAX_BODY_BYTES, BodyLimit, Guard
from swell.api.routes import Context, Replay
from swell.control.store import Store

if TYPE_CHECKING:
    from swell.control.plane import ControlPlane

_THREADS = 64
"""Most calls of the control plane at once. They wait for its lock and its disk, not for a processor."""


def create_app(
    plane: ControlPlane,
    store: Store,
    *,
    book: TokenBook | None = None,
    replay: Replay | None = None,
    tls: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    audit: AuditLog | None = None,
) -> FastAPI:
    """The web app for a control plane. Without `replay` there is no endpoint for replays."""
    registry = CollectorRegistry()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="swell-api")

    async def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return await context.call(function, *args, **kwargs)

    context = Context(
        plane=plane,
        book=book or TokenBook(store),
        hub=EventHub(plane, call),
        pool=pool,
        registry=registry,
        replay=replay,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.book.revoked = context.hub.poke
        await context.hub.start(await context.call(store.last_seq))
        try:
            yield
        finally:
            await context.hub.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            context.checks.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="swell",
        version=__version__,
        summary="Elastic deep-learning training: submit a script and a deadline, get a promise.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    middleware.answer_errors(app)
    for router in (*routes.ROUTERS, *([routes.replay_router] if replay is not None else [])):
        app.include_router(router)
    _describe_tokens(app)
    app.add_middleware(BodyLimit, limit_bytes=max_body_bytes)
    app.add_middleware(Guard, metrics=RequestMetrics(registry), tls=tls, audit=audit)
    return app


def _describe_tokens(app: FastAPI) -> None:
    """Say in the OpenAPI document that requests carry a bearer token.

    The document is made when somebody asks for it: a standby that takes the lead must not wait for that.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        schema["paths"]["/healthz"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class Server(Listener):
    """A control plane's API on a socket."""

    def __init__(
        self, plane: ControlPlane, store: Store, *, home: Path, replay: Replay | None = None, **options: Any
    ) -> None:
        """`options` are those of `Listener`."""
        self.book = TokenBook(store)
        tls = options.get("cert") is not None
        audit = AuditLog(home / AUDIT_FILE)
        self.app = create_app(plane, store, book=self.book, replay=replay, tls=tls, audit=audit)
        super().__init__(self.app, home=home, closing=self.app.state.context.hub.close, **options)
        self.new_tokens = ensure_tokens(self.book, home)
        """Token files that were written now; only the first start writes any."""


def serve(plane: ControlPlane, store: Store, **options: Any) -> None:
    """Serve a control plane until SIGTERM or SIGINT. Options are those of `Server`."""
    Server(plane, store, **options).run()


__all__ = ["DEFAULT_PORT", "Server", "check_binding", "create_app", "serve"]
