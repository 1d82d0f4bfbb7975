"""Reservations over the wire: what is asked and what is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, StringConstraints

from swell.api.schemas import ID_PATTERN, Incoming, Outgoing
from swell.domain import Reservation

if TYPE_CHECKING:
    from swell.control.reservations import ReservationState

MOST_GPUS = 1_000_000
_Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
_Name = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


class ReservationRequest(Incoming):
    """Capacity to keep from training: a number of slots or named nodes, for some hours or a service."""

    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = Field(
        default=0, description="How many slots, whichever; with `most`, what the service wants now."
    )
    nodes: list[_Name] = Field(default=[], max_length=1000, description="All slots of these nodes instead.")
    start_s: _Moment | None = Field(default=None, description="Unix time; null for now.")
    end_s: _Moment | None = Field(default=None, description="Unix time; null for no end.")
    every_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="The same hours again after so many seconds: 86400 for every day."
    )
    most: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = Field(
        default=None, description="Follow the demand of a service that never wants more than this."
    )
    owner: Annotated[str, StringConstraints(max_length=128)] = Field(
        default="", description="The user who may say what the service wants, besides administrators."
    )
    force: bool = Field(default=False, description="Reserve even if a promise to a job is broken by it.")

    def to_reservation(self, name: str, now_s: float) -> Reservation:
        """The request as the control plane takes it."""
        return Reservation(
            name=name,
            gpus=self.gpus,
            nodes=tuple(self.nodes),
            start_s=now_s if self.start_s is None else self.start_s,
            end_s=self.end_s,
            every_s=self.every_s,
            most=self.most,
            owner=self.owner,
        )


class DemandRequest(Incoming):
    """What a service wants now."""

    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = Field(description="How many slots.")


class ReservationView(Outgoing):
    """A reservation and the slots that it has."""

    name: str
    gpus: int = Field(description="How many slots are wanted in its hours, or by the service now.")
    nodes: list[str] = Field(default=[], description="All slots of these nodes, if not a number.")
    start_s: float
    end_s: float | None = None
    every_s: float | None = None
    most: int | None = None
    owner: str = ""
    active: bool = Field(description="Whether its hours are now.")
    slots: list[int] = Field(default=[], description="The slots that it holds.")
    yielded: bool = Field(description="Whether training has left them, so that they can be used.")
    heard_s: float | None = Field(default=None, description="When the service's demand was last heard of.")
    endangered: list[str] = Field(
        default=[], description="Jobs whose promised finish this reservation puts in danger."
    )

    @classmethod
    def of_state(cls, state: ReservationState) -> Self:
        """The wire form of a reservation."""
        one = state.reservation
        return cls(
            name=one.name,
            gpus=one.gpus,
            nodes=list(one.nodes),
            start_s=one.start_s,
            end_s=one.end_s,
            every_s=one.every_s,
            most=one.most,
            owner=one.owner,
            active=state.active,
            slots=list(state.slots),
            yielded=state.yielded,
            heard_s=state.heard_s,
            endangered=list(state.endangered),
        )


class ReservationList(Outgoing):
    """All reservations."""

    reservations: list[ReservationView]
