"""Streamed answers: their number is limited, and they end when the server ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi.responses import Response, StreamingResponse

from swell.api.context import Context
from swell.api.errors import error_response

CHECK_EVERY_S = 2.0
"""How often a stream checks that its token is still good."""


def stream(
    ctx: Context, source: AsyncGenerator[bytes, None], media_type: str, still_allowed: Callable[[], bool]
) -> Response:
    """Stream an answer while it is allowed, or refuse because too many are being streamed."""
    if ctx.streams >= ctx.max_streams:
        message = f"the server streams {ctx.max_streams} answers already; try again later"
        return error_response(429, "too_many_streams", message, headers={"Retry-After": "5"})
    ctx.streams += 1

    async def counted() -> AsyncIterator[bytes]:
        coming = asyncio.ensure_future(anext(source, None))
        try:
            while True:
                await asyncio.wait({coming}, timeout=CHECK_EVERY_S)
                if not still_allowed():
                    return
                if coming.done():
                    part = coming.result()
                    if part is None:
                        return
                    yield part
                    coming = asyncio.ensure_future(anext(source, None))
        finally:
            ctx.streams -= 1
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
            await source.aclose()

    # The header tells proxies not to hold parts back.
    return StreamingResponse(counted(), media_type=media_type, headers={"X-Accel-Buffering": "no"})
