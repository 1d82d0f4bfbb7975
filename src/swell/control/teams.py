"""Teams on a live cluster: kept in the store, obeyed by the scheduler, shown to people.

How slots are shared out among teams is in `swell.policies.by_team`, which the simulator uses as well. What is
ours here: a change is on disk before anybody sees the answer, and one that would break a promise is refused
unless it is forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from swell.control.errors import Conflict, NotFound
from swell.control.model import JobRecord, Phase
from swell.control.scheduler import Scheduler
from swell.control.store import Store
from swell.domain import NO_TEAM, Team, Teams, many
from swell.policies.by_team import TeamUse

SETTING = "teams"


@dataclass(frozen=True, slots=True)
class TeamState:
    """A team as people see it."""

    team: Team
    """Its name is empty for all users who are in no team."""
    use: TeamUse
    """What it may count on now, and what it has."""
    running: int
    waiting: int
    endangered: tuple[str, ...] = ()
    """Jobs whose promised finish the last change puts in danger."""


def stored(store: Store) -> Teams:
    return Teams.from_json(json.loads(store.setting(SETTING) or "[]"))


def states(scheduler: Scheduler) -> list[TeamState]:
    """All teams, then those who are in none; nothing if there are no teams."""
    teams = scheduler.teams
    listed = [*teams.teams, NO_TEAM] if teams else []
    return [state(team, scheduler) for team in listed]


def state(team: Team, scheduler: Scheduler, endangered: tuple[str, ...] = ()) -> TeamState:
    mine = [r for r in scheduler.book.records.values() if scheduler.teams.of(r.owner) == team.name]
    running = sum(bool(record.wanted) for record in mine)
    waiting = sum(r.phase is Phase.QUEUED and not r.wanted for r in mine)
    return TeamState(team, scheduler.uses()[team.name], running, waiting, endangered)


def change(scheduler: Scheduler, store: Store, changed: Team, now_s: float, *, force: bool) -> TeamState:
    """Make a team, or change the one of this name."""
    teams = scheduler.teams.having(changed)
    teams.check_fits(scheduler.most_slots)
    endangered = _put(scheduler, store, teams, now_s, f"team '{changed.name}'", force)
    return state(changed, scheduler, endangered)


def remove(scheduler: Scheduler, store: Store, name: str, now_s: float, *, force: bool) -> TeamState:
    """Remove a team; its users are in no team then."""
    gone = scheduler.teams.get(name)
    if gone is None:
        raise NotFound(f"there is no team '{name}'; 'swell teams list' shows them")
    before = state(gone, scheduler)
    endangered = _put(scheduler, store, scheduler.teams.without(name), now_s, f"removing '{name}'", force)
    return TeamState(gone, before.use, before.running, before.waiting, endangered)


def _put(
    scheduler: Scheduler, store: Store, teams: Teams, now_s: float, what: str, force: bool
) -> tuple[str, ...]:
    """Have these teams from now on; returns the jobs whose promised finish is in danger by that."""
    before = set(scheduler.endangered(scheduler.board.calendar, now_s))
    after = set(scheduler.endangered(scheduler.board.calendar, now_s, teams))
    endangered = tuple(sorted(after - before))
    if endangered and not force:
        raise Conflict(
            f"{what} would break what was promised to {', '.join(endangered)};"
            " choose other quotas, or use --force to change it all the same"
        )
    store.set_setting(SETTING, json.dumps(teams.to_json()))
    scheduler.set_teams(teams, now_s)
    return endangered


def why_waits(record: JobRecord, scheduler: Scheduler, uses: Mapping[str, TeamUse]) -> str:
    """What the job's team has, and who has borrowed slots of it."""
    name = scheduler.teams.of(record.owner)
    use = uses[name]
    who = f"team {name}" if name else "users in no team"
    has = "uses" if name else "use"
    if use.used >= use.own:
        beyond = f" and {use.borrowed} borrowed ones" if use.borrowed else ""
        return f"{who} {has} {'its' if name else 'their'} {many(use.own, 'slot')}{beyond}"
    borrowers = [
        f"{other or 'users in no team'} ({found.borrowed})"
        for other, found in uses.items()
        if other != name and found.borrowed
    ]
    text = f"{who} {has} {use.used} of {'its' if name else 'their'} {many(use.own, 'slot')}"
    return text + (f"; lent to {', '.join(borrowers)} and coming back" if borrowers else "")


def with_reasons(records: Iterable[JobRecord], scheduler: Scheduler) -> list[JobRecord]:
    """The records as lists show them: a job that waits says what its team has."""
    if not scheduler.teams:
        return list(records)
    uses = scheduler.uses()
    return [_with_reason(record, scheduler, uses) for record in records]


def _with_reason(record: JobRecord, scheduler: Scheduler, uses: Mapping[str, TeamUse]) -> JobRecord:
    if record.phase is not Phase.QUEUED or record.wanted or record.reason:
        return record
    limit = scheduler.over_limit.get(record.job_id)
    return replace(record, reason=f"waits: {limit or why_waits(record, scheduler, uses)}")
