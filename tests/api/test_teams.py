"""Teams over HTTP and by the SDK."""

from __future__ import annotations

import pytest
from tests.api.conftest import Platform

from swell.api.refusals import Forbidden
from swell.control.errors import NotFound
from swell.domain import InputError


def test_an_administrator_makes_teams_and_everybody_sees_their_slots(busy_platform: Platform) -> None:
    with busy_platform.client("root", "admin") as admin, busy_platform.client("bob") as bob:
        assert bob.teams() == []
        made = admin.set_team("red", slots=1, users=["bob", "ann", "bob"])
        assert (made.slots, made.users, made.used) == (1, ["bob", "ann"], 0)
        admin.set_team("blue", slots=1, users=["eve"])
        mine, other, rest = bob.teams()
        assert (mine.users, other.users) == (["bob", "ann"], []), (
            "who is in other teams is not bob's business"
        )
        assert admin.teams()[1].users == ["eve"] and rest.name == ""
        for refused in (lambda: bob.set_team("mine", slots=4), lambda: bob.remove_team("red")):
            with pytest.raises(Forbidden):
                refused()
        with pytest.raises(InputError, match="1000 slots together"):
            admin.set_team("red", slots=999)
        with pytest.raises(InputError, match="'eve' is in team 'blue' already"):
            admin.set_team("red", slots=1, users=["eve"])
        kept = admin.set_team("red", slots=2)
        assert (kept.slots, kept.users) == (2, ["bob", "ann"]), "only what was given is changed"
        assert admin.set_team("red", slots=2, users=[]).users == []
        assert admin.remove_team("blue", force=True).name == "blue"
        with pytest.raises(NotFound, match="swell teams list"):
            admin.remove_team("blue")
    audited = (busy_platform.home / "audit.log").read_text()
    assert '"path": "/v1/teams/red"' in audited and '"status": 403' in audited
