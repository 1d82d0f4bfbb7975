"""Answers that go on: counted, so that there are not too many, and ended when the server ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse

from swell.api.context import Context
from swell.api.errors import error_response


def stream(ctx: Context, source: AsyncIterator[bytes], media_type: str) -> Response:
    """Stream an answer, or say that there are too many already."""
    if ctx.streams >= ctx.max_streams:
        message = f"{ctx.max_streams} answers are being streamed already; try again later"
        return error_response(429, "too_many_streams", message, headers={"Retry-After": "5"})
    ctx.streams += 1

    async def counted() -> AsyncIterator[bytes]:
        try:
            async for part in source:
                yield part
        finally:
            ctx.streams -= 1

    # Proxies must not hold parts back.
    return StreamingResponse(counted(), media_type=media_type, headers={"X-Accel-Buffering": "no"})
