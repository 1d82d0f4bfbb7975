"""Streamed answers: their number is limited, and they end when the server ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse

from swell.api.context import Context
from swell.api.errors import error_response


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
