"""Teams: quotas of slots that are lent while they are idle."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from swell.api.auth import Role
from swell.api.context import Admin, Caller, Ctx
from swell.api.errors import DOCUMENTED, FORBIDDEN
from swell.api.schemas import ID_PATTERN
from swell.api.teams import TeamList, TeamRequest, TeamView

router = APIRouter(prefix="/v1/teams", tags=["cluster"], responses=DOCUMENTED)

Name = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a team.")]


@router.get("")
async def teams(ctx: Ctx, caller: Caller) -> TeamList:
    """The teams and the slots that they have now. Only administrators see who is in the other teams."""
    found = [TeamView.of_state(one) for one in await ctx.call(ctx.plane.teams.states)]
    if caller.role is not Role.ADMIN:
        found = [one if caller.user in one.users else one.model_copy(update={"users": []}) for one in found]
    return TeamList(teams=found)


@router.put("/{name}", responses=FORBIDDEN)
async def set_team(name: Name, body: TeamRequest, ctx: Ctx, _: Admin) -> TeamView:
    """Make a team, or change it. Refused (409) if it breaks a promise and is not forced."""
    asked, keep = body.to_team(name), body.users is None
    changed = await ctx.call(ctx.plane.teams.change, asked, keep_users=keep, force=body.force)
    return TeamView.of_state(changed)


@router.delete("/{name}", responses=FORBIDDEN)
async def remove_team(
    name: Name,
    ctx: Ctx,
    _: Admin,
    force: Annotated[bool, Query(description="Even if a promise to a job is broken by it.")] = False,
) -> TeamView:
    """Remove a team; its users are in no team then. Administrators only."""
    return TeamView.of_state(await ctx.call(ctx.plane.teams.remove, name, force=force))
