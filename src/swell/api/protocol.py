"""uvicorn's HTTP protocol with patience that ends: a connection must send its request in time.

uvicorn closes a connection that is idle after a request, but waits for ever for the first one, and for the
rest of headers that were begun. So whoever opens connections and sends nothing would hold a descriptor each
for as long as they like.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
