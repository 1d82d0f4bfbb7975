"""Nodes, the policy, and replays."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from swell.api.context import Admin, Caller, Context, Ctx
from swell.api.errors import DOCUMENTED, FORBIDDEN
from swell.api.schemas import (
    ID_PATTERN,
    AutoscalerView,
    Collected,
    CollectRequest,
    NodeList,
    NodeView,
    PolicyChange,
    PolicyView,
    ReplayRequest,
)

router = APIRouter(prefix="/v1", tags=["cluster"], responses=DOCUMENTED)
replay_router = APIRouter(prefix="/v1", tags=["cluster"], responses=DOCUMENTED | FORBIDDEN)

NodeName = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a node.")]


@router.get("/nodes")
async def nodes(ctx: Ctx, _: Caller) -> NodeList:
    """The nodes, their slots, and how many are in use."""
    return await _nodes(ctx)


@router.post("/nodes/{node}/drain", responses=FORBIDDEN)
async def drain(node: NodeName, ctx: Ctx, _: Admin) -> NodeList:
    """Move all jobs off a node, and give it none until it is undrained. Administrators only."""
    await ctx.call(ctx.plane.nodes.drain, node)
    return await _nodes(ctx)


@router.post("/nodes/{node}/undrain", responses=FORBIDDEN)
async def undrain(node: NodeName, ctx: Ctx, _: Admin) -> NodeList:
    """Use a drained node again. Administrators only."""
    await ctx.call(ctx.plane.nodes.undrain, node)
    return await _nodes(ctx)


async def _nodes(ctx: Context) -> NodeList:
    found, rented = await ctx.call(ctx.plane.nodes.states), await ctx.call(ctx.plane.nodes.autoscaler)
    return NodeList(
        nodes=[NodeView.model_validate(node) for node in found],
        autoscaler=None if rented is None else AutoscalerView.model_validate(rented),
    )


@router.get("/policy")
async def policy(ctx: Ctx, _: Caller) -> PolicyView:
    """The policy that decides how many slots each job gets."""
    return PolicyView(policy=await ctx.call(ctx.plane.policy))


@router.put("/policy", responses=FORBIDDEN)
async def set_policy(body: PolicyChange, ctx: Ctx, _: Admin) -> PolicyView:
    """Decide by another policy from now on. Administrators only."""
    await ctx.call(ctx.plane.set_policy, body.policy)
    return PolicyView(policy=await ctx.call(ctx.plane.policy))


@router.post("/gc", responses=FORBIDDEN)
async def collect(body: CollectRequest, ctx: Ctx, _: Admin) -> Collected:
    """Delete what need not be kept of jobs that are over, or say what that would be. Administrators only."""
    done = await ctx.call(ctx.plane.collect, body.keep_s, body.keep_bytes, dry=body.dry)
    return Collected.model_validate(done)


@replay_router.post("/replay")
async def replay(body: ReplayRequest, ctx: Ctx, _: Admin) -> dict[str, Any]:
    """What would have happened under other policies or on another cluster. Administrators only."""
    assert ctx.replay is not None  # without it the route is not installed
    return await ctx.call(ctx.replay, body)
