"""Teams: who shares a cluster, how many slots each team has for itself, and the classes of priority.

A team's *quota* is the number of slots that the team gets whenever its jobs can use them. Slots of a quota
that the team does not use are lent to other teams, and come back as soon as the team has work for them.
Users who are in no team share the slots that are in no quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swell.domain.errors import InputError

PRIORITIES = ("low", "normal", "high")
"""Classes of priority, the lowest first."""
NORMAL = "normal"
OTHERS = ""
"""The team of users who are in no team."""
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
MOST_SLOTS = 1_000_000


def rank_of(priority: str) -> int:
    """The place of a class among `PRIORITIES`: the higher, the sooner served."""
    return PRIORITIES.index(priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    name: str
    slots: int
    """Its quota."""
    users: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name == OTHERS and self.slots == 0 and not self.users:  # `NO_TEAM`
            return
        if not isinstance(self.name, str) or not re.fullmatch(NAME, self.name):
            raise InputError(
                "name of a team must be 1 to 64 letters, digits, '.', '_' or '-', the first neither '.' nor"
                f" '-', got {self.name!r:.80}",
                field="name",
            )
        if not isinstance(self.slots, int) or isinstance(self.slots, bool):
            raise InputError(f"slots must be a whole number, got {self.slots!r:.80}", field="slots")
        if not 0 <= self.slots <= MOST_SLOTS:
            raise InputError(f"slots must be 0 to {MOST_SLOTS}, got {self.slots}", field="slots")


NO_TEAM = Team(name=OTHERS, slots=0)
"""All users who are in no team, as one team without a name and a quota."""


@dataclass(frozen=True)
class Teams:
    """All teams of a cluster."""

    teams: tuple[Team, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        names: set[str] = set()
        for team in self.teams:
            if team.name == OTHERS:
                raise InputError("a team must have a name, such as vision", field="name")
            if team.name in names:
                raise InputError(f"there are two teams with the name '{team.name}'", field="name")
            names.add(team.name)
            for user in team.users:
                if seen.setdefault(user, team.name) != team.name:
                    raise _in_two(user, seen[user])
        object.__setattr__(self, "_team_of", seen)

    def __bool__(self) -> bool:
        return bool(self.teams)

    @property
    def quotas(self) -> dict[str, int]:
        return {team.name: team.slots for team in self.teams}

    def of(self, user: str) -> str:
        """The name of a user's team; `OTHERS` for a user who is in none."""
        found: dict[str, str] = getattr(self, "_team_of")  # noqa: B009 - set on a frozen object
        return found.get(user, OTHERS)

    def get(self, name: str) -> Team | None:
        return next((team for team in self.teams if team.name == name), None)

    def having(self, changed: Team) -> Teams:
        """The same teams with this one, in place of the one of the same name."""
        for user in changed.users:
            if self.of(user) not in (OTHERS, changed.name):
                raise _in_two(user, self.of(user))
        if self.get(changed.name) is None:
            return Teams((*self.teams, changed))
        return Teams(tuple(changed if team.name == changed.name else team for team in self.teams))

    def without(self, name: str) -> Teams:
        """The same teams without the one of this name."""
        return Teams(tuple(team for team in self.teams if team.name != name))

    def check_fits(self, slots: int) -> None:
        """Refuse quotas that are together more than the slots of the cluster."""
        together = sum(team.slots for team in self.teams)
        if together > slots:
            raise InputError(
                f"slots: the quotas of all teams would be {together} slots together, and the cluster has "
                f"{slots}; give this team fewer, or lower another quota first",
                field="slots",
            )

    def within(self, slots: int) -> Teams:
        """The same teams, with quotas cut in proportion if the cluster has fewer slots than all together."""
        own = entitled(self.quotas, slots)
        return Teams(tuple(replace(team, slots=own[team.name]) for team in self.teams))

    @classmethod
    def parse(cls, text: str) -> Teams:
        """Teams from text such as 'vision=8,speech=4'."""
        found = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, slots = part.partition("=")
            if not slots.strip().isdigit():
                raise InputError(f"teams must be NAME=SLOTS, such as vision=8, got '{part}'", field="teams")
            found.append(Team(name=name.strip(), slots=int(slots)))
        return cls(tuple(found))

    def to_json(self) -> list[dict[str, Any]]:
        """The teams as plain values."""
        return [{"name": t.name, "slots": t.slots, "users": list(t.users)} for t in self.teams]

    @classmethod
    def from_json(cls, raw: Iterable[Mapping[str, Any]]) -> Teams:
        """Teams that were stored earlier."""
        return cls(
            tuple(Team(name=t["name"], slots=int(t["slots"]), users=tuple(t.get("users", ()))) for t in raw)
        )


def entitled(quotas: Mapping[str, int], capacity: int) -> dict[str, int]:
    """Slots of `capacity` that each team may count on; `OTHERS` have those that no quota takes."""
    together = sum(quotas.values())
    if together <= capacity:
        return dict(quotas) | {OTHERS: capacity - together}
    parts = {name: quota * capacity / together for name, quota in quotas.items()}
    shares = {name: int(part) for name, part in parts.items()}
    # What rounding down left goes to the largest remainders.
    behind = sorted(parts, key=lambda name: (shares[name] - parts[name], name))
    for name in behind[: capacity - sum(shares.values())]:
        shares[name] += 1
    return shares | {OTHERS: 0}


def _in_two(user: str, team: str) -> InputError:
    return InputError(
        f"users: '{user}' is in team '{team}' already; a user is in one team at most, so take '{user}' out of"
        " that one first",
        field="users",
    )


NO_TEAMS = Teams()
