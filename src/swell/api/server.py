"""The server: the API of a control plane over HTTP, in the same process.

    server = Server(plane, store, home=home)
    server.run()                     # until SIGTERM or SIGINT

The server listens on loopback unless told otherwise, and on other addresses only with TLS or with `insecure`.
When it ends, streams end first, then requests under way are answered, then the sockets close.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from swell import __version__
from swell.extras import missing_extra

try:
    import uvicorn
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry
except ModuleNotFoundError as error:
    raise missing_extra(error, "swell.api.server") or error from None

from swell.api import errors
from swell.api.audit import FILE, AuditLog
from swell.api.auth import TokenBook, ensure_tokens
from swell.api.context import Context, Replay
from swell.api.contract import Plane
from swell.api.home import ServerFile, is_loopback
from swell.api.hub import EventHub
from swell.api.metrics import RequestMetrics
from swell.api.middleware import MAX_BODY_BYTES, BodyLimit, Guard
from swell.api.protocol import PatientProtocol
from swell.api.routes import cluster, dashboard, events, jobs, service, tokens
from swell.control.store import Store
from swell.domain import InputError, SwellError

DEFAULT_PORT = 7373
_THREADS = 64
"""Most calls of the control plane at once. They wait for its lock and its disk, not for a processor."""
_GRACE_S = 5


def create_app(
    plane: Plane,
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
        summary="Elastic deep-learning training: hand in a script and a deadline, get a promise.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    errors.install(app)
    routers = [jobs.router, events.router, cluster.router, tokens.router, service.router]
    routers += [dashboard.router, dashboard.pages]
    for router in routers + ([cluster.replay_router] if replay is not None else []):
        app.include_router(router)
    _describe_tokens(app)
    app.add_middleware(BodyLimit, limit_bytes=max_body_bytes)
    app.add_middleware(Guard, metrics=RequestMetrics(registry), tls=tls, audit=audit)
    return app


def _describe_tokens(app: FastAPI) -> None:
    """Say in the OpenAPI document that requests carry a bearer token."""
    schema = app.openapi()
    schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    schema["paths"]["/healthz"]["get"]["security"] = []


def check_binding(host: str, cert: Path | None, key: Path | None, insecure: bool) -> ssl.SSLContext | None:
    """Refuse an address where tokens would cross a network in clear text; returns the TLS context, if any."""
    if (cert is None) != (key is None):
        missing = "key" if key is None else "cert"
        raise InputError(f"{missing} is missing: TLS needs both --tls-cert and --tls-key", field=missing)
    if cert is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            tls.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"cert: cannot use {cert} with {key}: {error}; give two PEM files that belong together",
                field="cert",
            ) from error
        return tls
    if not insecure and not is_loopback(host):
        raise InputError(
            f"host '{host}' can be reached from other machines, and tokens would cross the network in clear"
            " text: give --tls-cert and --tls-key, or --insecure if something else protects the network",
            field="host",
        )
    return None


class Server:
    """A control plane's API on a socket."""

    def __init__(
        self,
        plane: Plane,
        store: Store,
        *,
        home: Path,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        cert: Path | None = None,
        key: Path | None = None,
        insecure: bool = False,
        replay: Replay | None = None,
    ) -> None:
        tls = check_binding(host, cert, key, insecure)
        self.home = home
        self.book = TokenBook(store)
        self.new_tokens = ensure_tokens(self.book, home)
        """Token files that were written now; only the first start writes any."""
        audit = AuditLog(home / FILE)
        self.app = create_app(plane, store, book=self.book, replay=replay, tls=tls is not None, audit=audit)
        self._socket = _bind(host, port)
        shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{self._socket.getsockname()[1]}"
        self._file = ServerFile(self.url, os.getpid(), None if cert is None else str(cert.absolute()))
        config = uvicorn.Config(
            self.app,
            http=PatientProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="on",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._uvicorn = _Uvicorn(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then return."""
        if threading.current_thread() is threading.main_thread():
            # The libraries' hundreds of thousands of objects live as long as the process. Unless they are
            # frozen, each full garbage collection holds up all requests for a tenth of a second.
            gc.collect()
            gc.freeze()
        self._file.write(self.home)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            ServerFile.remove(self.home, os.getpid())
            self._socket.close()
        if not self._uvicorn.started:
            raise SwellError("the server could not start; see its log")

    def start(self, timeout_s: float = 30.0) -> None:
        """Serve in a thread of this process; returns once requests are answered."""
        self._thread = threading.Thread(target=self.run, name="swell-server", daemon=True)
        self._thread.start()
        step_s = 0.01
        for _ in range(int(timeout_s / step_s)):
            if self._uvicorn.started:
                return
            self._thread.join(step_s)
            if not self._thread.is_alive():
                break
        raise SwellError(f"the server did not come up within {timeout_s:g} s; see its log")

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the server in good order. May be called from any thread."""
        self._uvicorn.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def serve(plane: Plane, store: Store, **options: Any) -> None:
    """Serve a control plane until SIGTERM or SIGINT. Options are those of `Server`."""
    Server(plane, store, **options).run()


class _Uvicorn(uvicorn.Server):
    """uvicorn that ends streams before it waits for requests, and returns after a signal."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: Any = self.config.app
        app.state.context.hub.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again at the end, and the control plane would never be stopped.
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def leave(_: int, __: FrameType | None) -> None:
            # After a second signal the server does not wait for requests under way.
            self.force_exit = self.should_exit
            self.should_exit = True

        before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address; raises InputError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host}:{port} ({error}); is another server running? Try another --port",
            field="port",
        ) from error
    bound.set_inheritable(False)
    return bound


__all__ = ["DEFAULT_PORT", "Server", "check_binding", "create_app", "serve"]
