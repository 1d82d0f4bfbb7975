"""A web app on a socket: where it listens, TLS, and how it ends in good order.

When a listener ends, streams end first, then requests under way are answered, then the sockets close.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from swell.api.home import ServerFile, is_loopback
from swell.domain import InputError, SwellError
from swell.engines.ray.connection import own_address
from swell.extras import missing_extra

# uvicorn's HTTP protocol with patience that ends: a connection must send its request in time.
#
# uvicorn closes a connection that is idle after a request, but waits for ever for the first one, and for the
# rest of headers that were begun. So a client that connects and sends nothing would hold a descriptor each
# for as long as it likes.


REQUEST_S = 15.0
"""How long the headers of a request may take, from the connection or the first byte on."""


class PatientProtocol(HttpToolsProtocol):
    """Closes connections that do not send a whole request header within `REQUEST_S`."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        self._late: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._wait_for_headers()

    def on_message_begin(self) -> None:
        """The first byte of a request has arrived."""
        self._wait_for_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The request is whole (its body has a limit of its own)."""
        self._no_longer_wait()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self._no_longer_wait()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._no_longer_wait()
        self._late = self.loop.call_later(REQUEST_S, self._hang_up)

    def _no_longer_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _hang_up(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.abort()


try:
    import uvicorn
except ModuleNotFoundError as error:
    raise missing_extra(error, "swell.api.listener") or error from None


log = logging.getLogger(__name__)

DEFAULT_PORT = 7373
_GRACE_S = 5


def check_binding(host: str, cert: Path | None, key: Path | None, insecure: bool) -> ssl.SSLContext | None:
    """Refuse an address where tokens would cross a network in clear text; returns the TLS context, if any."""
    if (cert is None) != (key is None):
        missing = "key" if key is None else "cert"
        raise InputError(f"{missing} is missing: TLS needs both a certificate and its key", field=missing)
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


class Listener:
    """Serves an app on a socket, in this thread (`run`) or in another (`start`)."""

    def __init__(
        self,
        app: Any,
        *,
        home: Path,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        cert: Path | None = None,
        key: Path | None = None,
        insecure: bool = False,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        """`home`: where server.json is written while the app is served. `closing` ends all streams."""
        tls = check_binding(host, cert, key, insecure)
        self.home = home
        self._socket = _bind(host, port)
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), "")
        port = self._socket.getsockname()[1]
        self.url = _url(tls is not None, _reachable_name() if loopback else host.strip("[]"), port)
        here = _url(tls is not None, loopback, port) if loopback else ""
        self.file = ServerFile(self.url, os.getpid(), None if cert is None else str(cert.absolute()), here)
        config = uvicorn.Config(
            app,
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
        self._uvicorn = _Uvicorn(config, closing)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then return."""
        if threading.current_thread() is threading.main_thread():
            # The libraries' hundreds of thousands of objects live as long as the process. Unless they are
            # frozen, each full garbage collection holds up all requests for a tenth of a second.
            gc.collect()
            gc.freeze()
        self.file.write(self.home)
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


class _Uvicorn(uvicorn.Server):
    """uvicorn that ends streams before it waits for requests, and returns after a signal."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing()
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


def _url(tls: bool, host: str, port: int) -> str:
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _reachable_name() -> str:
    """This machine's name, or its address if the name does not resolve."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        log.warning("the name of this machine, %s, does not resolve: its address is shown instead", name)
        return own_address()
    return name


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
