"""Reservations: capacity that belongs to services part of the time."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path

from swell.api.auth import Role, require_admin
from swell.api.context import Admin, Caller, Ctx
from swell.api.errors import DOCUMENTED, FORBIDDEN
from swell.api.reservations import DemandRequest, ReservationList, ReservationRequest, ReservationView
from swell.api.schemas import ID_PATTERN

router = APIRouter(prefix="/v1/reservations", tags=["cluster"], responses=DOCUMENTED)

Name = Annotated[str, Path(pattern=ID_PATTERN, description="Name of a reservation.")]


@router.get("")
async def reservations(ctx: Ctx, _: Caller) -> ReservationList:
    """What is reserved for services, and the slots that they have now."""
    found = await ctx.call(ctx.plane.reservations.states)
    return ReservationList(reservations=[ReservationView.of_state(one) for one in found])


@router.put("/{name}", responses=FORBIDDEN)
async def reserve(name: Name, body: ReservationRequest, ctx: Ctx, admin: Admin) -> ReservationView:
    """Make a reservation, or change it. Refused (409) if it breaks a promise and is not forced."""
    asked = body.to_reservation(name, time.time())
    return ReservationView.of_state(
        await ctx.call(ctx.plane.reservations.make, asked, admin.user, force=body.force)
    )


@router.delete("/{name}", responses=FORBIDDEN)
async def unreserve(name: Name, ctx: Ctx, admin: Admin) -> ReservationView:
    """Remove a reservation. Administrators only."""
    return ReservationView.of_state(await ctx.call(ctx.plane.reservations.remove, name, admin.user))


@router.put("/{name}/demand", responses=FORBIDDEN)
async def demand(name: Name, body: DemandRequest, ctx: Ctx, caller: Caller) -> ReservationView:
    """Say how many slots the service wants now. For its owner and administrators."""
    if caller.role is not Role.ADMIN:
        found = await ctx.call(ctx.plane.reservations.states)
        if not any(one.reservation.name == name and one.reservation.owner == caller.user for one in found):
            require_admin(caller, f"say what '{name}' wants; its owner may, too")
    return ReservationView.of_state(await ctx.call(ctx.plane.reservations.demand, name, body.gpus))
