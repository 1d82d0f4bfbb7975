"""Tokens: made, listed and revoked by administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from swell.api.auth import Token
from swell.api.context import Admin, Ctx
from swell.api.errors import DOCUMENTED, FORBIDDEN
from swell.api.schemas import NewToken, TokenList, TokenRequest, TokenView

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], responses=DOCUMENTED | FORBIDDEN)


@router.get("")
async def tokens(ctx: Ctx, _: Admin) -> TokenList:
    """All tokens, without their secrets."""
    return TokenList(tokens=[_view(token) for token in ctx.book.list()])


@router.post("", status_code=201)
async def create(body: TokenRequest, ctx: Ctx, _: Admin) -> NewToken:
    """Make a token. Its secret is in this answer and nowhere else."""
    secret, token = await ctx.call(ctx.book.create, body.user, body.role, ttl_s=body.ttl_s)
    return NewToken(**_view(token).model_dump(), token=secret)


@router.delete("/{token_id}")
async def revoke(token_id: Annotated[str, Path(pattern="^[0-9a-f]{12}$")], ctx: Ctx, _: Admin) -> TokenView:
    """Refuse a token from now on."""
    return _view(await ctx.call(ctx.book.revoke, token_id))


def _view(token: Token) -> TokenView:
    return TokenView(
        token_id=token.token_id, user=token.user, role=token.role.value, expires_s=token.expires_s
    )
