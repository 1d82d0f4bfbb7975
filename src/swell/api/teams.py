"""Teams over the wire: what is asked and what is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, StringConstraints

from swell.api.schemas import Incoming, Outgoing
from swell.domain import Team

if TYPE_CHECKING:
    from swell.control.teams import TeamState

_User = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]*$")]


class TeamRequest(Incoming):
    """A team as an administrator wants it."""

    slots: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        description="Its quota: slots that it gets whenever its jobs can use them."
    )
    users: list[_User] | None = Field(
        default=None,
        max_length=10_000,
        description="Users whose jobs are the team's; null keeps those it has, an empty list removes them.",
    )
    force: bool = Field(default=False, description="Change it even if a promise to a job is broken by it.")

    def to_team(self, name: str) -> Team:
        """The request as the control plane takes it."""
        return Team(name=name, slots=self.slots, users=tuple(dict.fromkeys(self.users or ())))


class TeamView(Outgoing):
    """A team and the slots that it has."""

    name: str = Field(description="Empty for all users who are in no team.")
    slots: int = Field(description="Its quota.")
    users: list[str] = Field(default=[])
    own: int = Field(description="What it may count on now; less than its quota if nodes are lost.")
    used: int = Field(description="Slots that its jobs have.")
    borrowed: int = Field(description="How many of these are other teams', and go back when they want them.")
    running: int = Field(description="Jobs that run.")
    waiting: int = Field(description="Jobs that wait for slots.")
    endangered: list[str] = Field(
        default=[], description="Jobs whose promised finish this change puts in danger."
    )

    @classmethod
    def of_state(cls, state: TeamState) -> Self:
        """The wire form of a team."""
        return cls(
            name=state.team.name,
            slots=state.team.slots,
            users=list(state.team.users),
            own=state.use.own,
            used=state.use.used,
            borrowed=state.use.borrowed,
            running=state.running,
            waiting=state.waiting,
            endangered=list(state.endangered),
        )


class TeamList(Outgoing):
    """All teams."""

    teams: list[TeamView]
